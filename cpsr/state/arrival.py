"""Waiting for what a CUDA device still has to do: polled, and bounded by a deadline."""

import time
from collections.abc import Callable

import torch

from cpsr.errors import SaveError

__all__ = ["Arrival", "Deadline"]

POLL_SECONDS = 0.002


class Deadline:
    """The moment until which a device is polled; a call that waits for a device that hangs never returns.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def part(self, share: float) -> "Deadline":
        """After this share of what is left."""
        return Deadline(share * max(0.0, self._at - time.monotonic()))

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        """Poll until the device has reached something.

        Raises:
            SaveError: it has not in time; the message names what is missing.
        """
        while not reached():
            if time.monotonic() >= self._at:
                raise SaveError(f"the device has not finished {what} within {self.seconds:.3g} s")
            time.sleep(POLL_SECONDS)


class Arrival:
    """Completes with the work that the current stream of this thread has now.

    Args:
        device: whose current stream; not the current device, which may be another.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    @property
    def here(self) -> bool:
        """Whether the device is through; does not wait."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, what: str, deadline: Deadline | None = None) -> None:
        """Wait; without a deadline as long as it takes.

        Raises:
            SaveError: see `Deadline.wait_for`.
        """
        if deadline is None:
            self._event.synchronize()
        else:
            deadline.wait_for(lambda: self.here, what)
