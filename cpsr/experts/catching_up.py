"""Longer optimizer steps for experts that missed iterations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.engines.hooks import StepHooks
from cpsr.engines.sharded import local

__all__ = ["CatchingUp", "Missed"]

_NOTHING_LEFT = 1e-9  # iterations; less is rounding


@dataclass(frozen=True)
class Missed:
    """Weights that are older than the rest of the model.

    Attributes:
        values: what the optimizer updates, `(numel,)`; a view of its own tensor.
        iterations: number of iterations without training.
    """

    values: torch.Tensor
    iterations: float


class CatchingUp:
    """Lengthens the optimizer's steps of such weights until the missed iterations are made up.

    Each step moves them `step_factor` times as far as the optimizer would, and so makes up `step_factor - 1` missed
    iterations: the present direction replaces the missed one. Gradients and moments are the optimizer's own. While
    nothing is missing, a step costs two calls that return at once.

    Wraps torch's `Optimizer.step`, before an engine passes new weights to the model. Engines skip it on an overflow,
    which then makes up for nothing, and may call it once for each parameter group. Construct it before other hooks on
    complete steps: hooks run in the order of registration.

    Args:
        optimizers: torch's, inside of an engine's wrapper.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._more = 0.0
        self._left: dict[str, float] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # room of its own for each, so that no step allocates
        self._hooks = [StepHooks(one, self._keep, self._lengthen) for one in optimizers]

    @property
    def left(self) -> Mapping[str, float]:
        """Iterations still to be made up, by name."""
        return self._left

    def begin(self, missed: Mapping[str, Missed], step_factor: float) -> None:
        """From the next step on make up for these, instead of earlier ones.

        Args:
            missed: by name.
            step_factor: above 1.

        Raises:
            ValueError: a factor not above 1, iterations below 0, or either of them not finite; nothing was changed.
        """
        if not 1.0 < step_factor < math.inf:
            raise ValueError(f"step_factor = {step_factor}: expected a finite number above 1")
        for name, one in missed.items():
            if not 0 <= one.iterations < math.inf:
                raise ValueError(f"{name} missed {one.iterations} iterations: expected a finite number, 0 or larger")
        late = {name: one for name, one in missed.items() if one.iterations > 0}
        self._more = step_factor - 1.0
        self._left = {name: one.iterations for name, one in late.items()}
        self._values = {name: one.values for name, one in late.items()}
        self._before = {name: torch.empty_like(one.values) for name, one in late.items()}

    def forget(self) -> None:
        """Stop making up for iterations."""
        self._left, self._values, self._before = {}, {}, {}
        for hook in self._hooks:
            hook.forget()

    def close(self) -> None:
        """Remove the hooks."""
        self.forget()
        for hook in self._hooks:
            hook.remove()

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for name in self._stepped_by(optimizer):
                self._before[name].copy_(self._values[name])

    def _lengthen(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for name in self._stepped_by(optimizer):
                values, before = self._values[name], self._before[name]
                more = min(self._more, self._left[name])
                values.add_(before.sub_(values), alpha=-more)
                self._left[name] -= more
                if self._left[name] <= _NOTHING_LEFT:
                    del self._left[name], self._values[name], self._before[name]

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The weights in its present parameters: DeepSpeed's ZeRO passes one group after the other."""
        if not self._values:
            return []
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        memory = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
        return [name for name, values in self._values.items() if values.untyped_storage().data_ptr() in memory]
