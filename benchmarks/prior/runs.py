"""The training runs that the prior is fitted on; none of them is one that is reported on."""

from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.recovery.jobs import Run
from cpsr.benchmarks.recovery.optimizers import OptimizerName
from cpsr.benchmarks.recovery.schedule import Schedule
from cpsr.benchmarks.recovery.workload import ITERATIONS, RATE_STEP, TASKS, Workload, trained_with

__all__ = ["RUNS", "PriorRun"]


@dataclass(frozen=True)
class PriorRun:
    """A workload and the seed of its one run; seeds from 100 on are drawn nowhere else.

    Attributes:
        workload: that is trained.
        seed: of its one run.
        group: task and optimizer; runs of one group differ in schedule and rate alone.
    """

    workload: Workload
    seed: int
    group: str

    def in_cache(self, cache: Path) -> Run:
        """The run as it is trained, kept there."""
        return Run(self.workload, self.seed, cache)


@dataclass(frozen=True)
class _Group:
    """Runs of one task and optimizer.

    Attributes:
        task: its name.
        optimizer: its name.
        best: peak rate at which trainings with `cosine10` end best, as `cpsr bench tune` found it.
        schedules: of the runs.
        steps: how far the rates of the runs go from the best, in steps of 1.4.
    """

    task: str
    optimizer: OptimizerName
    best: float
    schedules: tuple[Schedule, ...]
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        """The task, and the optimizer where it is not AdamW."""
        return trained_with(self.task, self.optimizer)

    def workloads(self) -> list[Workload]:
        """Every schedule at every rate."""
        return [self._workload(schedule, step) for schedule in self.schedules for step in self.steps]

    def _workload(self, schedule: Schedule, step: int) -> Workload:
        name = f"prior-{self.name}-{schedule}{step:+d}"
        rate = self.best * RATE_STEP**step
        return Workload(name, TASKS[self.task], schedule, rate, ITERATIONS, optimizer=self.optimizer)


# Most jobs are tuned roughly, and rather below the best rate than above. A group's place decides the seeds of its runs:
# add others at the end. Muon takes four times as long here.
GROUPS = (
    _Group("gpt-0.1M", "adamw", 2.7e-3, ("cosine", "cosine10", "wsd"), (-4, -2, 0, 1)),
    _Group("gpt-0.1M", "sgd", 2.744e-1, ("cosine10",), (-2, 0)),
    _Group("gpt-0.1M-descriptions", "adamw", 3.842e-3, ("cosine10",), (-2, 0)),
    _Group("gpt-0.1M", "muon", 1.476e-2, ("cosine10",), (0,)),
)


def _runs() -> tuple[PriorRun, ...]:
    every = [(workload, group) for group in GROUPS for workload in group.workloads()]
    return tuple(PriorRun(workload, 100 + place, group.name) for place, (workload, group) in enumerate(every))


RUNS: tuple[PriorRun, ...] = _runs()
