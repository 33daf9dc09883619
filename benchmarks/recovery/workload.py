"""Which training runs are interrupted: the model, its text, the schedule of its learning rate, and its length."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from cpsr.benchmarks.recovery.tasks import TASKS, Task
from cpsr.errors import ConfigError

__all__ = [
    "ITERATIONS",
    "OPTIMIZERS",
    "RATE_STEP",
    "SCHEDULES",
    "WORKLOADS",
    "OptimizerName",
    "Schedule",
    "Workload",
    "find_workloads",
    "scheduled_rate",
    "trained_with",
]

# `sgd` has momentum, without Nesterov's step. `muon` updates the 2-D hidden weights with Muon, the rest with AdamW.
OptimizerName = Literal["adamw", "sgd", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
# `cosine` falls to 0 as half a cosine, `cosine10` to a tenth of the peak. `wsd` (warm-up, stable, decay) stays at the
# peak, and falls linearly to 0 over the last fifth.
Schedule = Literal["cosine", "cosine10", "wsd"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
WARM_UP_ITERATIONS = 50
FLOOR_SHARE = 0.1
DECAY_SHARE = 0.2


def scheduled_rate(schedule: Schedule, peak: float, iteration: int, iterations: int) -> float:
    """Learning rate of the update that takes a training from `iteration` to the next."""
    warmed = peak * min(1.0, (iteration + 1) / WARM_UP_ITERATIONS)
    done = min(1.0, iteration / iterations)
    if schedule == "wsd":
        return warmed * min(1.0, (1.0 - done) / DECAY_SHARE)
    falling = 0.5 * (1.0 + math.cos(math.pi * done))
    floor = FLOOR_SHARE if schedule == "cosine10" else 0.0
    return warmed * (floor + (1.0 - floor) * falling)


@dataclass(frozen=True)
class Workload:
    """One training run, up to its seed.

    Attributes:
        name: task and schedule, as on the command line.
        task: builds the model and its data.
        schedule: of the learning rate, after a warm-up.
        peak_learning_rate: reached after the warm-up.
        iterations: length of the whole training; fractions of it say where a failure strikes.
        snapshot_iterations: weights are kept this often: every interval that divides by it can be studied.
        optimizer: its name.
    """

    name: str
    task: Callable[[], Task] = field(compare=False)  # made anew in every process
    schedule: Schedule
    peak_learning_rate: float
    iterations: int
    snapshot_iterations: int = 10
    optimizer: OptimizerName = "adamw"

    def learning_rate(self, iteration: int) -> float:
        """Of the update that takes the run from `iteration` to the next."""
        return scheduled_rate(self.schedule, self.peak_learning_rate, iteration, self.iterations)

    @cached_property
    def times(self) -> list[float]:
        """Cumulative learning rate up to each iteration, `iterations + 1` of them."""
        sums = [0.0]
        for iteration in range(self.iterations):
            sums.append(sums[-1] + self.learning_rate(iteration))
        return sums

    def of_length(self, iterations: int) -> "Workload":
        """The same training under a schedule of another length."""
        return replace(self, name=f"{self.name}-{iterations}", iterations=iterations)

    def peak_until(self, iteration: int) -> float:
        """Largest learning rate of the updates before `iteration`."""
        return max((self.learning_rate(at) for at in range(iteration)), default=0.0)


def trained_with(task: str, optimizer: OptimizerName) -> str:
    """The task's name, and the optimizer's where it is not AdamW."""
    return task if optimizer == "adamw" else f"{task}-{optimizer}"


ITERATIONS = 1200
RATE_STEP = 1.4
# Peak rates at which trainings of this length end best: benchmarks/results/*-tune*.json (`cpsr bench tune`).
# Of two sweeps of `gpt-0.4M-perl` with `cosine10` the later one counts: at 2.744e-3, the best on another machine, one
# seed of three does not come back from a spike.
TUNED: dict[tuple[str, Schedule], float] = {
    ("gpt-0.1M", "cosine"): 2.744e-3,
    ("gpt-0.1M", "cosine10"): 2.744e-3,
    ("gpt-0.1M", "wsd"): 2.744e-3,
    ("gpt-0.4M", "cosine10"): 2.744e-3,
    ("gpt-0.4M-documentation", "cosine10"): 3.842e-3,
    ("gpt-0.4M-headers", "cosine10"): 3.842e-3,
    ("gpt-0.4M-perl", "cosine10"): 1.960e-3,
    ("gpt-0.4M-perl", "wsd"): 1.960e-3,
    ("gpt-0.4M-debian", "cosine10"): 5.378e-3,
    ("lstm-0.2M-perl", "cosine10"): 2.066e-2,
}
# Of the best rate, and of its neighbours in the sweep.
BESIDE = {"": 1.0, "-lower": 1 / RATE_STEP, "-higher": RATE_STEP}
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(f"{task}-{schedule}{beside}", TASKS[task], schedule, best * factor, ITERATIONS)
        for (task, schedule), best in TUNED.items()
        for beside, factor in BESIDE.items()
    )
}


def find_workloads(names: str) -> tuple[str, ...]:
    """Names of workloads from a comma-separated list, where a task stands for all its schedules at the best rates.

    Raises:
        ConfigError: a name is none of a workload or a task.
    """
    found: list[str] = []
    for name in names.split(","):
        matching = [known for known in WORKLOADS if known == name or known.removeprefix(f"{name}-") in SCHEDULES]
        if not matching:
            raise ConfigError(f"no workload is called '{name}'; there are {', '.join(WORKLOADS)}")
        found += [known for known in matching if known not in found]
    return tuple(found)
