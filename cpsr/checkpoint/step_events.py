"""Events of a GPU at step boundaries, from a fixed set: no step makes a new one."""

from collections import deque

import torch

__all__ = ["StepEvents"]

# The host may launch as many steps before the first is complete; further ones share the last event.
EVENTS = 8


class StepEvents:
    """Marks how far the device has to be at each step boundary.

    Args:
        device: the GPU with the state.
        count: of events.

    Attributes:
        newest: of the last boundary.
        recorded: number of boundaries so far.
        stream: on which that lies; None before the first.
    """

    def __init__(self, device: torch.device, count: int = EVENTS) -> None:
        self._device = device
        self.recorded = 0
        self._free = deque(torch.cuda.Event() for _ in range(count))  # type: ignore[no-untyped-call] # torch's stub
        self.newest = self._free[0]
        self.stream: torch.cuda.Stream | None = None
        self._updating: torch.cuda.Stream | None = None

    def updating(self) -> None:
        """The host launches an update on the current stream; the boundary behind it may be on another."""
        self._updating = torch.cuda.current_stream(self._device)

    def record(self) -> torch.cuda.Event:
        """The event of a boundary at this point of the current stream; where all are held, the newest moves here."""
        self.recorded += 1
        if self._free:
            self.newest = self._free[0]
            self._free.rotate(-1)
        self.stream = torch.cuda.current_stream(self._device)
        if self._updating is not None and self._updating != self.stream:
            self.stream.wait_stream(self._updating)
        self.newest.record(self.stream)
        return self.newest

    def reached(self, event: torch.cuda.Event) -> bool:
        """Whether the device has come to this event; does not wait.

        A new thread's current device is the first one, and asking there could open a context on it.

        Raises:
            RuntimeError: the device has failed.
        """
        with torch.cuda.device(self._device):
            return bool(event.query())  # type: ignore[no-untyped-call] # torch's stub has no types

    def hold(self, event: torch.cuda.Event) -> None:
        """Record this event for no other boundary before `release`, unless all events are held."""
        self._free.remove(event)

    def release(self, event: torch.cuda.Event) -> None:
        """Undo `hold`."""
        self._free.append(event)
