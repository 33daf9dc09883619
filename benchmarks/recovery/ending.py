"""Trainings from beginning to end, of which the final loss is kept, and what one more iteration of them is worth."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending, IterationWorth, WorthUnknownError, iteration_worth

__all__ = ["Ended", "Training", "ended", "worths"]

CHECKED_ITERATIONS = 50  # between looks at the loss: what has diverged is not trained on
LENGTH_SHARES = (0.8, 0.9, 1.1, 1.2)  # of a workload's length: trainings that show what an iteration is worth


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
        path = self.cache / f"{self.workload.name}-seed{self.seed}-{self._key()}.json"
        kept = read_json(path)
        if kept is None:
            kept = asdict(self._train())
            write_json(path, kept)
        return Ended(**kept)

    def _trainer(self) -> Trainer:
        return Trainer(self.workload, self.workload.task(), self.seed, self.device)

    def _key(self) -> str:
        """Changes with the schedule, the model, its data, and the arithmetic of this machine."""
        trainer, workload = self._trainer(), self.workload
        trainer.step()
        rates = [workload.learning_rate(iteration) for iteration in range(workload.iterations)]
        parts = [rates, trainer.state().digest(), torch.__version__, self.device]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def _train(self) -> Ended:
        started = time.perf_counter()
        trainer = self._trainer()
        while trainer.iteration < self.workload.iterations:
            loss = trainer.step()
            if trainer.iteration % CHECKED_ITERATIONS == 0 and not math.isfinite(loss):
                return Ended(None, None, time.perf_counter() - started)
        losses = trainer.final_losses()
        seconds, mean = time.perf_counter() - started, float(losses.mean())
        if not math.isfinite(mean):
            return Ended(None, None, seconds)
        return Ended(mean, float(losses.std(ddof=1) / math.sqrt(len(losses))), seconds)


def ended(training: Training) -> Ended:
    """For processes of their own, which import a function."""
    return training.ended()


def worths(
    own: Mapping[Workload, Mapping[int, float]],
    cache: Path,
    device: str,
    workers: Workers,
    tick: Callable[[int, int], None],
) -> dict[str, IterationWorth]:
    """What one more iteration is worth, by the workload's name, from trainings of other lengths with the same seeds.

    Args:
        own: final losses of those of the workload's own length, by seed.
        cache: keeps the endings.
        device: `cpu` or `cuda`.
        workers: processes that train.
        tick: called with the number of trainings done, and of all.

    Raises:
        CPSRError: a workload's trainings do not show that a longer one ends lower, or one of them diverged.
    """
    trainings = {
        workload: [
            Training(workload.of_length(round(share * workload.iterations)), seed, cache, device)
            for seed in losses
            for share in LENGTH_SHARES
        ]
        for workload, losses in own.items()
    }
    every = [training for of in trainings.values() for training in of]
    endings_of = dict(zip(every, workers.each(ended, every, lambda done: tick(done, len(every))), strict=True))
    found = {}
    for workload, of in trainings.items():
        endings = [Ending(seed, workload.iterations, loss) for seed, loss in own[workload].items()]
        for training in of:
            loss = endings_of[training].loss
            if loss is None:
                name = f"{training.workload.name}, seed {training.seed}"
                raise CPSRError(f"{name}: the training without a failure diverged")
            endings.append(Ending(training.seed, training.workload.iterations, loss))
        endings.sort(key=lambda ending: (repr(ending.group), ending.iterations))  # the last bits depend on the order
        try:
            found[workload.name] = iteration_worth(endings, workload.iterations)
        except WorthUnknownError as error:
            raise CPSRError(f"{workload.name}: {error}") from error
    return found
