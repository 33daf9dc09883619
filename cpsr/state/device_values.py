"""Values of the small state that are still on a CUDA device, and their way to the host beside the training."""

import ctypes
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cpsr.errors import SaveError

__all__ = ["Arrival", "Deadline", "DeviceNumber", "DeviceValues", "beside_captures", "captures", "in_time", "number"]
__all__ += ["reached", "to_host"]

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


def in_time(wait: Callable[[], object]) -> bool:
    """Whether this wait with a deadline succeeds: a device may hang, or fail at every call after a kernel's error."""
    try:
        wait()
    except (SaveError, RuntimeError):
        return False
    return True


_RELAXED = 2  # of cudaStreamCaptureMode


@functools.cache
def _runtime() -> ctypes.PyDLL | None:
    """CUDA's runtime, which torch has loaded; None in a build that contains it."""
    try:
        return ctypes.PyDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
    except OSError:
        return None


@contextmanager
def beside_captures() -> Iterator[None]:
    """Inside, this thread may ask for events and wait for them, also while another one captures a CUDA graph.

    While any thread does that, CUDA forbids it to all threads, and an attempt makes the capture fail. That mode is each
    thread's own and is suspended here: these events are not part of a graph.
    """
    runtime = _runtime()
    mode = ctypes.c_int(_RELAXED)
    if runtime is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if runtime is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def reached(event: torch.cuda.Event) -> bool:
    """Whether the device has come to this event; does not wait.

    Raises:
        RuntimeError: the device has failed.
    """
    with beside_captures():
        return bool(event.query())  # type: ignore[no-untyped-call] # torch's stub has no types


def captures() -> bool:
    """Whether this thread captures a CUDA graph: nothing runs now, and its replay calls no Python."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's stub has no types
    return on_cuda and torch.cuda.is_current_stream_capturing()


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
        return reached(self._event)

    def wait(self, what: str, deadline: Deadline | None = None) -> None:
        """Wait; without a deadline as long as it takes.

        Raises:
            SaveError: see `Deadline.wait_for`.
        """
        if deadline is None:
            with beside_captures():
                self._event.synchronize()
        else:
            deadline.wait_for(lambda: self.here, what)


# Up to this size tensors travel in one copy with the numbers; larger ones need no copy of their own on the device.
PACKED_BYTES = 1 << 20
# Pinned memory for the larger ones of one state; what exceeds it is copied at once, and waits for the device.
PINNED_BYTES_MAX = 1 << 28


@dataclass(frozen=True, eq=False)
class DeviceNumber:
    """A number that was not waited for.

    It is the engine's own tensor, and changes with the next update; `SmallState` takes its value before that. The codec
    refuses it everywhere else.

    Attributes:
        value: tensor without dimensions on a CUDA device.
    """

    value: torch.Tensor


def number(value: torch.Tensor, *, on_device: bool) -> bool | float | DeviceNumber:
    """The number in a tensor without dimensions.

    Args:
        value: the tensor.
        on_device: leave it on a CUDA device, where `item()` would wait for all queued work.
    """
    if on_device and value.is_cuda:
        return DeviceNumber(value)
    found: bool | float = value.item()
    return found


class DeviceValues:
    """Tensors of one CUDA device that are copied to the host in the order of its current stream.

    Small ones are packed into one tensor, by kernels that read them before any later one changes them, and one copy
    brings it to pinned memory.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._tensors: list[torch.Tensor] = []
        self._pinned_bytes = 0
        self._packed: list[list[int]] = []  # of tensors with the same type and shape
        self._arrival: Arrival | None = None
        self._hosts: dict[int, torch.Tensor] = {}
        self._pack: torch.Tensor | None = None

    def accept(self, tensor: torch.Tensor) -> int | None:
        """Its index in `values`; None: copy it at once.

        It is on the host, on another device, too large, or no block of memory (sparse, distributed).
        """
        if not tensor.is_cuda or tensor.device != (self._device or tensor.device):
            return None
        if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
            return None
        if tensor.nbytes > PACKED_BYTES:
            if self._pinned_bytes + tensor.nbytes > PINNED_BYTES_MAX:
                return None
            self._pinned_bytes += tensor.nbytes
        self._device = tensor.device
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._tensors)

    def send(self) -> None:
        """Enqueue the copies on the current stream; returns at once."""
        if self._device is None:
            return
        alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        with torch.no_grad():
            for index, tensor in enumerate(self._tensors):
                if tensor.nbytes > PACKED_BYTES:
                    self._hosts[index] = to_host(tensor)
                else:
                    alike.setdefault((tensor.dtype, tensor.shape), []).append(index)
            # Types of more bytes first, so that each begins at a multiple of its size.
            self._packed = sorted(alike.values(), key=lambda same: -self._tensors[same[0]].element_size())
            stacked = [torch.stack([self._tensors[index] for index in same]) for same in self._packed]
            if stacked:
                self._pack = to_host(torch.cat([one.reshape(-1).view(torch.uint8) for one in stacked]))
        self._arrival = Arrival(self._device)

    @property
    def here(self) -> bool:
        """Whether all values are on the host; does not wait."""
        return self._arrival is None or self._arrival.here

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for the copies.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
        """
        if self._arrival is not None:
            self._arrival.wait("what was queued before the copy of the small state", deadline)

    def values(self) -> dict[int, torch.Tensor]:
        """On the host, by index; once they are here."""
        found = dict(self._hosts)
        if self._pack is not None:
            packed, start = self._pack.clone(), 0  # pinned memory is scarce
            for same in self._packed:
                one = self._tensors[same[0]]
                for index in same:
                    size = one.element_size() * math.prod(one.shape)
                    found[index] = packed[start : start + size].view(one.dtype).view(one.shape)
                    start += size
        return found


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host; else pinned memory, into which the device copies it in the order of its current stream."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
