"""Trainings from beginning to end, of which the final loss is kept, and what one more iteration of them is worth."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.end_cost import Ending, IterationWorth, WorthUnknownError, iteration_worth
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.trajectory import Run
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.errors import CPSRError

__all__ = ["final_loss", "worths"]

CHECKED_ITERATIONS = 50  # between looks at the loss: what has diverged is not trained on
LENGTH_SHARES = (0.8, 0.9, 1.1, 1.2)  # of a workload's length: trainings that show what an iteration is worth


def final_loss(run: Run) -> float | None:
    """Train to the end, or read what was kept of that: the loss in nats, None where the training diverged.

    The file's name changes with the schedule, the model, its data, and the arithmetic of this machine.
    """
    trainer, workload = Trainer(run.workload, run.workload.task(), run.seed, run.device), run.workload
    rates = [workload.learning_rate(iteration) for iteration in range(workload.iterations)]
    loss = trainer.step()
    parts = [rates, trainer.state().digest(), torch.__version__, run.device]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    path = run.cache / f"{workload.name}-seed{run.seed}-{key}.json"
    kept: dict[str, float | None] | None = read_json(path)
    if kept is None:
        while trainer.iteration < workload.iterations:
            loss = trainer.step()
            if trainer.iteration % CHECKED_ITERATIONS == 0 and not math.isfinite(loss):
                break
        mean = float(trainer.final_losses().mean())
        kept = {"loss": mean if math.isfinite(loss) and math.isfinite(mean) else None}
        write_json(path, kept)
    return kept["loss"]


def worths(
    own: Mapping[Run, float], cache: Path, workers: Workers, tick: Callable[[int, int], None]
) -> dict[str, IterationWorth]:
    """What one more iteration is worth, by the workload's name, from trainings of other lengths with the same seeds.

    Raises:
        CPSRError: a workload's trainings do not show that a longer one ends lower, or one of them diverged.
    """
    trainings = [
        Run(run.workload.of_length(round(share * run.workload.iterations)), run.seed, cache, run.device)
        for run in own
        for share in LENGTH_SHARES
    ]
    losses = workers.each(final_loss, trainings, lambda done: tick(done, len(trainings)))
    endings: dict[Workload, list[Ending]] = {}
    for run, loss in own.items():
        endings.setdefault(run.workload, []).append(Ending(run.seed, run.workload.iterations, loss))
    for place, (training, found) in enumerate(zip(trainings, losses, strict=True)):
        if found is None:
            name = f"{training.workload.name}, seed {training.seed}"
            raise CPSRError(f"{name}: the training without a failure diverged")
        workload = list(own)[place // len(LENGTH_SHARES)].workload
        endings[workload].append(Ending(training.seed, training.workload.iterations, found))
    worth = {}
    for workload, of in endings.items():
        of.sort(key=lambda ending: (repr(ending.group), ending.iterations))  # the last bits depend on the order
        try:
            worth[workload.name] = iteration_worth(of, workload.iterations)
        except WorthUnknownError as error:
            raise CPSRError(f"{workload.name}: {error}") from error
    return worth
