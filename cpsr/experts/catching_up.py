"""Experts that missed iterations, until longer steps have made up for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["CatchingUp", "Missed"]

_NOTHING_LEFT = 1e-9  # iterations; what is less is rounding


@dataclass(frozen=True)
class Missed:
    """Weights that are older than the rest of the model.

    Attributes:
        values: what the optimizer updates, `(numel,)`; a view of its own tensor.
        iterations: for which they were not trained.
    """

    values: torch.Tensor
    iterations: float


class CatchingUp:
    """Lengthens the optimizer's steps of such weights until what they missed is made up.

    Each step moves them `step_factor` times as far as the optimizer would, and so stands for `step_factor - 1` of those
    that they missed, too: the way that they go now is taken for the way that they would have gone. Gradients and
    moments are the optimizer's own. While nothing is to be made up a step costs two calls that return at once.

    Works around torch's `Optimizer.step`, before an engine hands the new weights on to the model. Engines skip it on an
    overflow, which so makes up for nothing, and may call it once for each parameter group. To be made before whoever
    is told of complete steps by the same hooks: these run in the order in which they came.

    Args:
        optimizer: torch's, inside of an engine's wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._more = 0.0
        self._left: dict[str, float] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # room of its own for each, so that no step allocates
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._lengthen),
        ]

    @property
    def left(self) -> Mapping[str, float]:
        """Iterations that are still to be made up, by name."""
        return self._left

    def begin(self, missed: Mapping[str, Missed], step_factor: float) -> None:
        """From the next step on make up for these, in place of what there was.

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
        """Nothing is to be made up any more."""
        self._left, self._values, self._before = {}, {}, {}

    def close(self) -> None:
        """Take the hooks off."""
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
        """What lies in the parameters that it has now: DeepSpeed's ZeRO gives it one group after the other."""
        if not self._values:
            return []
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        return [name for name, values in self._values.items() if values.untyped_storage().data_ptr() in memory]
