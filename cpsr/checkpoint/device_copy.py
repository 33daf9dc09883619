"""Copies from a GPU to pinned host memory, on a stream of their own."""

from collections.abc import Iterator

import torch

from cpsr.checkpoint.paced import Piece
from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import Deadline
from cpsr.state.shard import Shard

__all__ = ["DeviceCopy", "device_of", "new_event"]


class DeviceCopy:
    """Copies after all work queued on the current stream so far.

    Args:
        stream: for the copies; its device is that of the shard.
        shard: the sources.
    """

    def __init__(self, stream: torch.cuda.Stream, shard: Shard) -> None:
        self._stream = stream
        self._shard = shard  # keeps the sources alive until the copy is through
        self._start = new_event()
        self._end = new_event()
        self._needed = new_event()

    def enqueue(self, pairs: Iterator[Piece]) -> None:
        """Enqueue these copies; returns before they are complete."""
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            self._stream.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._start.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._end.record(self._stream)

    @property
    def here(self) -> bool:
        """Whether it is complete; does not wait."""
        return bool(self._end.query())  # type: ignore[no-untyped-call] # torch's stub has no types

    def result(self, deadline: Deadline | None = None) -> float:
        """Wait; without a deadline as long as it takes.

        Returns:
            The seconds that the copy took on the device.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
        """
        if deadline is None:
            self._end.synchronize()
        else:
            deadline.wait_for(lambda: self.here, "the copy of weights and moments")
        return self._seconds(self._start)

    def mark_needed(self) -> None:
        """On the training thread: what it queues from here on needs the copy to be complete."""
        self._needed.record(torch.cuda.current_stream(self._stream.device))

    def delay_seconds(self) -> float:
        """How long a complete copy kept the device from what `mark_needed` stands before.

        The thread may have waited longer: for steps that the device had still to compute.
        """
        if not self._needed.query():  # type: ignore[no-untyped-call] # torch's stub has no types
            return 0.0  # it is not even there yet
        return max(0.0, self._seconds(self._needed))

    def overlap_seconds(self) -> float:
        """From the copy's begin until the device needed it to be complete; 0 where it is not there yet."""
        if not self._needed.query():  # type: ignore[no-untyped-call] # torch's stub has no types
            return 0.0
        milliseconds: float = self._start.elapsed_time(self._needed)
        return milliseconds / 1000.0

    def _seconds(self, before: torch.cuda.Event) -> float:
        milliseconds: float = before.elapsed_time(self._end)
        return milliseconds / 1000.0


def new_event() -> torch.cuda.Event:
    """An event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub has no types


def device_of(shard: Shard) -> torch.device | None:
    """The CUDA device with tensors of the shard; None where all of it is on the host.

    Raises:
        UnsupportedEngineError: there are several; the message names two.
    """
    found: tuple[str, torch.device] | None = None
    for key, tensor in shard.tensors():
        if not tensor.is_cuda:
            continue
        if found is None:
            found = key, tensor.device
        elif tensor.device != found[1]:
            raise UnsupportedEngineError(
                f"'{found[0]}' is on {found[1]} and '{key}' on {tensor.device}: CPSR copies the state of a rank from "
                "one device, in the order of its stream. Start one rank for each device"
            )
    return None if found is None else found[1]
