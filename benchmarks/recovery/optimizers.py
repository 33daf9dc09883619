"""The optimizers that workloads train with, and the moments that each keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from cpsr.errors import ConfigError

__all__ = ["OPTIMIZERS", "Moments", "OptimizerName", "Tensors", "Updates", "copied"]

# `sgd` has momentum, without Nesterov's step. `muon` updates the 2-D hidden weights with Muon, the rest with AdamW.
OptimizerName = Literal["adamw", "sgd", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.01
# AdamW and Muon decay by rate times decay, their rates being some 0.003. Rates of SGD are a hundred times that.
SGD_WEIGHT_DECAY = 1e-4
SGD_MOMENTUM = 0.9
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)
BLOCKS = "blocks."  # where a model's hidden weights are

Tensors = dict[str, torch.Tensor]
Moments = dict[str, Tensors]
"""By the optimizer's name of the moment and by parameter; each 1-D float32. Not every parameter has every moment."""


@dataclass(frozen=True)
class _Part:
    """An optimizer, the parameters that it updates, and what it keeps of each."""

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    moments: tuple[str, ...]
    counts_steps: bool


class Updates:
    """The updates of a model's weights; what they do next is determined by the steps taken and the moments.

    Args:
        name: of the optimizer.
        model: on the device that it trains on.

    Raises:
        ConfigError: `muon`, and a model without transformer blocks.
    """

    def __init__(self, name: OptimizerName, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._parts = _parts(name, model)

    def step(self, learning_rate: float) -> None:
        """Clip the gradients, update the weights, and drop the gradients."""
        nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRADIENT_NORM)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = learning_rate
            part.optimizer.step()
            part.optimizer.zero_grad(set_to_none=True)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of all moments, sorted."""
        return tuple(sorted({moment for part in self._parts for moment in part.moments}))

    def state(self) -> Moments:
        """A copy of the moments on the CPU; zeros before the first update."""
        found: Moments = {moment: {} for moment in self.moments}
        for part in self._parts:
            for name, parameter in part.parameters.items():
                kept = part.optimizer.state[parameter]
                for moment in part.moments:
                    found[moment][name] = copied(kept.get(moment, torch.zeros_like(parameter)))
        return found

    def load(self, steps: int, moments: Moments) -> None:
        """Stand after so many steps with these moments; they are copied."""
        for part in self._parts:
            for name, parameter in part.parameters.items():
                state = {
                    moment: moments[moment][name].view_as(parameter).to(parameter.device, copy=True)
                    for moment in part.moments
                }
                if part.counts_steps:  # on the parameter's device, as fused AdamW has it
                    state["step"] = torch.tensor(float(steps), device=parameter.device)
                part.optimizer.state[parameter] = state


def copied(values: torch.Tensor) -> torch.Tensor:
    """A 1-D copy on the CPU."""
    return values.detach().reshape(-1).to("cpu", copy=True)


def _parts(name: OptimizerName, model: nn.Module) -> list[_Part]:
    """No rate given here is used: every step sets its own."""
    parameters = dict(model.named_parameters())
    if name == "adamw":
        return [_adamw(parameters)]
    if name == "sgd":
        sgd = torch.optim.SGD(parameters.values(), lr=0.0, momentum=SGD_MOMENTUM, weight_decay=SGD_WEIGHT_DECAY)
        return [_Part(sgd, parameters, MOMENTUM, counts_steps=False)]
    hidden = {name: values for name, values in parameters.items() if values.ndim == 2 and name.startswith(BLOCKS)}
    if not hidden:
        raise ConfigError(
            "the optimizer muon needs a model with transformer blocks: name another task, or adamw or sgd"
        )
    rest = {name: values for name, values in parameters.items() if name not in hidden}
    # Adjusted so, one rate serves both optimizers, as `torch.optim.Muon` documents.
    muon = torch.optim.Muon(hidden.values(), lr=0.0, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [_Part(muon, hidden, MOMENTUM, counts_steps=False), _adamw(rest)]


def _adamw(parameters: Mapping[str, nn.Parameter]) -> _Part:
    adamw = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=WEIGHT_DECAY, fused=True)
    return _Part(adamw, parameters, ADAMW_MOMENTS, counts_steps=True)
