"""Averages of the weights along a training, which leave it as it is."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cpsr.benchmarks.recovery.trainer import Tensors, Trainer
from cpsr.benchmarks.recovery.workload import Workload

__all__ = ["AVERAGES", "Plain"]

DECAYS = (0.95, 0.98, 0.99)  # of an exponential average, per iteration: a mean age of 20, 50 and 100 iterations
EMA_ITERATIONS = 5  # between two updates, each with the decay of five
COUNTS = (2, 4, 8)  # snapshots in a mean
SNAPSHOT_ITERATIONS = 25  # between those


def _ema(decay: float) -> str:
    return f"EMA {decay:g}"


def _lawa(count: int) -> str:
    return f"LAWA {count}"


AVERAGES = (*map(_ema, DECAYS), *map(_lawa, COUNTS))
"""Names of the averages."""


@dataclass(frozen=True)
class Plain:
    """The optimizer alone; its averages are judged at the end."""

    @property
    def name(self) -> str:
        """In one word."""
        return "plain"

    def begin(self, trainer: Trainer, workload: Workload, seed: int) -> "Averaging":
        """Accompany a training."""
        return Averaging(trainer)


class Averaging:
    """Averages of one training; see `Course`."""

    def __init__(self, trainer: Trainer) -> None:
        self._exponential = {decay: trainer.weights() for decay in DECAYS}
        self._snapshots: deque[Tensors] = deque(maxlen=max(COUNTS))

    def after_step(self, trainer: Trainer) -> None:
        """Take up the weights where they are due."""
        if trainer.iteration % EMA_ITERATIONS == 0:
            now = trainer.weights()
            for decay, average in self._exponential.items():
                for name, values in average.items():
                    values.lerp_(now[name], 1.0 - decay**EMA_ITERATIONS)
        if trainer.iteration % SNAPSHOT_ITERATIONS == 0:
            self._snapshots.append(trainer.weights())

    def averages(self) -> Mapping[str, Tensors]:
        """All that there are snapshots for."""
        found = {_ema(decay): average for decay, average in self._exponential.items()}
        for count in COUNTS:
            newest = list(self._snapshots)[-count:]
            if len(newest) == count:
                found[_lawa(count)] = {
                    name: torch.stack([weights[name] for weights in newest]).mean(0) for name in newest[0]
                }
        return found
