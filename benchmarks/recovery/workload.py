"""Which training runs are interrupted: task, schedule and length."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from cpsr.benchmarks.recovery.digits import DigitsTask
from cpsr.benchmarks.recovery.gpt import SIZES, GPTTask
from cpsr.benchmarks.recovery.optimizers import OptimizerName
from cpsr.benchmarks.recovery.schedule import SCHEDULES, Schedule, scheduled_rate
from cpsr.benchmarks.recovery.task import Task
from cpsr.demo.device import CPU, CUDA
from cpsr.errors import ConfigError

__all__ = ["EVERYWHERE", "ITERATIONS", "RATE_STEP", "TASKS", "WORKLOADS", "Workload", "find_workloads", "trained_with"]


@dataclass(frozen=True)
class Workload:
    """One training run, up to its seed.

    Attributes:
        name: task and schedule, as on the command line.
        task: builds the model and its data.
        schedule: of the learning rate, after a warm-up.
        peak_learning_rate: reached after the warm-up.
        iterations: length of the whole training; fractions of it say where a failure strikes.
        needs_gpu: too large to be trained on a CPU.
        snapshot_iterations: weights are kept this often: every interval that divides by it can be studied.
        optimizer: its name.
    """

    name: str
    task: Callable[[], Task] = field(compare=False)  # made anew in every process
    schedule: Schedule
    peak_learning_rate: float
    iterations: int
    needs_gpu: bool = False
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


TASKS: dict[str, Callable[[], Task]] = {
    "gpt-0.1M": partial(GPTTask, SIZES["gpt-0.1M"]),
    "gpt-0.1M-headers": partial(GPTTask, SIZES["gpt-0.1M"], "headers"),
    "gpt-0.1M-documentation": partial(GPTTask, SIZES["gpt-0.1M"], "documentation"),
    "gpt-0.1M-descriptions": partial(GPTTask, SIZES["gpt-0.1M"], "descriptions"),
    "gpt-0.4M": partial(GPTTask, SIZES["gpt-0.4M"]),
    "gpt-0.4M-headers": partial(GPTTask, SIZES["gpt-0.4M"], "headers"),
    "gpt-0.4M-documentation": partial(GPTTask, SIZES["gpt-0.4M"], "documentation"),
    "gpt-0.8M": partial(GPTTask, SIZES["gpt-0.8M"]),
    "digits": DigitsTask,
}


def trained_with(task: str, optimizer: OptimizerName) -> str:
    """The task's name, and the optimizer's where it is not AdamW."""
    return task if optimizer == "adamw" else f"{task}-{optimizer}"


ITERATIONS = 1200
RATE_STEP = 1.4
# Peak rates at which trainings of this length end best: benchmarks/results/2026-11-23-tune*.json (`cpsr bench tune`).
TUNED: dict[tuple[str, Schedule], float] = {
    ("gpt-0.1M", "cosine"): 2.744e-3,
    ("gpt-0.1M", "cosine10"): 2.744e-3,
    ("gpt-0.1M", "wsd"): 2.744e-3,
    ("gpt-0.4M", "cosine10"): 2.744e-3,
    ("gpt-0.4M-documentation", "cosine10"): 3.842e-3,
    ("gpt-0.4M-headers", "cosine10"): 3.842e-3,
    ("digits", "cosine10"): 5.378e-3,
}
# Of the best rate, and of its neighbours in the sweep.
BESIDE = {"": 1.0, "-lower": 1 / RATE_STEP, "-higher": RATE_STEP}

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *(
            Workload(f"{task}-{schedule}{beside}", TASKS[task], schedule, best * factor, ITERATIONS)
            for (task, schedule), best in TUNED.items()
            for beside, factor in BESIDE.items()
        ),
        # Never run on a GPU so far, and not tuned: expect to look after it. It keeps 1.2 GB of weights and as much of
        # each moment every 50 iterations, about 90 GB for the whole run.
        Workload(
            "gpt-350M-cosine",
            partial(GPTTask, SIZES["gpt-350M"]),
            "cosine",
            3e-4,
            ITERATIONS,
            needs_gpu=True,
            snapshot_iterations=50,
        ),
    )
}
EVERYWHERE = tuple(name for name, workload in WORKLOADS.items() if not workload.needs_gpu)


def find_workloads(names: str, device: str = CPU) -> tuple[str, ...]:
    """Names of workloads from a comma-separated list, where a task stands for all its schedules at the best rates.

    Args:
        names: of workloads or tasks.
        device: that they are to train on.

    Raises:
        ConfigError: a name is none of a workload or a task, or it needs a GPU and is to train on the CPU.
    """
    found: list[str] = []
    for name in names.split(","):
        matching = [known for known in WORKLOADS if known == name or known.removeprefix(f"{name}-") in SCHEDULES]
        if not matching:
            raise ConfigError(f"no workload is called '{name}'; there are {', '.join(WORKLOADS)}")
        if device != CUDA and any(WORKLOADS[known].needs_gpu for known in matching):
            raise ConfigError(
                f"the workload '{name}' needs a GPU, and the device is the {device}: run it with --device cuda where "
                "torch finds a GPU"
            )
        found += [known for known in matching if known not in found]
    return tuple(found)
