"""Copies from a GPU to pinned host memory, on a stream of their own."""

import time
from collections.abc import Callable, Iterator

import torch

from cpsr.checkpoint.paced import Piece
from cpsr.errors import SaveError
from cpsr.state.shard import Shard

__all__ = ["DeviceCopy", "new_event"]

BOUNDARY_SECONDS = 10.0  # for the device to finish a step that was launched; launchers kill after 30 s


class DeviceCopy:
    """Copies after all work queued on the current stream so far.

    Args:
        stream: for the copies.
        shard: the sources.
        after: event to wait for instead of the current stream, which may hang.
    """

    def __init__(self, stream: torch.cuda.Stream, shard: Shard, after: torch.cuda.Event | None = None) -> None:
        self._stream = stream
        self._after = after
        self._shard = shard  # keeps the sources alive until the copy is through
        self._start = new_event()
        self._end = new_event()

    def enqueue(self, pairs: Iterator[Piece]) -> None:
        """Enqueue these copies; returns before they are complete."""
        if self._after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        else:
            self._stream.wait_event(self._after)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._start.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._end.record(self._stream)

    def prepare(self, copy_more: Callable[[], None]) -> None:
        """Enqueue other copies before them.

        Raises:
            SaveError: the event does not complete: the device hangs in the step before.
        """
        assert self._after is not None
        deadline = time.monotonic() + BOUNDARY_SECONDS
        while not self._after.query():  # type: ignore[no-untyped-call] # torch's stub has no types
            if time.monotonic() > deadline:
                raise SaveError(f"the device has not finished the step within {BOUNDARY_SECONDS:g} s")
            time.sleep(BOUNDARY_SECONDS / 1000)
        with torch.cuda.stream(self._stream):
            copy_more()

    def result(self) -> float:
        """Wait; the seconds that the copy took on the device."""
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1000.0


def new_event() -> torch.cuda.Event:
    """An event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub has no types
