"""Training runs and the failures in them, measured with what is missing in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.progress import Progress

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.grid import Point, Selection
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.measure import Outcome, PointMeasurement, needed_until
from cpsr.benchmarks.recovery.methods.roster import HARNESS, PREDICTORS, sees_the_run
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS, Workload
from cpsr.demo.device import CPU

__all__ = ["Job", "Run", "measure", "runs_of", "train"]


@dataclass(frozen=True)
class Run:
    """One training run, before it is trained; plain enough to be sent to another process."""

    workload: Workload
    seed: int
    cache: Path
    device: str = CPU

    @property
    def label(self) -> str:
        """For progress bars."""
        return f"{self.workload.name}, seed {self.seed}"

    def trajectory(self) -> Trajectory:
        """What of it is in the cache."""
        return _trajectory(self)


def runs_of(selection: Selection, cache: Path) -> list[Run]:
    """Every seed of every workload of a selection."""
    return [
        Run(WORKLOADS[name], seed, cache, selection.device)
        for name in selection.workloads
        for seed in range(selection.seeds)
    ]


@dataclass(frozen=True)
class Job:
    """Failures of a run, and the methods that they are recovered by."""

    run: Run
    points: tuple[Point, ...]
    methods: tuple[str, ...]

    @property
    def until(self) -> int:
        """How far the fault-free run is needed."""
        return max(needed_until(point) for point in self.points)


def measure(jobs: Sequence[Job], workers: Workers, progress: Progress) -> list[list[Outcome]]:
    """Train the fault-free runs, learn from them, recover at every point; for each job its outcomes, by point.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    train([(job.run, job.until) for job in jobs], workers, progress)
    _learn(jobs, workers, progress)
    return _recover(jobs, workers, progress)


def train(needed: Sequence[tuple[Run, int]], workers: Workers, progress: Progress) -> None:
    """Train every fault-free run as far as it is needed."""
    furthest: dict[Run, int] = {}
    for run, until in needed:
        furthest[run] = max(until, furthest.get(run, 0))
    missing = [(run, until) for run, until in furthest.items() if run.trajectory().missing(until)]
    totals = {run: run.trajectory().missing(until) for run, until in missing}
    bars = {run: progress.add_task(f"{run.label}: fault-free run", total=totals[run]) for run in totals}
    if workers.count == 1:
        for run, until in missing:
            bar = bars[run]
            run.trajectory().extend(until, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
        return

    def look(done: int) -> None:
        for run, until in missing:
            progress.update(bars[run], completed=totals[run] - run.trajectory().missing(until))

    workers.each(_extend, missing, look)


def _extend(needed: tuple[Run, int]) -> None:
    run, until = needed
    run.trajectory().extend(until)


def _learn(jobs: Sequence[Job], workers: Workers, progress: Progress) -> None:
    """Every method's way along the checkpoints, once for all failures of an interval."""
    ways = [
        replace(job, methods=(method,), points=points)
        for job in jobs
        for interval in dict.fromkeys(point.interval for point in job.points)
        for points in [tuple(point for point in job.points if point.interval == interval)]
        for method in dict.fromkeys(PREDICTORS[name].learns_as or name for name in job.methods if name not in HARNESS)
        if sees_the_run(method, interval)
    ]
    if ways:
        bar = progress.add_task("learning along the runs", total=len(ways))
        workers.each(_follow, ways, lambda done: progress.update(bar, completed=done))


def _follow(job: Job) -> None:
    for point in sorted(job.points, key=lambda point: point.checkpoint):
        learned(job.methods[0], job.run.trajectory(), point.interval, point.checkpoint)


def _recover(jobs: Sequence[Job], workers: Workers, progress: Progress) -> list[list[Outcome]]:
    single = [replace(job, points=(point,)) for job in jobs for point in job.points]
    bar = progress.add_task("recoveries", total=len(single))
    found = iter(workers.each(_outcomes, single, lambda done: progress.update(bar, completed=done)))
    return [[outcome for _ in job.points for outcome in next(found)] for job in jobs]


def _outcomes(job: Job) -> list[Outcome]:
    measurement = PointMeasurement(job.run.trajectory(), job.points[0])
    return [measurement.outcome(method) for method in job.methods]


@cache
def _trajectory(run: Run) -> Trajectory:
    """Kept for the run's next point: the fingerprint in its name takes three iterations to find."""
    return Trajectory(run.workload, _task(run.workload), run.seed, run.cache, run.device)


@cache
def _task(workload: Workload) -> Task:
    return workload.task()
