"""Activations that wait for the backward in host memory, where the device is short of its own."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.distributed_tensors import FullySharded, local
from cpsr.engines.hooks import ModuleHook
from cpsr.errors import ConfigError

__all__ = ["ActivationOffload", "offloaded_activations"]

MIN_BYTES = 1 << 16  # smaller tensors cost more in calls than they free
GATHERING_STAGE = 3  # the ZeRO stage that gathers weights for one layer at a time
# Activations take at most this share of the host memory that is left; torch rounds pinned blocks up to a power of two.
MAX_SHARE = 0.5

# A saved tensor with its version, or its copy in host memory with the device that it returns to.
_Saved = tuple[torch.Tensor, int, torch.device | None]


@contextmanager
def offloaded_activations(
    adapter: EngineAdapter, limit_bytes: int, free_bytes: int, report: Callable[[str, str], object]
) -> Iterator[None]:
    """Offload an engine's activations inside.

    Args:
        adapter: the engine.
        limit_bytes: `engines.offload_activations_bytes`; 0 is off.
        free_bytes: of host memory that nothing else of this rank takes.
        report: records an event, by kind and message, at the end.

    Raises:
        ConfigError: the engine is one of ZeRO-3, or of FSDP2.
    """
    if limit_bytes == 0:
        yield
        return
    gathers = adapter.describe()["zero_stage"] == GATHERING_STAGE
    if gathers or FullySharded(adapter.module).ranks is not None:
        raise ConfigError(
            f"engines.offload_activations_bytes: {'ZeRO-3' if gathers else 'fully_shard'} gathers the weights of a "
            "layer for its forward, which cannot be distinguished from activations. Nothing was started: set it to 0"
        )
    with ActivationOffload(adapter.module, min(limit_bytes, int(MAX_SHARE * free_bytes))) as moved:
        yield
    report("activations", f"{moved.moved_bytes} bytes of activations were in host memory between forward and backward")


class ActivationOffload:
    """Moves the first tensors that a training forward saves to host memory, and back when the backward asks for them.

    As torch's `save_on_cpu`, under a limit. The first tensors saved are needed last. A tensor comes back with the same
    values in the same layout, so losses and gradients are bitwise the same as without. Weights, buffers and what is not
    dense (a slice of another tensor) stay where they are.

    Source: CPSR, section III-B and figure 5-B, with a limit in place of a schedule.

    Args:
        module: whose forward and backward are the training's.
        limit_bytes: of activations in host memory at a time.

    Attributes:
        moved_bytes: to host memory since the start.
        held_bytes: in host memory now.
    """

    def __init__(self, module: torch.nn.Module, limit_bytes: int) -> None:
        self._module, self._limit_bytes = module, limit_bytes
        self._handles: list[Any] = []
        self._contexts: list[AbstractContextManager[Any]] = []  # one for each forward that is under way
        self._weights: set[int] = set()
        self.moved_bytes = self.held_bytes = 0

    def __enter__(self) -> "ActivationOffload":
        """Install the hooks on the module."""
        self._handles = [
            self._module.register_forward_pre_hook(ModuleHook(self._before), prepend=True),
            self._module.register_forward_hook(ModuleHook(self._after), always_call=True),  # also after an exception
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them; graphs that exist keep what they need."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        context: AbstractContextManager[Any] = nullcontext()
        if module.training and torch.is_grad_enabled():
            tensors = itertools.chain(module.parameters(), module.buffers())
            self._weights = {local(one).untyped_storage().data_ptr() for one in tensors}
            context = saved_tensors_hooks(self._pack, _unpack)
        context.__enter__()
        self._contexts.append(context)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._contexts:  # none where another hook raised before ours
            self._contexts.pop().__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        dense = tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        fits = MIN_BYTES <= tensor.nbytes <= self._limit_bytes - self.held_bytes
        if not (dense and fits) or tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.detach(), tensor._version, None  # the graph would hold itself by its own output
        host = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
        with torch.no_grad():
            host.copy_(tensor, non_blocking=tensor.is_cuda)  # the backward runs on the same stream
        self.held_bytes += tensor.nbytes
        self.moved_bytes += tensor.nbytes
        weakref.finalize(host, self._let_go, tensor.nbytes)
        return host, 0, tensor.device

    def _let_go(self, count: int) -> None:
        self.held_bytes -= count


def _unpack(saved: _Saved) -> torch.Tensor:
    tensor, version, device = saved
    if device is not None:
        back = torch.empty_like(tensor, device=device, pin_memory=False)
        return back.copy_(tensor, non_blocking=tensor.is_pinned())
    if tensor._version != version:  # autograd looks after that itself only where no hooks are
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after the forward "
            "had saved it: its gradients would be wrong. Change a copy of it in your model instead"
        )
    return tensor
