"""Activations that wait for the backward in host memory, where the device is short of its own."""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from cpsr.config import EnginesConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.fully_sharded import FullySharded
from cpsr.engines.hooks import ModuleHook
from cpsr.engines.sharded import local
from cpsr.errors import ConfigError

__all__ = ["ActivationOffload", "offloaded_activations"]

# Smaller ones cost more in calls than they free.
MIN_BYTES = 1 << 16
CHUNK_BYTES = 4 << 20
# Tensors that are on their way back before the backward asks for them.
PREFETCHED = 2
# The ZeRO stage that gathers weights for one layer at a time.
GATHERING_STAGE = 3
# Of the memory that is left, activations take at most so much: the rest is the job's own, and torch rounds each pinned
# block up to a power of two.
MAX_SHARE = 0.5


@contextmanager
def offloaded_activations(
    adapter: EngineAdapter, config: EnginesConfig, free_bytes: int, report: Callable[..., object]
) -> Iterator[None]:
    """Offload an engine's activations inside, as configured; by default nothing.

    Args:
        adapter: the engine.
        config: the limit, which many a job never reaches.
        free_bytes: of host memory that nothing else of this rank is to take: at most `MAX_SHARE` of it is taken.
        report: records an event, by kind, message and `level`: at the end, and where the limit is lowered.

    Raises:
        ConfigError: the engine is one of ZeRO-3, or of FSDP2.
    """
    if config.offload_activations_bytes == 0:
        yield
        return
    if adapter.describe()["zero_stage"] == GATHERING_STAGE:
        raise ConfigError(
            "engines.offload_activations_bytes: ZeRO-3 gathers the weights of a layer for its forward and lets go "
            "of them, which cannot be distinguished from activations. Nothing was started: set it to 0, or use ZeRO-2"
        )
    if FullySharded(adapter.module).ranks is not None:
        raise ConfigError(
            "engines.offload_activations_bytes: fully_shard gathers the weights of a layer for its forward, which "
            "cannot be distinguished from activations. Nothing was started: set it to 0"
        )
    room_bytes = int(MAX_SHARE * free_bytes)
    if room_bytes < config.offload_activations_bytes:
        report(
            "activations",
            f"engines.offload_activations_bytes is {config.offload_activations_bytes}, and beside snapshot "
            f"buffers and predictor this machine's memory has {free_bytes} bytes for each rank: at most {room_bytes} "
            "are moved to host memory in this life, what is above them stays on the device",
            level=logging.WARNING,
        )
    with ActivationOffload(adapter.module, min(config.offload_activations_bytes, room_bytes)) as moved:
        yield
    report("activations", f"{moved.moved_bytes} bytes of activations were in host memory between forward and backward")


