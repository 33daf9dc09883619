"""Repeated steps of a DeepSpeed engine, without the weight gradients of linear layers that nobody will use.

What a step makes of all gradients together, their norm and an overflow, is noted the first time, and a repeated step
takes it from there. Written against DeepSpeed 0.19, for ZeRO 1 and 2, whose optimizer has a method for each of both;
`DeepSpeedRepeatedSteps` wraps these on the instance. Other optimizers of DeepSpeed decide in ways of their own.

Source: moevement, sections 3.3 and 3.5. There the optimizer skips frozen operators, too.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.autograd.function import once_differentiable

from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.hooks import Hooks

__all__ = ["DeepSpeedRepeatedSteps", "LinearGradients", "can_leave_out"]

# Each element's update depends on that element's gradient alone.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, FusedAdam)


def can_leave_out(engine: Any) -> bool:
    """Whether gradients of an engine were shown to be left out without a trace."""
    optimizer = engine.optimizer
    compiled = engine.is_compiled or any(one._compiled_call_impl is not None for one in engine.module.modules())
    return (
        type(optimizer) is DeepSpeedZeroOptimizer
        and type(torch_optimizer(engine)) in _ELEMENTWISE
        and (engine.mpu is None or isinstance(engine, deepspeed.PipelineEngine))
        and engine.sequence_parallel_size == 1
        and engine.autotp_size() <= 1
        and not (compiled or optimizer.cpu_offload or optimizer.custom_loss_scaler)
    )


class DeepSpeedRepeatedSteps:
    """Steps of a replay, which leave out gradients of weights that nobody will use.

    What depends on the gradients of all weights, as their norm and an overflow, is noted in every step. When the step
    is repeated, it comes from there.

    Args:
        engine: for which `can_leave_out` holds.
        names: of the module's parameters by their ids, the same on all ranks.
    """

    def __init__(self, engine: Any, names: Mapping[int, str]) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._named = {names[id(one)]: one for one in engine.module.parameters()}
        self._found: dict[str, Any] = {}  # of the step in progress, or the last one
        self._known: Mapping[str, Any] | None = None  # of the step to be repeated
        self._linears = LinearGradients(engine.module)
        self._hooks = Hooks()
        self._watch()

    @property
    def left_out(self) -> int:
        """Calls of layers, so far, whose weights got no gradient."""
        return self._linears.count

    def outcome(self) -> dict[str, Any]:
        """What was noted of the last step: numbers, and tensors that nobody changes."""
        return dict(self._found)

    def repeat(self, outcome: Mapping[str, Any] | None, without: Collection[str] = ()) -> None:
        """The next step is a repetition; all ranks call it for the same step, and name the same operators.

        Args:
            outcome: of the first time; None: the next step is no repetition.
            without: operators, of any rank, whose update nobody will use.
        """
        self._known = outcome
        if outcome is None:
            self._linears.remove()
        else:
            self._linears.leave_out([self._named[name] for name in without if name in self._named])

    def close(self) -> None:
        """The engine is as before: nothing is noted any more."""
        self.repeat(None)
        self._hooks.remove()

    def _watch(self) -> None:
        optimizer, wrap = self._optimizer, self._hooks.wrap
        wrap(optimizer, "step", self._step)
        wrap(optimizer, "has_overflow", lambda original, *a, **k: self._noted("overflow", original(*a, **k)))
        wrap(optimizer, "scaled_global_norm", lambda original, *a, **k: self._noted("norm", original(*a, **k)))

    def _noted(self, what: str, found: Any) -> Any:
        """A result, or in its place that of the first time.

        It was computed all the same: ranks of other stages, which compute their gradients, may wait for this one in it.
        """
        if self._known is not None:
            found = self._known[what]
        self._found[what] = found.to(self._engine.device) if isinstance(found, torch.Tensor) else found
        return self._found[what]

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What is left of a step: whether it was skipped, and the norm that the engine reports."""
        self._found = {}
        result = original(*args, **kwargs)
        self._optimizer._global_grad_norm = self._noted("reported", self._optimizer._global_grad_norm)
        self._found["skipped"] = self._optimizer.overflow
        return result


class LinearGradients:
    """Gives the parameters of chosen linear layers gradients of zeros, at no cost of a product.

    All else is as without it, bit for bit: outputs, the gradients of inputs, and the order in which gradients are
    ready, which decides where in a bucket the ranks add them up. So zeros are added up, and not left out: three ranks
    would add up the rest in another order.

    Left out are the layers of type `nn.Linear` alone. Inputs that are not contiguous, autocast and compiled code
    compute every gradient. So does a layer of which some parameter is not chosen.

    Args:
        module: its layers are wrapped on the instance, from the first `leave_out` until `remove`.

    Attributes:
        count: of the calls of layers whose weight gradients were left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._module = module
        self._chosen: frozenset[int] = frozenset()
        self._hooks = Hooks()

    def leave_out(self, parameters: Collection[nn.Parameter]) -> None:
        """Leave these out from the next forward on, and no others."""
        self._chosen = frozenset(map(id, parameters))
        if not self._hooks.installed:
            for layer in self._module.modules():
                if type(layer) is nn.Linear and "forward" not in vars(layer):
                    self._hooks.wrap(layer, "forward", partial(self._forward, layer))

    def remove(self) -> None:
        """Layers are as before."""
        self._hooks.remove()

    def _forward(self, layer: nn.Linear, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._leaves_out(layer, args[0]):
            return original(*args, **kwargs)
        self.count += 1
        # Transposed outside: its node brings the gradient of the weight after that of the bias, as in torch's own.
        return _Linear.apply(args[0], layer.weight.t(), layer.bias, layer)  # type: ignore[no-untyped-call] # torch's

    def _leaves_out(self, layer: nn.Linear, values: Any) -> bool:
        parameters = list(layer.parameters())
        return (
            all(id(one) in self._chosen and type(one) is nn.Parameter and one.requires_grad for one in parameters)
            and type(values) is torch.Tensor
            and values.dim() > 1
            and values.is_contiguous()
            and values.numel() > values.shape[-1] > 1
            and layer.weight.is_contiguous()
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(values.device.type)
            and not torch.compiler.is_compiling()
        )


class _Linear(torch.autograd.Function):
    """`nn.functional.linear` with the gradient of its input alone; the others are zeros."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None, layer: nn.Linear
    ) -> torch.Tensor:
        ctx.save_for_backward(transposed)
        ctx.has_bias = bias is not None
        return nn.functional.linear(values, layer.weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, None]:
        (transposed,) = ctx.saved_tensors
        weight = transposed.t()
        of_input = None
        if ctx.needs_input_grad[0]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_input = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
        of_bias = weight.new_zeros(weight.shape[0]) if ctx.has_bias else None
        return of_input, torch.zeros_like(weight).t(), of_bias, None
