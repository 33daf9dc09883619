"""Takes the sparse snapshots of a window, one after each step, and seals the window after the last."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cpsr.checkpoint.boundary import DISTURBED, WriteWatch
from cpsr.checkpoint.copying import CopyEngine, CopyPlan, Publish
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_ring import CLOSE_SECONDS, MemoryRing, Slot
from cpsr.checkpoint.memory_states import MemoryState, describe
from cpsr.checkpoint.parts import Held
from cpsr.checkpoint.running_copy import RunningCopy
from cpsr.experts.copy_budget import CopyBudget
from cpsr.replay.schedule import WindowLayout
from cpsr.state.codec import SCALARS, SmallState, encode
from cpsr.state.shard import Shard

__all__ = ["FILES", "FILES_WITH_PEERS", "Recorder", "Window"]

# One is filled. The one before may not be complete on every rank yet. So the one before that must still be there.
FILES = 3
# The peers have an older one, and may be receiving the next. A process that is killed meanwhile goes back to these.
FILES_WITH_PEERS = 4


@dataclass
class Window:
    """The window that is being filled.

    Attributes:
        slot: takes its snapshots.
        layout: of them.
        held: what the file has of them.
        first: its first iteration.
        small: the small state of that iteration, and the outcomes of the steps after that.
        taken: number of its snapshots.
        sent: whether it goes to the peers once it is sealed.
        dropped: it will not be sealed.
        settled: it is sealed, and offered to the peers where it is sent.
    """

    slot: Slot
    layout: WindowLayout
    held: Held
    first: int
    small: list[SmallState]
    taken: int = 0
    sent: bool = False
    dropped: bool = False
    settled: bool = False

    @property
    def last(self) -> int:
        """Iteration of its newest snapshot."""
        return self.first + self.taken - 1

    @property
    def is_taken(self) -> bool:
        """Whether all its snapshots have begun."""
        return self.taken == len(self.layout.turns)

    def is_pending(self) -> bool:
        """Whether it may still be offered to the peers."""
        return not (self.dropped or self.settled)


class Recorder:
    """Fills one file after the other. An error ends the window that is being filled, never the training.

    A window is one buffer that several copies fill. All of it is for the training thread, but for what the engine does.

    Args:
        memory: names and stamps of the files.
        shard: gives the engine's views.
        report: takes what has failed.
        files: how many windows have memory.
        writes: whether the loop changes weights while they are copied.
        after_step: inside, work follows the last step; see `DeviceSteps.after_step`.

    Attributes:
        files: how many windows have memory.
        copies: what the copies took.
        on_sealed: called for each window that is sealed, in the engine's thread: with the file, the first iteration,
            and as `send` whether it goes to the peers.
    """

    def __init__(
        self,
        memory: SharedMemory,
        shard: Callable[[], Shard],
        report: Callable[[str], None],
        files: int = FILES,
        writes: WriteWatch | None = None,
        after_step: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._life, self._shard, self._report = memory.life, shard, report
        self.files, self.copies, self._after_step = files, CopyBudget(), after_step
        self.on_sealed: Callable[..., None] = lambda path, iteration, *, send: None
        self._kept: Collection[int] = ()
        self._engine = CopyEngine.of("window", shard(), writes)
        self._ring = MemoryRing(memory, "window", self._engine)
        self._window: Window | None = None
        self._copy: RunningCopy | None = None  # of that window's newest snapshot, until the next update
        self._copy_began = 0.0
        self._hash_seconds = 0.0  # of the last snapshot that a device has copied; in the engine's thread

    def adopt(self, path: Path) -> MemoryState:
        """Keep a window of the life before as one of this life. Two newer ones are complete before it is overwritten.

        Args:
            path: of its file; one that a peer has held, or has sent, becomes a file of this rank.

        Raises:
            OSError: it is not there any more, or another process has it.
        """
        paths = [self._ring.path(number) for number in range(self.files)]
        if path not in paths:  # this rank alone has a use for it, so it is not copied
            states = map(describe, paths)
            ages = {path: -1 if state is None else state.iteration for path, state in zip(paths, states, strict=True)}
            path = path.replace(min(paths, key=ages.__getitem__))
        return self._ring.adopt(paths.index(path))

    def keep(self, iterations: Collection[int]) -> None:
        """Overwrite these windows last, which other machines have or get; with three files there is no room for it."""
        self._kept = iterations

    def prepare(self, layout: WindowLayout) -> None:
        """Take the memory of all windows but adopted ones.

        Raises:
            OSError: there is too little.
            SaveError: CUDA refuses to pin it.
        """
        for number in range(self.files):
            if number not in self._ring.slots:
                self._ring.open(number, layout.size)

    def begin_window(self, layout: WindowLayout, iteration: int, small_state: Callable[[], Any]) -> None:
        """Begin a window whose first snapshot is that of this iteration; `small_state` gives its small state."""
        self.finish()
        # That of the window before may not be sealed everywhere. With four files the peers' windows stay, too.
        before = None if self._window is None or self._window.dropped else self._window.slot
        kept = self._kept if self.files >= FILES_WITH_PEERS else ()
        self._window = None
        try:
            slot = self._ring.next(self.files, layout.size, kept, before)
            with self._after_step():
                layout.copy_others(self._shard(), slot.file.bytes)
                small = SmallState(small_state())
            if slot.held is None or slot.held.parts is not layout.parts:
                slot.held = Held(layout.parts, slot.file.bytes)
            slot.held.overwrite(layout.parts.names)
            self._window = Window(slot, layout, slot.held, iteration, [small])
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._report(f"the window that begins at iteration {iteration} is not kept: {error}")
            return
        slot.iteration = iteration

    def capture(self, iteration: int, outcome: Any = None, *, send: bool = False) -> Window | None:
        """Begin the snapshot of one iteration; the window ends with that of its last.

        Args:
            iteration: the finished one.
            outcome: of its step, as `DeepSpeedRepeatedSteps.outcome` gives it; not of the first.
            send: whether the window goes to the peers if it ends here.

        Returns:
            A window that ends here and goes to the peers.
        """
        self.finish()
        window = self._window
        if window is None or window.dropped:
            return None
        step = window.taken
        if iteration != window.first + step:
            self._drop(window)  # one was left out: it would lack what was to be in it
            return None
        window.taken += 1
        sent = send and window.is_taken
        try:
            with self._after_step():
                if step > 0:
                    window.small.append(SmallState(outcome))
                shard = self._shard()
                plan, disturbed = partial(self._plan, window, step, shard), partial(self._spoil, window, DISTURBED)
                running = self._engine.start(plan, None, shard, early=not sent, on_disturbed=disturbed)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"the snapshot of iteration {iteration} failed: {error}")
            return None
        self._copy, self._copy_began = running, time.perf_counter()
        if self._engine.device is not None:
            window.slot.last_work = self._engine.submit(self._hash, window, step, running)
        if sent:
            window.sent = True
        if window.is_taken:
            prepare = partial(self._prepare, window, running)
            window.slot.last_work = self._engine.seal(prepare, partial(self._tell, window), running)
        return window if sent else None

    def finish(self) -> None:
        """Wait for a running copy; call it before the optimizer changes the state."""
        running, self._copy, window = self._copy, None, self._window
        if running is None or window is None:
            return
        overlap_seconds = time.perf_counter() - self._copy_began
        try:
            self._engine.finish(running)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._spoil(window, f"the snapshot of iteration {window.last} failed: {error}")
            return
        copied_bytes = window.layout.copied_bytes(window.taken - 1)
        self.copies.note(copied_bytes, running.seconds + self._hash_seconds, overlap_seconds)

    def _spoil(self, window: Window, why: str) -> None:
        """Its newest copy is not that of one state: the window is not used, even if it is sealed; from any thread."""
        self._drop(window, why)
        if window.slot.last_work is not None:
            wait([window.slot.last_work], CLOSE_SECONDS)  # a device may hang
        window.slot.file.unseal()

    def forget(self) -> None:
        """The run has gone back: no window leads to its state."""
        self.finish()
        if self._window is not None:
            self._drop(self._window)
        self._ring.forget()

    def close(self, *, remove: bool) -> None:
        """Let the memory go.

        Args:
            remove: the windows go; else they stay for the next life.
        """
        window, running = self._window, self._copy
        if running is not None and running.is_sent:
            self.finish()
        elif running is not None and window is not None:
            window.dropped = True
            running.confirm(unchanged=False)
        if not self._ring.close(remove=remove):
            self._report(f"a copy to host memory has not ended within {CLOSE_SECONDS:g} s: its memory is left as it is")

    def _plan(self, window: Window, step: int, shard: Shard) -> CopyPlan:
        make = partial(window.layout.copies, step, shard, window.slot.file.bytes)
        return self._engine.plan(window.held, shard, make, step, **window.layout.bounds(step))

    def _drop(self, window: Window, why: str | None = None) -> None:
        """Nothing of it counts, and its file is the next to be filled: the others have whole windows."""
        known, window.dropped = window.dropped, True
        window.slot.iteration = -1
        if why is not None and not known:
            self._report(f"the window of iterations from {window.first} on is dropped: {why}")

    # In the engine's thread

    def _hash(self, window: Window, step: int, running: RunningCopy) -> None:
        """Hash what a device has copied."""
        running.result()  # nothing is sealed of a copy that has failed
        started = time.perf_counter()
        window.held.hash_rest(window.held.parts.between(**window.layout.bounds(step)))
        self._hash_seconds = time.perf_counter() - started

    def _prepare(self, window: Window, running: RunningCopy) -> Publish | None:
        """Describe a window whose last copy is through, if none has failed."""
        if window.dropped:
            return None
        try:
            running.result()
            for small in window.small:
                small.wait()
            start, *outcomes = [small.tree() for small in window.small]
            scalars = {"start": start, "last": window.last, "outcomes": outcomes, "life": self._life}
            window.held.taken_at = window.layout.taken_at(window.first)
            views = window.layout.shard(window.slot.file.bytes)
            publish = window.slot.file.prepare(
                "window", views, window.first, encode(scalars, prefix=SCALARS), held=window.held
            )
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"it could not be sealed: {error}")
            return None
        return lambda: None if window.dropped else publish()  # it may be dropped while this thread is here

    def _tell(self, window: Window, counts: bool) -> None:
        """The window counts from now on, or never."""
        if counts and not window.dropped:
            self.on_sealed(window.slot.file.path, window.first, send=window.sent)
            window.settled = True
