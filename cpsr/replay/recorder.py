"""Takes the sparse snapshots of a window, one after each step, and seals the window after the last."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cpsr.checkpoint.device_copy import DeviceCopy, device_of
from cpsr.checkpoint.host_copy import copy_beside_training
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import describe
from cpsr.checkpoint.parts import Held
from cpsr.checkpoint.pinning import Pinning
from cpsr.errors import CPSRError
from cpsr.replay.layout import WindowLayout
from cpsr.state.shard import OperatorState, Shard
from cpsr.state.small_state import SmallState

__all__ = ["FILES", "Copied", "Recorder"]

# One is filled. The one before may not be complete on every rank yet. So the one before that must still be there.
FILES = 3

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Copied:
    """Cost of one snapshot.

    Attributes:
        bytes: that it copied.
        seconds: that the copy took.
        overlap_seconds: from its begin until the optimizer needed it to be complete.
    """

    bytes: int
    seconds: float
    overlap_seconds: float


@dataclass
class _Window:
    """The window that is being filled."""

    slot: int
    layout: WindowLayout
    file: MemoryFile
    held: Held
    first: int
    small: SmallState
    taken: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class _Running:
    """A copy that has begun."""

    done: Future[float]
    bytes: int
    begun_at: float


class Recorder:
    """Fills one file after the other. An error ends the window that is being filled, never the training.

    Copies and hashes are made by a thread of its own, or on a stream of the device; all else is for the training
    thread.

    Args:
        memory: names and stamps of the files.
        shard: gives the engine's views.
        report: takes what has failed.
    """

    def __init__(
        self,
        memory: SharedMemory,
        shard: Callable[[], Shard],
        report: Callable[[str], None],
    ) -> None:
        self._memory, self._shard, self._report = memory, shard, report
        self._files: list[MemoryFile | None] = [None] * FILES
        self._firsts = [-1] * FILES  # first iteration of the window that each file holds, or is filled with
        self._pinnings: dict[int, Pinning] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpsr-window")
        self._device = device_of(shard())
        self._stream: Any = None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._window: _Window | None = None
        self._running: _Running | None = None
        # By file and place in the window, while layout and views are the same.
        self._planned: dict[tuple[int, int], tuple[WindowLayout, dict[str, OperatorState], _Pairs]] = {}

    def adopt(self, name: str) -> None:
        """Keep a window of the life before as one of this life. Two newer ones are complete before it is overwritten.

        Args:
            name: of its file.

        Raises:
            OSError: it is not there any more, or another process has it.
        """
        slot = next(slot for slot in range(FILES) if self._memory.path(f"window-{slot}").name == name)
        path = self._memory.path(f"window-{slot}")
        found = describe(path)
        if found is None:
            raise OSError(f"{path} holds no window any more")
        file = self._memory.file(f"window-{slot}", found[3][0])
        file.restamp(self._memory.life, self._memory.branch)
        self._files[slot], self._firsts[slot] = file, found[0].iteration

    def prepare(self, layout: WindowLayout) -> None:
        """Take the memory of all windows but adopted ones.

        Raises:
            OSError: there is too little.
            SaveError: CUDA refuses to pin it.
        """
        for slot, file in enumerate(self._files):
            if file is None:
                self._open(slot, layout.bytes)

    def begin(self, layout: WindowLayout, iteration: int, scalars: Any) -> None:
        """Begin a window after this iteration, with its first snapshot.

        Args:
            layout: of the window.
            iteration: the finished one.
            scalars: the whole small state.
        """
        self.finish()
        busy = None if self._window is None else self._window.slot
        slot = min((one for one in range(FILES) if one != busy), key=lambda one: self._firsts[one])
        self._window = None
        try:
            file = self._open(slot, layout.bytes)
            file.unseal()
            self._firsts[slot] = iteration
            layout.copy_others(self._shard(), file.bytes)
            window = _Window(slot, layout, file, layout.held(file.bytes), iteration, SmallState(scalars))
        except (OSError, KeyError, CPSRError) as error:
            self._report(f"the window that begins at iteration {iteration} is not kept: {error}")
            return
        self._window = window
        self.take(0, iteration)

    def take(self, step: int, iteration: int) -> None:
        """Begin the snapshot of one iteration; the window ends with that of its last.

        Args:
            step: place in the window; 0 is taken by `begin`.
            iteration: the finished one.
        """
        self.finish()
        window = self._window
        if window is None or window.dropped:
            return
        if window.taken != step:
            self._drop(window)  # one was left out: it would lack what was to be in it
            return
        window.taken += 1
        try:
            shard = self._shard()
            pairs = self._pairs(window, step, shard)
        except (KeyError, CPSRError) as error:
            self._fail(window, iteration, error)
            return
        work: Callable[[], float] = partial(self._copied, pairs)
        if self._stream is not None:
            copy = DeviceCopy(self._stream, shard)
            copy.enqueue(_on_device(pairs))
            work = copy.result
        done = self._worker.submit(work)
        self._running = _Running(done, window.layout.copied_bytes(step), time.perf_counter())
        self._worker.submit(self._settle, window, step, iteration)

    def finish(self) -> Copied | None:
        """Wait for a running copy; call it before the optimizer changes the state."""
        running, self._running = self._running, None
        if running is None:
            return None
        overlap = time.perf_counter() - running.begun_at
        try:
            return Copied(running.bytes, running.done.result(), overlap)
        except (RuntimeError, OSError, CPSRError) as error:
            if self._window is not None:
                self._fail(self._window, self._window.first, error)
            return None

    def forget(self) -> None:
        """The run has gone back: no window leads to its state."""
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
        if self._window is not None and self._running is not None and not self._running.done.done():
            self._window.dropped = True
        self._worker.shutdown(wait=True)
        for pinning in self._pinnings.values():
            pinning.undo()
        for file in self._files:
            if file is not None:
                file.close(remove=remove)

    def _pairs(self, window: _Window, step: int, shard: Shard) -> _Pairs:
        """Target and source of each copy of a snapshot."""
        planned = self._planned.get((window.slot, step))
        if planned is None or planned[0] is not window.layout or planned[1] is not shard.operators:
            pairs = list(window.layout.copies(step, shard, window.file.bytes))
            planned = self._planned[window.slot, step] = window.layout, shard.operators, pairs
        return planned[2]

    def _open(self, slot: int, size: int) -> MemoryFile:
        file = self._files[slot]
        if file is not None and file.bytes.numel() == size:
            return file
        self._planned.clear()
        if file is not None:
            if slot in self._pinnings:
                self._pinnings.pop(slot).undo()
            file.close(remove=True)
            self._files[slot] = None
        file = self._memory.file(f"window-{slot}", size)
        if self._device is not None:
            self._pinnings[slot] = Pinning(file.bytes, self._device)
        self._files[slot] = file
        return file

    def _drop(self, window: _Window) -> None:
        """Nothing of it counts, and its file is the next to be filled: the others have whole windows."""
        window.dropped, self._window = True, None
        self._firsts[window.slot] = -1

    def _fail(self, window: _Window, iteration: int, error: Exception) -> None:
        self._drop(window)
        self._report(
            f"the window of iterations from {window.first} on is dropped, since the snapshot of iteration {iteration} "
            f"failed: {error}"
        )

    def _copied(self, pairs: _Pairs) -> float:
        started = time.perf_counter()
        copy_beside_training(pairs)
        return time.perf_counter() - started

    def _settle(self, window: _Window, step: int, iteration: int) -> None:
        """Hash what was copied, and seal the window with its last snapshot; in the worker."""
        if window.dropped:
            return
        layout, file = window.layout, window.file
        try:
            layout.taken(window.held, step, iteration)
            if step + 1 < len(layout.turns):
                return
            window.small.wait()
            scalars = {"start": window.small.tree(), "last": iteration}
            stamp = self._memory.rank, self._memory.life, "window"
            views = layout.shard(file.bytes)
            file.seal(*stamp, views, window.first, scalars, branch=self._memory.branch, held=window.held)  # type: ignore[arg-type]
        except (RuntimeError, OSError, CPSRError) as error:
            window.dropped, self._firsts[window.slot] = True, -1
            self._report(f"the window of iterations {window.first} to {iteration} could not be sealed: {error}")


def _on_device(pairs: _Pairs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same copies, with types converted on the device."""
    for target, source in pairs:
        yield target, source.detach().to(target.dtype)
