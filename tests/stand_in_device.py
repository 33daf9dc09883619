"""A stand-in for CUDA on machines without it: streams with queues, events, pinned memory, and a trace of all calls.

Tensors of the device (`StandInDevice.tensor`) hold host memory. Kernels and copies on them wait in the queue of the
current stream of their thread, and run when the device does: at once, when the test says `complete`, or never behind
`hang`. A call that would wait for what never ends raises `Hangs`, which nothing in the product catches.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["CUDA_SUCCESS", "Hangs", "StandInDevice", "StandInEvent", "StandInStream", "stand_in_device"]

CUDA_SUCCESS = 0
ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY = 712, 713, 2
# Ops that only make another view of the same memory: no kernel.
_VIEWS = (
    "detach", "view", "select", "slice", "split", "as_strided", "_unsafe_view", "unsqueeze", "alias", "t", "transpose"
)  # fmt: skip


class Hangs(BaseException):
    """A call waits for work that never ends; not an `Exception`, so that no handler of the product hides it."""


class StandInStream:
    """A queue of work; what follows an event that has not completed waits with it."""

    def __init__(self, device: Any = None, priority: int = 0, *, of: "StandInDevice", default: bool = False) -> None:
        self._of = of
        self.device = of.device(device)
        self.priority = priority
        self.queue: deque[Callable[[], bool]] = deque()
        self.name = of.name_stream(self, default=default)

    def wait_event(self, event: "StandInEvent") -> None:
        self._of.note("wait_event", self, event.name)
        self._of.enqueue(self, event.query_quietly)

    def wait_stream(self, stream: "StandInStream") -> None:
        event = StandInEvent(of=self._of)
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: "StandInEvent | None" = None) -> "StandInEvent":
        event = event or StandInEvent(of=self._of)
        event.record(self)
        return event

    def query(self) -> bool:
        self._of.note("query_stream", self)
        return not self.queue

    def synchronize(self) -> None:
        self._of.note("synchronize", self)
        self._of.wait_for(lambda: not self.queue, f"the work of stream {self.name}")

    def __repr__(self) -> str:
        return self.name


class StandInEvent:
    """Completes once the stream that recorded it has come there; one that was never recorded is complete."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, *, of: "StandInDevice", **_: Any) -> None:
        self._of = of
        self._recorded = 0
        self._reached = 0
        self.at = 0.0
        self.name = of.name_event(self)
        self.stream: StandInStream | None = None

    def record(self, stream: StandInStream | None = None) -> None:
        stream = self._of.current_stream() if stream is None else stream
        if self.stream is not None and self.stream.device != stream.device:
            raise RuntimeError(f"event of {self.stream.device} recorded on a stream of {stream.device}")
        self.stream = stream
        self._recorded += 1
        self._of.note("record", stream, self.name)
        self._of.enqueue(stream, self._reach(self._recorded))

    def _reach(self, number: int) -> Callable[[], bool]:
        def reach() -> bool:
            self._reached, self.at = max(self._reached, number), time.perf_counter()
            return True

        return reach

    def wait(self, stream: StandInStream | None = None) -> None:
        (self._of.current_stream() if stream is None else stream).wait_event(self)

    def query_quietly(self) -> bool:
        return self._reached >= self._recorded

    def query(self) -> bool:
        self._of.note("query", self.stream, self.name)
        return self.query_quietly()

    def synchronize(self) -> None:
        self._of.note("synchronize", self.stream, self.name)
        self._of.wait_for(self.query_quietly, f"event {self.name}")

    def elapsed_time(self, end: "StandInEvent") -> float:
        if not (self.query_quietly() and end.query_quietly()):
            raise RuntimeError("device not ready")
        return 1e3 * (end.at - self.at)


