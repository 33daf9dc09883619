"""One training run in plain torch, that can be put at any iteration of its life."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from cpsr.benchmarks.recovery.tasks import Task
from cpsr.benchmarks.recovery.workload import OptimizerName, Workload
from cpsr.demo.device import CPU, CUDA
from cpsr.errors import ConfigError

__all__ = ["State", "Tensors", "Trainer"]

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


class _Part(NamedTuple):
    """An optimizer, the parameters that it updates, and the names of what it keeps of each."""

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    moments: tuple[str, ...]


def _parts(name: OptimizerName, parameters: Mapping[str, nn.Parameter]) -> list[_Part]:
    """No rate given here is used: every step sets its own.

    Raises:
        ConfigError: `muon`, and a model without transformer blocks.
    """
    if name == "adamw":
        return [_adamw(parameters)]
    if name == "sgd":
        sgd = torch.optim.SGD(parameters.values(), lr=0.0, momentum=SGD_MOMENTUM, weight_decay=SGD_WEIGHT_DECAY)
        return [_Part(sgd, parameters, MOMENTUM)]
    hidden = {name: values for name, values in parameters.items() if values.ndim == 2 and name.startswith(BLOCKS)}
    if not hidden:
        raise ConfigError(
            "the optimizer muon needs a model with transformer blocks: name another task, or adamw or sgd"
        )
    rest = {name: values for name, values in parameters.items() if name not in hidden}
    # Adjusted so, one rate serves both optimizers, as `torch.optim.Muon` documents.
    muon = torch.optim.Muon(hidden.values(), lr=0.0, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [_Part(muon, hidden, MOMENTUM), _adamw(rest)]


def _adamw(parameters: Mapping[str, nn.Parameter]) -> _Part:
    adamw = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=WEIGHT_DECAY, fused=True)
    return _Part(adamw, parameters, ADAMW_MOMENTS)


def _copied(values: torch.Tensor) -> torch.Tensor:
    """A 1-D copy on the CPU."""
    return values.detach().reshape(-1).to("cpu", copy=True)


@dataclass(frozen=True)
class State:
    """Weights by parameter name and the optimizer's moments, each 1-D float32, as they are before the next update.

    Attributes:
        iteration: updates made so far.
    """

    iteration: int
    weights: Tensors
    moments: Moments

    def is_finite(self) -> bool:
        """Whether every weight is."""
        return all(bool(torch.isfinite(values).all()) for values in self.weights.values())

    def digest(self) -> str:
        """Hash of every bit of it, and of the iteration."""
        hasher = xxhash.xxh3_128(str(self.iteration).encode())
        for part in (self.weights, *(self.moments[moment] for moment in sorted(self.moments))):
            for name in sorted(part):
                hasher.update(name.encode())
                hasher.update(part[name].numpy().data)
        return hasher.hexdigest()


class Trainer:
    """A workload under one seed; everything it does is determined by its state.

    States and losses are on the CPU, wherever it trains. On a GPU this process computes with torch's deterministic
    algorithms from then on.
    """

    def __init__(self, workload: Workload, task: Task, seed: int, device: str = CPU) -> None:
        self._workload = workload
        self._task = task
        self._seed = seed
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self._device = _made_exact(torch.device(device))
            self._model = task.model().to(self._device)
        self._parameters: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        self._parts = _parts(workload.optimizer, self._parameters)
        self._rate_factor, self._rate_until = 1.0, 0
        self.iteration = 0

    def step(self, batches_of: int | None = None) -> float:
        """Train one iteration, on the batch of another seed where one is given; returns its training loss in nats."""
        seed = self._seed if batches_of is None else batches_of
        batch = _moved(self._task.batch(seed, self.iteration), self._device)
        loss = self._task.loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRADIENT_NORM)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            part.optimizer.step()
            part.optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        return float(loss.detach())

    def scale_rates(self, factor: float, until: int) -> None:
        """Train the updates before iteration `until` at so many times the learning rates of the workload."""
        self._rate_factor, self._rate_until = factor, until

    def _learning_rate(self) -> float:
        rate = self._workload.learning_rate(self.iteration)
        return self._rate_factor * rate if self.iteration < self._rate_until else rate

    def train_to(self, iteration: int) -> None:
        """Train until `iteration` updates were made."""
        while self.iteration < iteration:
            self.step()

    def final_losses(self) -> NDArray[numpy.float64]:
        """Loss of each chunk of the data that the end of a training is judged on, in nats."""
        with torch.no_grad():
            losses = self._task.final_losses(self._model)
        return losses.double().cpu().numpy()

    def probe(self, state: State, batches: int) -> float:
        """Mean loss in nats of a state's weights on the newest training batches before its iteration."""
        self.load(state)
        first = max(0, state.iteration - batches)
        with torch.no_grad():
            losses = [
                self._task.loss(self._model, _moved(self._task.batch(self._seed, at), self._device))
                for at in range(first, state.iteration)
            ]
        return float(torch.stack(losses).mean())

    def weights(self) -> Tensors:
        """A copy of the weights, 1-D by parameter name."""
        return {name: _copied(parameter) for name, parameter in self._parameters.items()}

    def state(self) -> State:
        """A copy of everything that the next update depends on; the moments are zeros before the first update."""
        found: Moments = {moment: {} for moment in self.moments}
        for part in self._parts:
            for name, parameter in part.parameters.items():
                kept = part.optimizer.state[parameter]
                for moment in part.moments:
                    found[moment][name] = _copied(kept.get(moment, torch.zeros_like(parameter)))
        return State(self.iteration, self.weights(), found)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments that a state has, sorted."""
        return tuple(sorted({moment for part in self._parts for moment in part.moments}))

    def load(self, state: State) -> None:
        """Stand where `state` stands; it is copied."""
        self.iteration = state.iteration
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(state.weights[name].view_as(parameter))
        for part in self._parts:
            for name, parameter in part.parameters.items():
                kept = {
                    moment: state.moments[moment][name].view_as(parameter).to(parameter.device, copy=True)
                    for moment in part.moments
                }
                if part.moments == ADAMW_MOMENTS:  # on the parameter's device, as fused AdamW has it
                    kept["step"] = torch.tensor(float(state.iteration), device=parameter.device)
                part.optimizer.state[parameter] = kept


def _made_exact(device: torch.device) -> torch.device:
    """The device, whose arithmetic gives the same twice from now on."""
    if device.type == CUDA:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first call
        torch.use_deterministic_algorithms(True)
        # The backward of this kernel adds in any order. The others that torch chooses from do not.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    return device


def _moved(batch: Any, device: torch.device) -> Any:
    return batch.to(device) if isinstance(batch, torch.Tensor) else tuple(part.to(device) for part in batch)
