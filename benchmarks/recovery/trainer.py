"""One training run in plain torch, that can be put at any iteration of its life."""

import os
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from cpsr.benchmarks.recovery.optimizers import Moments, Tensors, Updates, copied
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.demo.device import CPU, CUDA

__all__ = ["State", "Tensors", "Trainer"]


@dataclass(frozen=True)
class State:
    """Weights by parameter name and the optimizer's moments, each 1-D float32, as they are before the next update.

    Attributes:
        iteration: updates made so far.
        optimizer_since: the iteration at which the optimizer began anew; it counts its steps from there.
    """

    iteration: int
    weights: Tensors
    moments: Moments
    optimizer_since: int = 0

    def is_finite(self) -> bool:
        """Whether every weight is."""
        return all(bool(torch.isfinite(values).all()) for values in self.weights.values())

    def digest(self) -> str:
        """Hash of every bit of it, and of the iterations."""
        since = f" since {self.optimizer_since}" if self.optimizer_since else ""
        hasher = xxhash.xxh3_128(f"{self.iteration}{since}".encode())
        for part in (self.weights, *(self.moments[moment] for moment in sorted(self.moments))):
            for name in sorted(part):
                hasher.update(name.encode())
                hasher.update(part[name].numpy().data)
        return hasher.hexdigest()


class Trainer:
    """A workload under one seed; everything it does is determined by its state.

    States and losses are on the CPU, wherever it trains. On a GPU this process computes with torch's deterministic
    algorithms from then on.

    Args:
        workload: what is trained, and its schedule.
        task: the workload's task, built once for many trainers.
        seed: of the initial weights and the batches.
        device: `cpu` or `cuda`.
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
        self._updates = Updates(workload.optimizer, self._model)
        self._optimizer_since = 0
        self.iteration = 0

    def step(self, batches_of: int | None = None) -> float:
        """Train one iteration, on the batch of another seed where one is given; returns its training loss in nats."""
        seed = self._seed if batches_of is None else batches_of
        batch = _moved(self._task.batch(seed, self.iteration), self._device)
        loss = self._task.loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._updates.step(self._workload.learning_rate(self.iteration))
        self.iteration += 1
        return float(loss.detach())

    def train_to(self, iteration: int) -> None:
        """Train until `iteration` updates were made."""
        while self.iteration < iteration:
            self.step()

    def validate(self) -> NDArray[numpy.float64]:
        """Loss of each validation chunk, in nats."""
        with torch.no_grad():
            losses = self._task.validation_losses(self._model)
        return losses.double().cpu().numpy()

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
        return {name: copied(parameter) for name, parameter in self._parameters.items()}

    def state(self) -> State:
        """A copy of everything that the next update depends on."""
        return State(self.iteration, self.weights(), self._updates.state(), self._optimizer_since)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments that a state has."""
        return self._updates.moments

    def load(self, state: State) -> None:
        """Stand where `state` stands; it is copied."""
        self.iteration = state.iteration
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(state.weights[name].view_as(parameter))
        self._optimizer_since = state.optimizer_since
        self._updates.load(state.iteration - state.optimizer_since, state.moments)


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
