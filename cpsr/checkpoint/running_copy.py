"""A copy that is under way: what must arrive before its buffer may be sealed or written."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch

from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline, in_time

__all__ = ["Piece", "RunningCopy"]

Piece = tuple[torch.Tensor, torch.Tensor]  # target and source


class RunningCopy:
    """A copy on the host by one thread; copies on a device, and those in waits, are subclasses.

    Args:
        small: the small state, if one goes with it.
        arrival: of the buffers, where the copy itself does not show it.

    Attributes:
        copied: gives the seconds that a copy on the host took; set by what has begun it.
        seconds: that the copy took, once it is complete.
    """

    copied: Future[float]

    def __init__(self, small: SmallState | None, arrival: Arrival | None = None) -> None:
        self._small, self._arrival = small, arrival
        self._lock = threading.Lock()
        self._scalars: list[Any] = []  # one, once it is complete
        self._confirmed: Future[bool] = Future()
        self.seconds = 0.0

    def confirm(self, *, unchanged: bool) -> None:
        """The copy is, or is not, that of one state; only the first call counts. From any thread."""
        with suppress(InvalidStateError):
            self._confirmed.set_result(unchanged)

    def when_confirmed(self, act: Callable[[bool], None]) -> None:
        """Call `act` with whether its sources stayed unchanged, once that is known: here, or in `confirm`."""
        self._confirmed.add_done_callback(lambda known: act(known.result()))

    @property
    def is_sent(self) -> bool:
        """Whether a device writes no more into the buffer; does not wait."""
        return all(one is None or one.here for one in (self._small, self._arrival))

    def arrives(self, deadline: Deadline) -> bool:
        """Whether `is_sent` before the deadline."""
        return in_time(lambda: deadline.wait_for(lambda: self.is_sent, "a copy"))

    @property
    def encoded(self) -> tuple[Any, dict[str, Any]] | None:
        """The small state as `cpsr.state.codec.encode` gives it; None where a device had a part of it."""
        return None if self._small is None else self._small.encoded

    def result(self, deadline: Deadline | None = None) -> Any:
        """Wait until everything is here; from any thread, any number of times.

        Args:
            deadline: for the device alone: copies on the host come to their end by themselves.

        Returns:
            The small state.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
            Exception: a copy failed.
        """
        self.seconds = self._copy_seconds(deadline)
        if self._arrival is not None:
            self._arrival.wait("the copy of the buffers", deadline)
        if self._small is None:
            return None
        self._small.wait(deadline)
        with self._lock:
            if not self._scalars:
                self._scalars.append(self._small.tree())
            return self._scalars[0]

    def _copy_seconds(self, deadline: Deadline | None) -> float:
        """Wait until weights and moments are here; returns the seconds that their copy took."""
        return self.copied.result()

    def hurry(self) -> None:
        """Stop using waits; returns at once."""

    def mark_needed(self) -> None:
        """On the training thread, before it waits for the copy."""

    def stall_seconds(self, waited_seconds: float) -> float:
        """How much of the training thread's wait this copy has cost the training."""
        return waited_seconds

    def overlap_seconds(self, host_seconds: float) -> float:
        """How much time the copy had, by the device's clock where it copies; 0: not known."""
        return host_seconds
