"""Takes the sparse snapshots of a window, one after each step, and seals the window after the last."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.boundary import DISTURBED, WriteWatch
from cpsr.checkpoint.copying import copy_beside_training
from cpsr.checkpoint.device_copy import DeviceCopy, device_of
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_ring import CLOSE_SECONDS, MemoryRing, Slot
from cpsr.checkpoint.memory_states import MemoryState, iteration_in
from cpsr.checkpoint.parts import Held
from cpsr.experts.memory_turns import CopyBudget
from cpsr.replay.schedule import WindowLayout
from cpsr.state.codec import SmallState
from cpsr.state.shard import Shard

__all__ = ["FILES", "FILES_WITH_PEERS", "OnSealed", "Recorder", "Window"]

# One is filled. The one before may not be complete on every rank yet. So the one before that must still be there.
FILES = 3
# The peers have an older one, and may be receiving the next. A process that is killed meanwhile goes back to these.
FILES_WITH_PEERS = 4

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


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
        sealing: it is, or is going to be.
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
    sealing: bool = False
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


# Follows the windows that are sealed: the file, the first iteration, and as `send` whether it goes to the peers.
OnSealed = Callable[..., None]


class Recorder:
    """Fills one file after the other. An error ends the window that is being filled, never the training.

    Copies and hashes are made by a thread of its own, or on a stream of the device; all else is for the training
    thread.

    Args:
        memory: names and stamps of the files.
        shard: gives the engine's views.
        report: takes what has failed.
        files: how many windows have memory.
        writes: whether the loop changes weights while they are copied.

    Attributes:
        files: how many windows have memory.
        copies: what the copies took.
        on_sealed: called for each window that is sealed; in the worker.
    """

    def __init__(
        self,
        memory: SharedMemory,
        shard: Callable[[], Shard],
        report: Callable[[str], None],
        files: int = FILES,
        writes: WriteWatch | None = None,
    ) -> None:
        self._memory, self._shard, self._report = memory, shard, report
        self._writes = WriteWatch() if writes is None else writes
        self.files, self.copies = files, CopyBudget()
        self.on_sealed: OnSealed | None = None
        self._replicated_at: int | None = None
        self._sent_at: int | None = None
        self._ring = MemoryRing(memory, "window", device_of(shard()))
        self._window: Window | None = None
        self._copy: Future[float] | None = None  # its seconds; of that window's newest snapshot, until the next update
        self._copy_began = 0.0
        self._hash_seconds = 0.0  # of the last snapshot; in the worker

    def adopt(self, path: Path) -> MemoryState:
        """Keep a window of the life before as one of this life. Two newer ones are complete before it is overwritten.

        Args:
            path: of its file; one that a peer has held, or has sent, becomes a file of this rank.

        Raises:
            OSError: it is not there any more, or another process has it.
        """
        paths = [self._ring.path(number) for number in range(self.files)]
        if path not in paths:  # this rank alone has a use for it, so it is not copied
            path = path.replace(min(paths, key=iteration_in))
        return self._ring.adopt(paths.index(path))

    def replicated(self, iteration: int | None) -> None:
        """Other machines have this window of every rank: this rank's own stays until they have the next one.

        With three files there is no room for it, and newer windows overwrite it.
        """
        self._replicated_at = iteration
        if iteration is None:
            self._sent_at = None

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
        kept = {self._replicated_at, self._sent_at} if self.files >= FILES_WITH_PEERS else set()
        self._window = None
        try:
            slot = self._ring.next(self.files, layout.size, kept, before)
            content = slot.file.bytes
            layout.copy_others(self._shard(), content)
            self._window = Window(slot, layout, layout.held(content), iteration, [SmallState(small_state())])
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
        try:
            if step > 0:
                window.small.append(SmallState(outcome))
            shard = self._shard()
            pairs = self._pairs(window, step, shard)
            if not self._writes.disturbed:
                self._writes.begin(self, shard, thorough=False)
            work: Callable[[], float] = partial(_copied, pairs)
            if self._ring.stream is not None:
                copy = DeviceCopy(self._ring.stream, shard)
                copy.enqueue((target, source.detach().to(target.dtype)) for target, source in pairs)
                work = copy.result
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._writes.end(self)
            self._drop(window, f"the snapshot of iteration {iteration} failed: {error}")
            return None
        if send and window.is_taken:
            window.sent, self._sent_at = True, window.first
        copy_ends, self._copy_began = self._ring.copy(work), time.perf_counter()
        self._copy = copy_ends
        self._ring.submit(window.slot, self._hash, window, step, copy_ends)
        if self._writes.disturbed:
            wait([copy_ends])
        if self._writes.disturbed or (self._writes.trusted and not window.sent):
            self._seal_whole(window)
        return window if window.sent else None

    def look(self) -> None:
        """A forward begins: a window with weights that the loop has changed for it is not used."""
        if self._copy is not None and self._writes.changed:
            self._spoil()

    def finish(self) -> None:
        """Wait for a running copy; call it before the optimizer changes the state."""
        copy, self._copy, window = self._copy, None, self._window
        if copy is None or window is None:
            return
        overlap_seconds = time.perf_counter() - self._copy_began
        try:
            copy_seconds = copy.result() + self._hash_seconds
            self.copies.note(window.layout.copied_bytes(window.taken - 1), copy_seconds, overlap_seconds)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"the snapshot of iteration {window.last} failed: {error}")
        self._confirm(window)

    def _confirm(self, window: Window) -> None:
        """The newest copy is complete: if its sources have changed meanwhile, it does not count."""
        if self._writes.look(forward=False):
            self._spoil()
        self._writes.end(self)
        self._seal_whole(window)

    def _seal_whole(self, window: Window) -> None:
        """Its newest copy is, or will be, that of one state: seal a window that ends with it, once."""
        if window.is_taken and not window.dropped and not window.sealing:
            window.sealing = True
            self._ring.submit(window.slot, self._seal, window)

    def _spoil(self) -> None:
        """The loop has changed weights that were being copied: the window is not used, even if it is sealed."""
        window = self._window
        if window is not None and not window.dropped:
            self._drop(window, DISTURBED)
            self._ring.submit(window.slot, window.slot.file.unseal).result()  # after it was sealed, if it was

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
        window = self._window
        if window is not None and self._copy is not None and not self._copy.done():
            window.dropped = True
        if self._ring.hangs():
            self._report(f"a copy to host memory has not ended within {CLOSE_SECONDS:g} s: its memory is left as it is")
            return
        if window is not None and self._copy is not None:
            self._confirm(window)
        self._ring.close(remove=remove)

    def _pairs(self, window: Window, step: int, shard: Shard) -> _Pairs:
        """Target and source of each copy of a snapshot; as the last time, while layout and views are the same."""
        planned: tuple[Any, Any, _Pairs] = window.slot.plans.get(step, (None, None, []))
        layout, operators, pairs = planned
        if layout is not window.layout or operators is not shard.operators:
            pairs = list(window.layout.copies(step, shard, window.slot.file.bytes))
            window.slot.plans[step] = window.layout, shard.operators, pairs
        return pairs

    def _drop(self, window: Window, why: str | None = None) -> None:
        """Nothing of it counts, and its file is the next to be filled: the others have whole windows."""
        known, window.dropped = window.dropped, True
        window.slot.iteration = -1
        if why is not None and not known:
            self._report(f"the window of iterations from {window.first} on is dropped: {why}")

    def _hash(self, window: Window, step: int, copy: Future[float]) -> None:
        """Hash what was copied; in the worker."""
        iteration, started = window.first + step, time.perf_counter()
        if window.dropped:
            return
        try:
            copy.result()  # complete; nothing is sealed of a copy that has failed
            window.layout.taken(window.held, step, iteration)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"iteration {iteration} could not be hashed: {error}")
        self._hash_seconds = time.perf_counter() - started

    def _seal(self, window: Window) -> None:
        """The window is complete; in the worker."""
        if window.dropped:
            return
        try:
            for small in window.small:
                small.wait()
            start, *outcomes = [small.tree() for small in window.small]
            scalars = {"start": start, "last": window.last, "outcomes": outcomes, "life": self._memory.life}
            views = window.layout.shard(window.slot.file.bytes)
            self._ring.seal(window.slot, "window", views, window.first, scalars, window.held)
            if self.on_sealed is not None:
                self.on_sealed(window.slot.file.path, window.first, send=window.sent)
            window.settled = True
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"it could not be sealed: {error}")


def _copied(pairs: _Pairs) -> float:
    started = time.perf_counter()
    copy_beside_training(pairs)
    return time.perf_counter() - started
