"""Backward passes of linear layers without the gradients of their weights."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from cpsr.engines.hooks import Hooks

__all__ = ["LinearGradients"]


class LinearGradients:
    """Gives the parameters of chosen linear layers gradients of zeros, at no cost of a product.

    All else is as without it, bit for bit: outputs, the gradients of inputs, and the order in which gradients are
    ready, which decides where in a bucket the ranks add them up.

    Left out are the layers of type `nn.Linear` alone. Inputs that are not contiguous, autocast and compiled code
    compute every gradient. So does a layer of which some parameter is not chosen.

    Args:
        module: its layers are wrapped on the instance, until `remove`.

    Attributes:
        count: of the calls of layers whose weight gradients were left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._chosen: frozenset[int] = frozenset()
        self._hooks = Hooks()
        for layer in module.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                self._wrap(layer)

    def leave_out(self, parameters: Collection[nn.Parameter]) -> None:
        """Leave these out from the next forward on, and no others."""
        self._chosen = frozenset(map(id, parameters))

    def remove(self) -> None:
        """Layers are as before."""
        self._chosen = frozenset()
        self._hooks.remove()

    def _wrap(self, layer: nn.Linear) -> None:
        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._leaves_out(layer, *args, **kwargs):
                return original(*args, **kwargs)
            self.count += 1
            # Transposed outside: its node brings the gradient of the weight after that of the bias, as in torch's own.
            return _Linear.apply(args[0], layer.weight.t(), layer.bias, layer)  # type: ignore[no-untyped-call] # torch's

        self._hooks.wrap(layer, "forward", forward)

    def _leaves_out(self, layer: nn.Linear, *args: Any, **kwargs: Any) -> bool:
        if not self._chosen or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        if len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor:
            return False
        values, parameters = args[0], list(layer.parameters())
        shaped = values.dim() > 1 and values.is_contiguous() and values.numel() > values.shape[-1] > 1
        plain = all(type(one) is nn.Parameter and one.requires_grad for one in parameters)
        return (
            shaped
            and plain
            and layer.weight.is_contiguous()
            and all(id(one) in self._chosen for one in parameters)
            and not torch.is_autocast_enabled(values.device.type)
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
