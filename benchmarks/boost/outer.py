"""An outer optimizer on the displacement of many iterations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from cpsr.benchmarks.recovery.trainer import Tensors, Trainer
from cpsr.benchmarks.recovery.workload import Workload

__all__ = ["Outer"]


@dataclass(frozen=True)
class Outer:
    """Nesterov's momentum on the displacement over `every` iterations (as in DiLoCo and SNOO).

    Attributes:
        every: iterations between two outer steps.
        momentum: of the outer optimizer.
        rate: its learning rate; with 1 and no momentum it changes nothing.
    """

    every: int
    momentum: float
    rate: float

    @property
    def name(self) -> str:
        """In one word."""
        return f"outer-{self.every}-{self.momentum:g}-{self.rate:g}"

    def begin(self, trainer: Trainer, workload: Workload, seed: int) -> "Stepping":
        """Accompany a training."""
        return Stepping(self, trainer)


class Stepping:
    """An outer optimizer in one training; see `Course`. Moments of the inner optimizer stay."""

    def __init__(self, outer: Outer, trainer: Trainer) -> None:
        self._outer = outer
        self._weights = trainer.weights()
        self._velocity = {name: torch.zeros_like(values) for name, values in self._weights.items()}

    def after_step(self, trainer: Trainer) -> None:
        """Make an outer step where one is due."""
        outer = self._outer
        if trainer.iteration % outer.every:
            return
        state = trainer.state()
        for name, values in self._weights.items():
            displacement = state.weights[name] - values
            self._velocity[name].mul_(outer.momentum).add_(displacement)
            values.add_(displacement + outer.momentum * self._velocity[name], alpha=outer.rate)
        trainer.load(replace(state, weights=self._weights))

    def averages(self) -> Mapping[str, Tensors]:
        """None."""
        return {}
