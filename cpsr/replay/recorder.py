"""Takes the sparse snapshots of a window, one after each step, and seals the window after the last."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.boundary import DISTURBED, WriteWatch
from cpsr.checkpoint.copying import copy_beside_training
from cpsr.checkpoint.device_copy import DeviceCopy, Pinning, device_of
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import SlabSize, describe, iteration_in
from cpsr.checkpoint.parts import Held
from cpsr.experts.memory_turns import CopyBudget
from cpsr.replay.schedule import WindowLayout
from cpsr.state.codec import SmallState
from cpsr.state.shard import OperatorState, Shard

__all__ = ["FILES", "FILES_WITH_PEERS", "OnSealed", "Recorder", "Window"]

# One is filled. The one before may not be complete on every rank yet. So the one before that must still be there.
FILES = 3
# The peers have an older one, and may be receiving the next. A process that is killed meanwhile goes back to these.
FILES_WITH_PEERS = 4

CLOSE_SECONDS = 5.0  # for a copy that a device has still to make
# Memory that a device may still write to stays mapped, registered and locked until the process ends.
_left_alone: list["Recorder"] = []

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Window:
    """The window that is being filled.

    Attributes:
        slot: number of its file.
        layout: of its snapshots.
        file: takes them.
        held: what the file has of them.
        first: its first iteration.
        small: the small state of that iteration.
        outcomes: of the steps after that.
        sent: whether it goes to the peers once it is sealed.
        dropped: it will not be sealed.
        settled: it is sealed, and offered to the peers where it is sent.
    """

    slot: int
    layout: WindowLayout
    file: MemoryFile
    held: Held
    first: int
    small: SmallState
    outcomes: list[SmallState] = field(default_factory=list)
    taken: int = 0
    sent: bool = False
    dropped: bool = False
    settled: bool = False

    def is_pending(self) -> bool:
        """Whether it may still be offered to the peers."""
        return not (self.dropped or self.settled)


# Follows the windows that are sealed: the file, the first iteration, and as `send` whether it goes to the peers.
OnSealed = Callable[..., None]


@dataclass
class _Running:
    """A copy that has begun.

    Attributes:
        window: to which it belongs.
        iteration: that it copies.
        done: its seconds, once it is complete.
        bytes: of it.
        begun_at: by the host's clock.
        counts: its sources are known to stay unchanged until it is complete.
    """

    window: Window
    iteration: int
    done: Future[float]
    bytes: int
    begun_at: float
    counts: bool = False


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
        self._files: list[MemoryFile | None] = [None] * files
        self._firsts = [-1] * files  # first iteration of the window that each file holds, or is filled with
        self._replicated_at: int | None = None
        self._sent_at: int | None = None
        self._pinnings: dict[int, Pinning] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpsr-window")
        self._device = device_of(shard())
        self._stream: Any = None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._window: Window | None = None
        self._running: _Running | None = None
        self._hash_seconds = 0.0  # of the last snapshot; in the worker
        # By file and place in the window, while layout and views are the same.
        self._planned: dict[tuple[int, int], tuple[WindowLayout, dict[str, OperatorState], _Pairs]] = {}

    def adopt(self, path: Path) -> Path:
        """Keep a window of the life before as one of this life. Two newer ones are complete before it is overwritten.

        Args:
            path: of its file; one that a peer has held, or has sent, becomes a file of this rank.

        Returns:
            Where it lies now.

        Raises:
            OSError: it is not there any more, or another process has it.
        """
        paths = [self._memory.path(f"window-{slot}") for slot in range(len(self._files))]
        if path in paths:
            slot = paths.index(path)
        else:  # this rank alone has a use for it, so it is not copied
            slot = min(range(len(paths)), key=lambda one: iteration_in(paths[one]))
            path.replace(paths[slot])
        found = describe(paths[slot])
        if found is None:
            raise OSError(f"{path} holds no window any more")
        file = self._memory.file(f"window-{slot}", found.size)
        file.restamp(self._memory.life, self._memory.branch)
        self._files[slot], self._firsts[slot] = file, found.state.iteration
        return file.path

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
        for slot, file in enumerate(self._files):
            if file is None:
                self._open(slot, layout.size)

    def begin_window(
        self, layout: WindowLayout, iteration: int, small_state: Callable[[], Any], *, send: bool = False
    ) -> Window | None:
        """Begin a window after this iteration, with its first snapshot.

        Args:
            layout: of the window.
            iteration: the finished one.
            small_state: gives it whole.
            send: as for `capture`.

        Returns:
            As `capture`.
        """
        self.finish()
        slot = self._free()
        self._window, self._firsts[slot] = None, -1
        try:
            file = self._open(slot, layout.size)
            file.unseal()
            layout.copy_others(self._shard(), file.bytes)
            window = Window(slot, layout, file, layout.held(file.bytes), iteration, SmallState(small_state()))
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._report(f"the window that begins at iteration {iteration} is not kept: {error}")
            return None
        self._window, self._firsts[slot] = window, iteration
        return self.capture(0, iteration, send=send)

    def _free(self) -> int:
        """The file to be overwritten next: never that of the window before, which may not be sealed everywhere."""
        kept = {self._replicated_at, self._sent_at} if len(self._files) >= FILES_WITH_PEERS else set()
        before = None if self._window is None or self._window.dropped else self._window.slot
        slots = (slot for slot in range(len(self._files)) if slot != before)
        return min(slots, key=lambda slot: (self._firsts[slot] in kept, self._firsts[slot]))

    def capture(self, step: int, iteration: int, outcome: Any = None, *, send: bool = False) -> Window | None:
        """Begin the snapshot of one iteration; the window ends with that of its last.

        Args:
            step: place in the window; 0 is captured by `begin_window`.
            iteration: the finished one.
            outcome: of its step, as `DeepSpeedRepeatedSteps.outcome` gives it.
            send: whether the window goes to the peers if it ends here.

        Returns:
            A window that ends here and goes to the peers.
        """
        self.finish()
        window = self._window
        if window is None or window.dropped:
            return None
        if window.taken != step:
            self._drop(window)  # one was left out: it would lack what was to be in it
            return None
        window.taken += 1
        try:
            if step > 0:
                window.outcomes.append(SmallState(outcome))
            shard = self._shard()
            pairs = self._pairs(window, step, shard)
            if not self._writes.disturbed:
                self._writes.begin(self, shard, thorough=False)
            work: Callable[[], float] = partial(self._copied, pairs)
            if self._stream is not None:
                copy = DeviceCopy(self._stream, shard)
                copy.enqueue(_on_device(pairs))
                work = copy.result
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._writes.end(self)
            self._drop(window, f"the snapshot of iteration {iteration} failed: {error}")
            return None
        if send and step + 1 == len(window.layout.turns):
            window.sent, self._sent_at = True, window.first
        done = self._worker.submit(work)
        begun_at, size = time.perf_counter(), window.layout.copied_bytes(step)
        running = self._running = _Running(window, iteration, done, size, begun_at)
        self._worker.submit(self._hash, running, step)
        if self._writes.disturbed:
            wait([done])
        if self._writes.disturbed or (self._writes.trusted and not window.sent):
            self._count(running)
        return window if window.sent else None

    def look(self) -> None:
        """A forward begins: a window with weights that the loop has changed for it is not used."""
        if self._running is not None and self._writes.changed:
            self._spoil(self._running)

    def finish(self) -> None:
        """Wait for a running copy; call it before the optimizer changes the state."""
        running, self._running = self._running, None
        if running is None:
            return
        overlap_seconds = time.perf_counter() - running.begun_at
        try:
            self.copies.note(running.bytes, running.done.result() + self._hash_seconds, overlap_seconds)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(running.window, f"the snapshot of iteration {running.iteration} failed: {error}")
        self._confirm(running)

    def _confirm(self, running: _Running) -> None:
        """The copy is complete: if its sources have changed meanwhile, it does not count."""
        if self._writes.look(forward=False):
            self._spoil(running)
        self._writes.end(self)
        self._count(running)

    def _count(self, running: _Running) -> None:
        """The copy is, or will be, that of one state: seal a window that ends with it."""
        window = running.window
        if not running.counts and not window.dropped and window.taken == len(window.layout.turns):
            self._worker.submit(self._seal, window, running.iteration)
        running.counts = True

    def _spoil(self, running: _Running) -> None:
        """The loop has changed weights that were being copied: the window is not used, even if it is sealed."""
        if not running.window.dropped:
            self._drop(running.window, DISTURBED)
            self._worker.submit(running.window.file.unseal).result()  # after it was sealed, if it was

    def forget(self) -> None:
        """The run has gone back: no window leads to its state."""
        if not any(self._files):
            return
        self.finish()
        if self._window is not None:
            self._drop(self._window)
        self._worker.submit(lambda: None).result()  # what is being sealed now
        for slot, file in enumerate(self._files):
            if file is not None:
                file.unseal()
                self._firsts[slot] = -1

    def close(self, *, remove: bool) -> None:
        """Let the memory go.

        Args:
            remove: the windows go; else they stay for the next life.
        """
        running = self._running
        if running is not None and not running.done.done():
            running.window.dropped = True
        if running is not None and wait([running.done], CLOSE_SECONDS).not_done:
            self._report(f"a copy to host memory has not ended within {CLOSE_SECONDS:g} s: its memory is left as it is")
            self._worker.shutdown(wait=False)
            _left_alone.append(self)
            return
        if running is not None:
            self._confirm(running)
        self._worker.shutdown(wait=True)
        while self._pinnings:
            self._pinnings.popitem()[1].undo()
        for slot, file in enumerate(self._files):
            if file is not None:
                self._files[slot] = None
                file.close(remove=remove)

    def _pairs(self, window: Window, step: int, shard: Shard) -> _Pairs:
        """Target and source of each copy of a snapshot."""
        planned = self._planned.get((window.slot, step))
        if planned is None or planned[0] is not window.layout or planned[1] is not shard.operators:
            pairs = list(window.layout.copies(step, shard, window.file.bytes))
            planned = self._planned[window.slot, step] = window.layout, shard.operators, pairs
        return planned[2]

    def _open(self, slot: int, size: SlabSize) -> MemoryFile:
        file = self._files[slot]
        fits = file is not None and file.size.buffer_bytes == size.buffer_bytes
        if file is None or not fits or file.size.header_bytes < size.header_bytes:
            self._planned.clear()
            if file is not None:
                if slot in self._pinnings:
                    self._pinnings.pop(slot).undo()
                file.close(remove=True)
                file = self._files[slot] = None  # its memory is free before the new one is taken
            file = self._files[slot] = self._memory.file(f"window-{slot}", size)
        if self._device is not None and slot not in self._pinnings:  # also one that was adopted
            self._pinnings[slot] = Pinning(file.bytes, self._device)
        return file

    def _drop(self, window: Window, why: str | None = None) -> None:
        """Nothing of it counts, and its file is the next to be filled: the others have whole windows."""
        known, window.dropped = window.dropped, True
        self._firsts[window.slot] = -1
        if why is not None and not known:
            self._report(f"the window of iterations from {window.first} on is dropped: {why}")

    def _copied(self, pairs: _Pairs) -> float:
        started = time.perf_counter()
        copy_beside_training(pairs)
        return time.perf_counter() - started

    def _hash(self, running: _Running, step: int) -> None:
        """Hash what was copied; in the worker."""
        window, started = running.window, time.perf_counter()
        if window.dropped:
            return
        try:
            running.done.result()  # complete; nothing is sealed of a copy that has failed
            window.layout.taken(window.held, step, running.iteration)
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"iteration {running.iteration} could not be hashed: {error}")
        self._hash_seconds = time.perf_counter() - started

    def _seal(self, window: Window, iteration: int) -> None:
        """The window is complete with this iteration; in the worker."""
        if window.dropped:
            return
        try:
            for small in (window.small, *window.outcomes):
                small.wait()
            outcomes = [small.tree() for small in window.outcomes]
            start, life = window.small.tree(), self._memory.life
            scalars = {"start": start, "last": iteration, "outcomes": outcomes, "life": life}
            stamp = self._memory.rank, self._memory.life, "window"
            views = window.layout.shard(window.file.bytes)
            window.file.seal(*stamp, views, window.first, scalars, branch=self._memory.branch, held=window.held)
            if self.on_sealed is not None:
                self.on_sealed(window.file.path, window.first, send=window.sent)
            window.settled = True
        except Exception as error:  # noqa: BLE001 - training goes on without this window
            self._drop(window, f"it could not be sealed: {error}")


def _on_device(pairs: _Pairs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same copies, with types converted on the device."""
    for target, source in pairs:
        yield target, source.detach().to(target.dtype)
