"""A GPU with a part of the state: where its steps end, a stream for dumps, and page-locked memory."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cpsr.checkpoint.boundary import EarlierStep
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Deadline, reached
from cpsr.state.shard import Shard

__all__ = ["DeviceSteps", "Pinning", "StepEvents", "device_of"]

logger = logging.getLogger(__name__)


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
            return reached(event)

    def hold(self, event: torch.cuda.Event) -> None:
        """Record this event for no other boundary before `release`, unless all events are held."""
        self._free.remove(event)

    def release(self, event: torch.cuda.Event) -> None:
        """Undo `hold`."""
        self._free.append(event)


# Of the time of a dump, for steps that the host has launched: behind a collective of a dead rank they never end.
NEWEST_SHARE = 0.5
PREPARE_SECONDS = 10.0  # for the device, when a life begins


class DeviceSteps:
    """Where on the device a step ends, and a stream on which nothing hangs; on the host nothing is to be done.

    Args:
        device: with a part of the state; None: all of it is on the host.

    Attributes:
        events: of the step boundaries on that device; None on the host.
        updates: events at which updates begin there, one more than the steps that may wait; None on the host.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._dumps: torch.cuda.Stream | None = None  # no dump waits behind a snapshot that waits for a hung step
        self.events: StepEvents | None = None
        self.updates: StepEvents | None = None
        if device is not None:
            self._dumps = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub has no types
            self.events, self.updates = StepEvents(device), StepEvents(device, EVENTS + 1)

    def mark_boundary(self) -> torch.cuda.Event | None:
        """Called when the host has launched a step; its event, None on the host."""
        return None if self.events is None else self.events.record()

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Inside, work follows the last step and precedes the next one. On the training thread.

        A loop may train on a stream of its own, and ask for its batches outside of it.
        """
        stream = None if self.events is None else self.events.stream
        if stream is None or stream == (current := torch.cuda.current_stream(self._device)):
            yield
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield

    def prepare_dump(self, scalars: Callable[[], Any]) -> None:
        """Copy a small state as a dump does: later, kernels may hang while memory is taken and code is loaded.

        Args:
            scalars: as for a dump.
        """
        if self._device is None or self._dumps is None:
            return
        self._dumps.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._dumps):
                SmallState(scalars()).wait(Deadline(PREPARE_SECONDS))
        except (SaveError, UnsupportedEngineError, RuntimeError) as error:  # also of too little memory
            logger.warning("an emergency dump is not prepared: %s", error)

    @contextmanager
    def at_boundary(
        self, deadline: Deadline, earlier: Callable[[], EarlierStep | None]
    ) -> Iterator[EarlierStep | None]:
        """Wait until the device has finished the step; inside, work goes to a stream on which nothing hangs.

        From any thread.

        Args:
            deadline: for the device.
            earlier: the last step that the device has completed, if its state can be copied.

        Yields:
            None, or the step before those in which the device hangs.

        Raises:
            SaveError: the device hangs, there is no such step, and the deadline has passed.
        """
        events = self.events
        if events is None:
            yield None
            return
        step = None
        try:
            deadline.part(NEWEST_SHARE).wait_for(lambda: events.reached(events.newest), "the step")
        except SaveError:
            step = earlier()
            if step is None:
                deadline.wait_for(lambda: events.reached(events.newest), "the step")
        with torch.cuda.stream(self._dumps):
            yield step


# Of CUDA's runtime: for the contexts of all devices, and what it answers about memory that is registered already.
_PORTABLE, _SUCCESS, _ALREADY_REGISTERED = 1, 0, 712


class Pinning:
    """Registers memory with CUDA, until `undo`.

    Memory must not be unmapped while it is registered: CUDA would go on to copy into the old pages, whatever lies at
    that address later.

    Args:
        memory: mapped by this process; registered by nobody else.
        device: whose copies go there; no other device is touched.

    Raises:
        SaveError: CUDA refuses.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory: torch.Tensor | None = memory if memory.numel() else None
        self._device = device
        if self._memory is None:
            return
        with torch.cuda.device(device):
            status = self._register(memory)
            if status == _ALREADY_REGISTERED:
                # By somebody who unmapped it without a word: this mapping is new. Those pages are not these.
                _clear_error(device)
                if int(_runtime().cudaHostUnregister(memory.data_ptr())) == _SUCCESS:
                    status = self._register(memory)
            if status != _SUCCESS:
                self._memory = None
                _clear_error(device)
                raise SaveError(f"{memory.numel()} bytes of shared memory could not be pinned (CUDA error {status})")

    @staticmethod
    def _register(memory: torch.Tensor) -> int:
        return int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))

    def undo(self) -> None:
        """Unregister it, when no copy is under way; a second call has no effect."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            with torch.cuda.device(self._device):
                status = int(_runtime().cudaHostUnregister(memory.data_ptr()))
                if status != _SUCCESS:
                    _clear_error(self._device)
                    logger.warning("shared memory could not be unpinned (CUDA error %d)", status)
        except RuntimeError as error:  # after an error of a kernel every call fails
            logger.warning("shared memory could not be unpinned: %s", error)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's stub has no types


def _clear_error(device: torch.device) -> None:
    """Launch a kernel: CUDA keeps the error of a refused call, and torch raises it after the next launch.

    Torch has no call that only clears it. A second error is one of the device itself, and is raised. Where torch is to
    compute deterministically, the allocation launches a kernel as well.
    """
    try:
        torch.empty(1, device=device).fill_(0)
    except RuntimeError:
        torch.empty(1, device=device).fill_(0)
