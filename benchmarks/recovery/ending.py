"""One training from beginning to end, of which the final loss is kept as a file."""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.workload import Workload

__all__ = ["Ended", "Training", "ended", "judged"]

CHECKED_ITERATIONS = 50  # between looks at the loss: what has diverged is not trained on


@dataclass(frozen=True)
class Ended:
    """What became of a training.

    Attributes:
        loss: mean over the data that the end is judged on, in nats; None where the training diverged.
        standard_error: of `loss`, over chunks of that data; None likewise.
        seconds: of the training.
    """

    loss: float | None
    standard_error: float | None
    seconds: float


@dataclass(frozen=True)
class Training:
    """A whole training; plain enough to be sent to another process.

    Attributes:
        workload: what is trained.
        seed: of weights and batches.
        cache: the directory that keeps the endings.
        device: `cpu` or `cuda`.
    """

    workload: Workload
    seed: int
    cache: Path
    device: str

    def ended(self) -> Ended:
        """Train, or read what was kept."""
        path = self.cache / f"{self.workload.name}-seed{self.seed}-{self.key()}.json"
        kept = read_json(path)
        if kept is None:
            kept = asdict(self._train())
            write_json(path, kept)
        return Ended(**kept)

    def trainer(self) -> Trainer:
        """A new one, before the first iteration."""
        return Trainer(self.workload, self.workload.task(), self.seed, self.device)

    def train(self, trainer: Trainer, after_step: Callable[[Trainer], None] = lambda trainer: None) -> bool:
        """Train to the end, calling `after_step` after each iteration; False where the loss diverges on the way."""
        while trainer.iteration < self.workload.iterations:
            loss = trainer.step()
            after_step(trainer)
            if trainer.iteration % CHECKED_ITERATIONS == 0 and not math.isfinite(loss):
                return False
        return True

    def key(self) -> str:
        """Changes with the schedule, the model, its data, and the arithmetic of this machine."""
        trainer, workload = self.trainer(), self.workload
        trainer.step()
        rates = [workload.learning_rate(iteration) for iteration in range(workload.iterations)]
        losses = [float(loss).hex() for loss in trainer.validate()]
        parts = [rates, losses, trainer.state().digest(), torch.__version__, self.device]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def _train(self) -> Ended:
        started = time.perf_counter()
        trainer = self.trainer()
        finite = self.train(trainer)
        losses = trainer.final_losses() if finite else None
        return judged(losses, time.perf_counter() - started)


def judged(losses: NDArray[numpy.float64] | None, seconds: float) -> Ended:
    """A training by the losses of its final chunks, in nats; None where it diverged on the way."""
    mean = math.nan if losses is None else float(losses.mean())
    if losses is None or not math.isfinite(mean):
        return Ended(None, None, seconds)
    return Ended(mean, float(losses.std(ddof=1) / math.sqrt(len(losses))), seconds)


def ended(training: Training) -> Ended:
    """For processes of their own, which import a function."""
    return training.ended()
