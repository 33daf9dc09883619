"""A state on its way into a host buffer: weights and moments, the buffers beside them, and the small state."""

import threading
from collections.abc import Callable
from typing import Any

from cpsr.checkpoint.copying import Copying
from cpsr.checkpoint.device_copy import DeviceCopy
from cpsr.checkpoint.paced import PacedCopy, Split
from cpsr.errors import SaveError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline

__all__ = ["RunningCopy"]


class RunningCopy:
    """What must arrive before a snapshot may be sealed or written.

    Args:
        copy: of weights and moments.
        small: the small state.
        arrival: of the buffers, where `copy` does not show it.

    Attributes:
        seconds: that `copy` took, once it is complete.
    """

    def __init__(self, copy: Copying, small: SmallState, arrival: Arrival | None) -> None:
        self._copy = copy
        self._small = small
        self._arrival = arrival
        self._lock = threading.Lock()
        self._scalars: list[Any] = []  # one, once it is complete
        self._confirmed: bool | None = None
        self._waiting: list[Callable[[bool], None]] = []
        self.seconds = 0.0

    def confirm(self, *, unchanged: bool) -> None:
        """The copy is, or is not, that of one state; only the first call counts. From any thread."""
        with self._lock:
            if self._confirmed is not None:
                return
            self._confirmed, waiting = unchanged, self._waiting
        for act in waiting:
            act(unchanged)

    def when_confirmed(self, act: Callable[[bool], None]) -> None:
        """Call `act` with whether its sources stayed unchanged, once that is known: here, or in `confirm`."""
        with self._lock:
            if self._confirmed is None:
                self._waiting.append(act)
                return
        act(self._confirmed)

    def arrives(self, deadline: Deadline) -> bool:
        """Whether the device sends everything before the deadline, so that it writes no more into the buffer."""
        try:
            deadline.wait_for(self._is_sent, "a copy")
        except (SaveError, RuntimeError):  # it hangs, or fails at every call after an error of a kernel
            return False
        return True

    def _is_sent(self) -> bool:
        sent = self._copy.here if isinstance(self._copy, DeviceCopy) else True
        return sent and self._small.here and (self._arrival is None or self._arrival.here)

    @property
    def split(self) -> Split | None:
        """When its bytes were copied, where the pool copies in waits."""
        return self._copy.split if isinstance(self._copy, PacedCopy) else None

    def hurry(self) -> None:
        """Stop using waits; returns at once."""
        if isinstance(self._copy, PacedCopy):
            self._copy.hurry()

    def mark_needed(self) -> None:
        """On the training thread, before it waits for the copy."""
        if isinstance(self._copy, DeviceCopy):
            self._copy.mark_needed()

    def stall_seconds(self, waited_seconds: float) -> float:
        """How much of the training thread's wait this copy has cost the training."""
        if isinstance(self._copy, DeviceCopy):
            return min(waited_seconds, self._copy.delay_seconds())
        return waited_seconds

    def overlap_seconds(self, host_seconds: float) -> float:
        """How much time the copy had, by the device's clock where it copies; 0: not known."""
        return self._copy.overlap_seconds() if isinstance(self._copy, DeviceCopy) else host_seconds

    @property
    def encoded(self) -> tuple[Any, dict[str, Any]] | None:
        """The small state as `cpsr.state.codec.encode` gives it; None where a device had a part of it."""
        return self._small.encoded

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
        self.seconds = self._copy.result(deadline) if isinstance(self._copy, DeviceCopy) else self._copy.result()
        if self._arrival is not None:
            self._arrival.wait("the copy of the buffers", deadline)
        self._small.wait(deadline)
        with self._lock:
            if not self._scalars:
                self._scalars.append(self._small.tree())
            return self._scalars[0]