class ActivationOffload:
    """Moves the first tensors that a training forward saves to host memory, and back before the backward needs them.

    The first ones saved are needed last, so that there is most time to bring them back. In a backward those that its
    own forward has saved are brought back a little ahead; those of other forwards, a pipeline's other micro-batches,
    stay where they are. A tensor comes back with the same values in the same layout: losses and gradients are bitwise
    the same as without. What is not dense (a slice of another tensor) and weights stay where they are. Copies are made
    in chunks, on a CUDA device on streams of their own beside the computation.

    Source: CPSR, section III-B and figure 5-B, with a limit in place of a schedule.

    Args:
        module: whose forward and backward are the training's.
        limit_bytes: of activations that lie in host memory at a time.
        chunk_bytes: copied at a time, so that what else uses the bus need not wait for a whole activation.

    Attributes:
        moved_bytes: to host memory since the start.
        held_bytes: that lie there now.
    """

    def __init__(self, module: torch.nn.Module, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._module = module
        self.limit_bytes = limit_bytes
        self._chunk_bytes = chunk_bytes
        self._handles: list[RemovableHandle] = []
        self._contexts: list[AbstractContextManager[Any]] = []  # one for each forward that is under way
        self._weights: set[int] = set()
        # A CUDA device's backward runs in a thread of autograd. Reentrant: a tensor may be let go of at any moment.
        self._lock = threading.RLock()
        self._lanes: dict[torch.device, _Lanes] = {}
        self.moved_bytes = self.held_bytes = 0

    def __enter__(self) -> "ActivationOffload":
        """Install the hooks on the module."""
        self._handles = [
            self._module.register_forward_pre_hook(ModuleHook(self._before), prepend=True),
            self._module.register_forward_hook(ModuleHook(self._after), always_call=True),  # also after an exception
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove them; graphs that exist keep what they need."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        context: AbstractContextManager[Any] = nullcontext()
        if module.training and torch.is_grad_enabled():
            self._weights = {
                local(tensor).untyped_storage().data_ptr()
                for tensor in itertools.chain(module.parameters(), module.buffers())
            }
            context = saved_tensors_hooks(partial(self._pack, _Forward()), self._unpack)
        context.__enter__()
        self._contexts.append(context)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._contexts:  # none where another hook raised before ours
            self._contexts.pop().__exit__(None, None, None)

    def _pack(self, forward: "_Forward", tensor: torch.Tensor) -> "_Saved":
        if not self._takes(tensor):
            return forward.save(_Stayed(tensor))
        moved = Moved(tensor, self._lanes_of(tensor.device), max(self._chunk_bytes // tensor.element_size(), 1))
        weakref.finalize(moved, self._let_go, tensor.nbytes)
        return forward.save(moved)

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether this one is to be moved; it then counts."""
        if not _is_dense(tensor) or tensor.nbytes < MIN_BYTES:
            return False
        if tensor.untyped_storage().data_ptr() in self._weights:
            return False
        with self._lock:
            if self.held_bytes + tensor.nbytes > self.limit_bytes:
                return False
            self.held_bytes += tensor.nbytes
            self.moved_bytes += tensor.nbytes
        return True

    def _unpack(self, saved: "_Saved") -> torch.Tensor:
        tensor = saved.kept.returned()  # before those that are not asked for yet: they share one lane
        for moved in saved.forward.before(saved.place):
            moved.bring_back()
        return tensor

    def _let_go(self, count: int) -> None:
        with self._lock:
            self.held_bytes -= count

    def _lanes_of(self, device: torch.device) -> "_Lanes | None":
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = _Lanes(_stream(device), _stream(device))
        return self._lanes[device]


@dataclass(frozen=True)
class _Lanes:
    """Streams beside the computation of a CUDA device: what returns does not wait for what other forwards still move.

    Attributes:
        out: to host memory.
        back: to the device.
    """

    out: torch.cuda.Stream
    back: torch.cuda.Stream


@dataclass(frozen=True)
class _Saved:
    """What autograd holds for one saved tensor.

    Attributes:
        kept: the tensor, here or in host memory.
        forward: that saved it.
        place: how many that forward had moved before.
    """

    kept: "_Stayed | Moved"
    forward: "_Forward"
    place: int


class _Forward:
    """What one forward has moved to host memory, in its order; the backward asks for it from the end."""

    def __init__(self) -> None:
        self._moved: list[weakref.ref[Moved]] = []

    def save(self, kept: "_Stayed | Moved") -> _Saved:
        """Note one more tensor."""
        saved = _Saved(kept, self, len(self._moved))
        if isinstance(kept, Moved):
            self._moved.append(weakref.ref(kept))
        return saved

    def before(self, place: int) -> list["Moved"]:
        """What the backward will ask for next: those that still wait of the few moved before that place."""
        near = [reference() for reference in self._moved[max(place - PREFETCHED, 0) : place]]
        return [moved for moved in reversed(near) if moved is not None and not moved.was_returned]


class _Stayed:
    """A saved tensor that is not moved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # the graph would hold itself by its own output, and never be freed
        self._version = tensor._version

    def returned(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed meanwhile. Autograd looks after that itself only where no hooks are.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that the backward needs was changed in place after the "
                f"forward had saved it (version {self._tensor._version}, saved at {self._version}): its gradients "
                "would be wrong. Change a copy of it in your model instead"
            )
        return self._tensor


class Moved:
    """A saved tensor in host memory; brought back once for every time that it is asked for.

    No call waits for a CUDA device: streams wait for each other's events. The tensor comes back into memory of the
    stream that computes. Of that stream, the copy waits for what was queued when the memory was taken, since that may
    still use it; the computation waits for this copy alone, and can then free the memory without a delay.
    """

    def __init__(self, tensor: torch.Tensor, lanes: _Lanes | None, chunk_elements: int) -> None:
        self._device = tensor.device
        self._lanes = lanes
        self._chunk_elements = chunk_elements
        self._back: torch.Tensor | None = None
        self.was_returned = False  # the backward has had it, and asks again only where its graph is retained
        self._host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=lanes is not None
        )
        if lanes is None:
            self._copy(tensor, self._host)
            return
        lanes.out.wait_stream(torch.cuda.current_stream(self._device))  # which has just computed it
        with torch.cuda.stream(lanes.out):
            self._copy(tensor, self._host)
        self._left = lanes.out.record_event()
        tensor.record_stream(lanes.out)  # its memory is not used anew before the copy has ended

    def __del__(self) -> None:
        # The graph was dropped: nothing has waited for the copy, and the memory must.
        if self._lanes is not None and self._back is not None:
            self._back.record_stream(self._lanes.back)

    def bring_back(self) -> None:
        """Begin to copy it to its device, unless that was done."""
        if self._back is not None:
            return
        back = torch.empty_strided(self._host.size(), self._host.stride(), dtype=self._host.dtype, device=self._device)
        if self._lanes is None:
            self._copy(self._host, back)
        else:
            lane, self._owner = self._lanes.back, torch.cuda.current_stream(self._device)
            lane.wait_event(self._left)
            lane.wait_stream(self._owner)
            with torch.cuda.stream(lane):
                self._copy(self._host, back)
            self._arrived = lane.record_event()
        self._back = back

    def returned(self) -> torch.Tensor:
        """The tensor on its device, in its own layout; memory there is the caller's from now on."""
        self.bring_back()
        back, self._back = self._back, None
        self.was_returned = True
        assert back is not None
        if self._lanes is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._arrived)
            if stream != self._owner:
                back.record_stream(stream)
        return back

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        pieces, places = (torch.split(_flat(tensor), self._chunk_elements) for tensor in (source, target))
        with torch.no_grad():
            for piece, place in zip(pieces, places, strict=True):
                place.copy_(piece, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a contiguous stretch of memory, each once, in whatever order of the dimensions."""
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
