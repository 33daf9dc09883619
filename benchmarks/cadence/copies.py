"""Copies of an engine's state beside the training, without anything else: the least that a snapshot costs."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy

from cpsr.engines.adapter import EngineAdapter

__all__ = ["OnlyCopies"]

BUFFERS = 3  # in turns, as a pool of snapshots has them: a single one would stay in the processor's cache


class OnlyCopies:
    """One memcpy of each of the engine's own tensors, from when the loop asks for a batch until the update needs it.

    Args:
        adapter: of the engine, with its state on the host. Its tensors are those of now.
    """

    def __init__(self, adapter: EngineAdapter) -> None:
        spans: dict[int, tuple[int, int]] = {}  # of each tensor that the engine has allocated: its first byte, and last
        for _, one in adapter.shard().tensors():
            storage, begin = one.untyped_storage().data_ptr(), one.data_ptr()
            first, end = spans.get(storage, (begin, begin))
            spans[storage] = min(first, begin), max(end, begin + one.nbytes)
        sources = [(first, end - first) for first, end in spans.values() if end > first]
        self._room = numpy.ones((BUFFERS, sum(size for _, size in sources)), numpy.uint8)
        self._copies = [list(_placed(sources, room.ctypes.data)) for room in self._room]
        self._worker, self._begun = ThreadPoolExecutor(1, "copies"), 0
        self._running: Future[None] | None = None
        for optimizer in adapter.optimizers:
            optimizer.register_step_pre_hook(self._finish)

    def begin(self) -> None:
        """The state is copied from now on."""
        self._running = self._worker.submit(_copy, self._copies[self._begun % BUFFERS])
        self._begun += 1

    def _finish(self, *_: Any) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()


def _placed(sources: list[tuple[int, int]], at: int) -> Iterator[tuple[int, int, int]]:
    """Address of the target and of the source, and bytes, of each copy."""
    for source, size in sources:
        yield at, source, size
        at += size


def _copy(copies: list[tuple[int, int, int]]) -> None:
    for target, source, size in copies:
        ctypes.memmove(target, source, size)
