"""What is done beside the optimizer in a training without a failure."""

from collections.abc import Mapping
from typing import Protocol

from cpsr.benchmarks.recovery.trainer import Tensors, Trainer
from cpsr.benchmarks.recovery.workload import Workload

__all__ = ["Course", "Way"]


class Course(Protocol):
    """A way in one training."""

    def after_step(self, trainer: Trainer) -> None:
        """Do what is due after this iteration."""

    def averages(self) -> Mapping[str, Tensors]:
        """Weights that are judged at the end beside the training's own, by name."""


class Way(Protocol):
    """A way with its settings; plain enough to be sent to another process."""

    @property
    def name(self) -> str:
        """All settings in one word, fit for a file's name."""

    def begin(self, trainer: Trainer, workload: Workload, seed: int) -> Course:
        """Accompany a training that is at its beginning."""
