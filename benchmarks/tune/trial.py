"""One training from beginning to end, kept as a file."""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.tune.space import TASKS, Setting

__all__ = ["Ended", "Trial"]

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
class Trial:
    """A training at one rate with one seed.

    Attributes:
        setting: what is trained.
        step: of the rate.
        seed: of weights and batches.
        cache: keeps results.
        device: `cpu` or `cuda`.
    """

    setting: Setting
    step: int
    seed: int
    cache: Path
    device: str

    def ended(self) -> Ended:
        """Train, or read what was kept."""
        path = self.cache / f"{self.setting.name}-rate{self.step:+d}-seed{self.seed}-{self._key()}.json"
        kept = read_json(path)
        if kept is None:
            kept = asdict(self._train())
            write_json(path, kept)
        return Ended(**kept)

    def _train(self) -> Ended:
        started = time.perf_counter()
        trainer = self._trainer()
        while trainer.iteration < self.setting.iterations:
            loss = trainer.step()
            if trainer.iteration % CHECKED_ITERATIONS == 0 and not math.isfinite(loss):
                return Ended(None, None, time.perf_counter() - started)
        losses = trainer.final_losses()
        seconds = time.perf_counter() - started
        mean = float(losses.mean())
        if not math.isfinite(mean):
            return Ended(None, None, seconds)
        return Ended(mean, float(losses.std(ddof=1) / math.sqrt(len(losses))), seconds)

    def _trainer(self) -> Trainer:
        return Trainer(self.setting.workload(self.step, TASKS), _task(self.setting.task), self.seed, self.device)

    def _key(self) -> str:
        """Changes with the schedule, the model, its data, and the arithmetic of this machine."""
        trainer, workload = self._trainer(), self.setting.workload(self.step, TASKS)
        trainer.step()
        rates = [workload.learning_rate(iteration) for iteration in range(workload.iterations)]
        losses = [float(loss).hex() for loss in trainer.validate()]
        parts = [rates, losses, trainer.state().digest(), torch.__version__, self.device]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@cache
def _task(name: str) -> Task:
    """Reads its data once in a process."""
    return TASKS[name]()