class Runtime:
    """What `torch.cuda.cudart()` offers of pinned memory; `refuse` is the status of the next registrations."""

    def __init__(self, of: "StandInDevice") -> None:
        self._of = of
        self.registered: dict[int, int] = {}  # address -> bytes
        self.refuse = CUDA_SUCCESS

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self._of.note("register", None, (address, size))
        overlaps = any(start < address + size and address < start + more for start, more in self.registered.items())
        status = self.refuse or (ALREADY_REGISTERED if overlaps else CUDA_SUCCESS)
        if status == CUDA_SUCCESS:
            self.registered[address] = size
        return self._of.fail(status)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self._of.note("unregister", None, address)
        if self.registered.pop(address, None) is None:
            return self._of.fail(NOT_REGISTERED)
        return CUDA_SUCCESS

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802 - CUDA's name
        return f"stand-in error {int(status)}"


class StandInDevice:
    """The devices of one test.

    Args:
        count: of devices.

    Attributes:
        at_once: whether work runs as soon as nothing before it hangs; else only in `complete`.
        trace: calls in order: what, on which stream or device, with what.
        random_states: by device.
        runtime: of pinned memory.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.at_once = True
        self.trace: list[tuple[str, str | None, Any]] = []
        self.runtime = Runtime(self)
        self.random_states = [torch.tensor([index], dtype=torch.uint8) for index in range(count)]
        self._pinned: list[tuple[int, int]] = []
        self._lock = threading.RLock()
        self._streams: list[StandInStream] = []
        self._events = 0
        self._last_error = CUDA_SUCCESS
        self._local = threading.local()
        self._defaults = [StandInStream(index, of=self, default=True) for index in range(count)]

    # For the test

    def tensor(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        """These values on a device; `values` stays its memory."""
        return DeviceTensor(values, self, index)

    def default_stream(self, device: Any = None) -> StandInStream:
        return self._defaults[self.device(device).index]

    def stream(self, name: str) -> StandInStream:
        """The stream that the trace calls so."""
        return next(stream for stream in self._streams if stream.name == name)

    def hang(self, stream: StandInStream | None = None) -> None:
        """Nothing behind this point of the stream (by default the first device's) ever runs."""
        self.enqueue(stream or self._defaults[0], lambda: False)

    def complete(self) -> None:
        """Run all work that hangs behind nothing; streams of copies as late as their order allows."""
        with self._lock:
            while any(map(self._step, self._streams)):
                pass

    def calls(self, *kinds: str) -> list[tuple[str, str | None, Any]]:
        """The calls of these kinds so far, in order."""
        return [call for call in self.trace if call[0] in kinds]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        ranges = [*self._pinned, *self.runtime.registered.items()]
        return any(begin <= start and start + tensor.nbytes <= begin + size for begin, size in ranges)

    # For what stands in

    def device(self, given: Any = None) -> torch.device:
        if given is None:
            return torch.device("cuda", self.current_device())
        if isinstance(given, int):
            return torch.device("cuda", given)
        found = torch.device(given)
        return torch.device("cuda", self.current_device() if found.index is None else found.index)

    def current_device(self) -> int:
        index: int = getattr(self._local, "device", 0)
        return index

    def set_device(self, device: Any) -> None:
        self._local.device = self.device(device).index

    def current_stream(self, device: Any = None) -> StandInStream:
        index = self.device(device).index
        streams: dict[int, StandInStream] = getattr(self._local, "streams", {})
        return streams.get(index, self._defaults[index])

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextmanager
    def on_stream(self, stream: StandInStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        streams, index = self._local.streams, stream.device.index
        before = streams.get(index)
        streams[index] = stream
        try:
            with self.on_device(stream.device):
                yield
        finally:
            if before is None:
                del streams[index]
            else:
                streams[index] = before

    def synchronize(self, device: Any = None) -> None:
        wanted = self.device(device)
        self.note("synchronize", None, str(wanted))
        idle = [stream for stream in self._streams if stream.device == wanted]
        self.wait_for(lambda: not any(stream.queue for stream in idle), f"all work of {wanted}")

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        wanted = self.device(device)
        self.note("get_rng_state", None, str(wanted))
        return self.random_states[wanted.index].clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        wanted = self.device(device)
        self.note("set_rng_state", None, str(wanted))
        self.random_states[wanted.index] = state.clone()

    def fail(self, status: int) -> int:
        """CUDA keeps the status of a failed call until the next check of a launch raises it."""
        if status != CUDA_SUCCESS:
            self._last_error = status
        return status

    def note(self, call: str, stream: StandInStream | None, about: Any = None) -> None:
        self.trace.append((call, None if stream is None else stream.name, about))

    def name_stream(self, stream: StandInStream, *, default: bool) -> str:
        with self._lock:
            self._streams.append(stream)
            if default:
                return f"default:{stream.device.index}"
            return f"stream{len(self._streams) - self.count}:{stream.device.index}"

    def name_event(self, event: StandInEvent) -> str:
        with self._lock:
            self._events += 1
            return f"event{self._events}"

    def enqueue(self, stream: StandInStream, work: Callable[[], bool]) -> None:
        """Work returns whether it is done; it is asked again until it is."""
        with self._lock:
            stream.queue.append(work)
        if self.at_once:
            self.complete()

    def launch(self, name: str, index: int, work: Callable[[], object]) -> None:
        """A kernel or copy on the current stream of this device."""
        stream = self.current_stream(index)
        self.note("launch", stream, name)
        status, self._last_error = self._last_error, CUDA_SUCCESS
        if status != CUDA_SUCCESS:
            raise RuntimeError(f"CUDA error: stand-in error {status}")

        def run() -> bool:
            work()
            return True

        self.enqueue(stream, run)

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """The host waits: the device runs meanwhile."""
        self.complete()
        if not done():
            raise Hangs(f"the host waits for {what}, which never comes")

    def _step(self, stream: StandInStream) -> bool:
        if not stream.queue or not stream.queue[0]():
            return False
        stream.queue.popleft()
        return True

    def empty(self, made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`torch.empty` and its kin, which know pinned memory, and memory of the device."""

        def empty(*size: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
            size = tree_map(_memory, size)
            if device is not None and torch.device(device).type == "cuda":
                index = self.device(device).index
                # mypy does not see this property of a module.
                filled = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
                if torch.are_deterministic_algorithms_enabled() and filled:
                    self.launch("fill_empty_deterministic_", index, lambda: None)
                return self.tensor(made(*size, **options), index)
            tensor = made(*size, device=device, **options)
            if pin_memory:
                self.note("pin", None, tensor.nbytes)
                self._pinned.append((tensor.data_ptr(), tensor.nbytes))
            return tensor

        return empty


class DeviceTensor(torch.Tensor):
    """A tensor whose memory only its device's streams read and write."""

    memory: torch.Tensor
    of: StandInDevice
    ordinal: int

    @staticmethod
    def __new__(cls, memory: torch.Tensor, of: StandInDevice, index: int) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device("cuda", index),
        )

    def __init__(self, memory: torch.Tensor, of: StandInDevice, index: int) -> None:
        self.memory, self.of, self.ordinal = memory, of, index

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These would ask CUDA's own guard before they are dispatched.
        if func is torch.Tensor.__getitem__ and isinstance(args[0], DeviceTensor):
            return _of(args[0], args[0].memory[args[1]])
        if func is torch.Tensor.copy_:
            return _copy(*args, **(kwargs or {}))
        for number, made in (
            (float, torch.Tensor.__float__),
            (int, torch.Tensor.__int__),
            (bool, torch.Tensor.__bool__),
        ):
            if func is made:
                return number(args[0].item())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's own signature is of a C function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        flat, _ = tree_flatten((args, kwargs or {}))
        one = next(value for value in flat if isinstance(value, DeviceTensor))
        host = tree_map(_memory, args), tree_map(_memory, kwargs or {})
        if name in ("copy_", "_foreach_copy_"):
            targets, sources = (args[0], args[1]) if name == "_foreach_copy_" else ([args[0]], [args[1]])
            for target, source in zip(targets, sources, strict=True):
                _copy(target, source, *args[2:3])
            return None if name == "_foreach_copy_" else args[0]
        if name == "_local_scalar_dense":
            one.of.current_stream(one.ordinal).synchronize()
            return func(*host[0], **host[1])
        if name == "_to_copy" and torch.device((kwargs or {}).get("device") or one.device).type == "cpu":
            found = torch.empty(one.shape, dtype=(kwargs or {}).get("dtype") or one.dtype)
            _copy(found, one)
            return found
        if name in _VIEWS:
            return tree_map(lambda value: _of(one, value), func(*host[0], **host[1]))
        if name.endswith("_"):
            one.of.launch(name, one.ordinal, lambda: func(*host[0], **host[1]))
            return args[0]
        made = func(*host[0], **host[1])  # its shapes; its values come when the device runs
        one.of.launch(name, one.ordinal, lambda: _fill(made, func(*host[0], **host[1])))
        if not one.of.at_once:
            tree_map(_spoil, made)
        return tree_map(lambda value: _of(one, value), made)

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.of.note("record_stream", stream, self.data_ptr())

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


def _of(one: DeviceTensor, value: Any) -> Any:
    return DeviceTensor(value, one.of, one.ordinal) if isinstance(value, torch.Tensor) else value


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, DeviceTensor) else value


def _fill(made: Any, values: Any) -> None:
    tree_map(lambda one, other: one.copy_(other) if isinstance(one, torch.Tensor) else None, made, values)


def _spoil(value: Any) -> None:
    """What has not been computed yet must not look right."""
    if isinstance(value, torch.Tensor) and value.numel():
        value.reshape(-1).view(torch.uint8).fill_(0xFF)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """In the order of the current stream; the host waits unless its side is pinned and it need not."""
    one: Any = target if isinstance(target, DeviceTensor) else source
    into, values = _memory(target), _memory(source)
    ends = [end for end in (target, source) if not isinstance(end, DeviceTensor)]
    direction = "d2d" if not ends else "d2h" if ends[0] is target else "h2d"
    with torch.no_grad():
        one.of.launch(f"copy_{direction}", one.ordinal, lambda: into.detach().copy_(values.detach()))
    if isinstance(target, DeviceTensor):
        torch.autograd.graph.increment_version(target)
    if ends and not (non_blocking and one.of.is_pinned(ends[0])):
        one.of.current_stream(one.ordinal).synchronize()
    return target


@contextmanager
def stand_in_device(count: int = 1) -> Iterator[StandInDevice]:
    """Let `torch.cuda` be a stand-in inside."""
    device = StandInDevice(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda *given, **named: StandInEvent(*given, **named, of=device))
        patch.setattr(torch.cuda, "Stream", lambda *given, **named: StandInStream(*given, **named, of=device))
        patch.setattr(torch.cuda, "current_stream", device.current_stream)
        patch.setattr(torch.cuda, "default_stream", device.default_stream)
        patch.setattr(torch.cuda, "stream", device.on_stream)
        patch.setattr(torch.cuda, "device", device.on_device)
        patch.setattr(torch.cuda, "current_device", device.current_device)
        patch.setattr(torch.cuda, "set_device", device.set_device)
        patch.setattr(torch.cuda, "device_count", lambda: device.count)
        patch.setattr(torch.cuda, "synchronize", device.synchronize)
        patch.setattr(torch.cuda, "get_rng_state", device.get_rng_state)
        patch.setattr(torch.cuda, "set_rng_state", device.set_rng_state)
        patch.setattr(torch.cuda, "cudart", lambda: device.runtime)
        patch.setattr(torch, "empty", device.empty(torch.empty))
        patch.setattr(torch, "empty_like", device.empty(torch.empty_like))
        patch.setattr(torch, "empty_strided", device.empty(torch.empty_strided))
        yield device
