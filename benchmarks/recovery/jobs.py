"""Training runs and the failures in them, measured with what is missing in the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.progress import Progress

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Training
from cpsr.benchmarks.recovery.grid import Point, Selection
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.measure import Outcome, PointMeasurement
from cpsr.benchmarks.recovery.methods.roster import HARNESS, PREDICTORS, sees_the_run
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS, Workload
from cpsr.benchmarks.recovery.worth import trainings_for, worths
from cpsr.demo.device import CPU
from cpsr.fitter.end_cost import Ending, IterationWorth

__all__ = ["Job", "Run", "Worths", "measure", "runs_of", "train", "worths_of"]

Worths = Mapping[str, IterationWorth]


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


def measure(jobs: Sequence[Job], workers: Workers, progress: Progress) -> tuple[list[list[Outcome]], Worths]:
    """Train the fault-free runs, learn from them, recover at every point.

    Returns:
        For each job its outcomes, by point; and by workload what an iteration is worth.

    Raises:
        CPSRError: the cache is damaged, the machine does not compute the same twice, or a workload's trainings do not
            show what an iteration is worth.
    """
    runs = [job.run for job in jobs]
    train(runs, workers, progress)
    found = worths_of(runs, workers, progress)
    _learn(jobs, workers, progress)
    return _recover(jobs, found, workers, progress), found


def worths_of(runs: Sequence[Run], workers: Workers, progress: Progress) -> Worths:
    """What an iteration is worth, by workload, from the whole runs and trainings of other lengths with their seeds.

    Args:
        runs: trained to their ends already (`train`).
        workers: processes that train.
        progress: shows the trainings.

    Raises:
        CPSRError: as `measure`.
    """
    trainings: dict[Workload, list[Training]] = {}
    own: dict[Workload, list[Ending]] = {}
    for run in dict.fromkeys(runs):
        others = trainings_for(run.workload, run.seed, run.cache, run.device)
        trainings.setdefault(run.workload, []).extend(others)
        ending = Ending(run.seed, run.workload.iterations, float(run.trajectory().final_losses().mean()))
        own.setdefault(run.workload, []).append(ending)
    total = sum(len(of) for of in trainings.values())
    bar = progress.add_task("trainings of other lengths", total=total)
    return worths(trainings, own, workers, lambda done: progress.update(bar, completed=done))


def train(runs: Sequence[Run], workers: Workers, progress: Progress) -> None:
    """Train every fault-free run to its end."""
    totals = {run: run.trajectory().missing(run.workload.iterations) for run in dict.fromkeys(runs)}
    missing = [run for run, count in totals.items() if count]
    bars = {run: progress.add_task(f"{run.label}: fault-free run", total=totals[run]) for run in missing}
    if workers.count == 1:
        for run in missing:
            bar = bars[run]
            run.trajectory().extend(run.workload.iterations, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
        return

    def look(done: int) -> None:
        for run in missing:
            progress.update(bars[run], completed=totals[run] - run.trajectory().missing(run.workload.iterations))

    workers.each(_extend, missing, look)


def _extend(run: Run) -> None:
    run.trajectory().extend(run.workload.iterations)


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


def _recover(jobs: Sequence[Job], found: Worths, workers: Workers, progress: Progress) -> list[list[Outcome]]:
    single = [(replace(job, points=(point,)), found[job.run.workload.name]) for job in jobs for point in job.points]
    bar = progress.add_task("recoveries", total=len(single))
    outcomes = iter(workers.each(_outcomes, single, lambda done: progress.update(bar, completed=done)))
    return [[outcome for _ in job.points for outcome in next(outcomes)] for job in jobs]


def _outcomes(asked: tuple[Job, IterationWorth]) -> list[Outcome]:
    job, worth = asked
    measurement = PointMeasurement(job.run.trajectory(), job.points[0], worth)
    return [measurement.outcome(method) for method in job.methods]


@cache
def _trajectory(run: Run) -> Trajectory:
    """Kept for the run's next point: the fingerprint in its name takes three iterations to find."""
    return Trajectory(run.workload, _task(run.workload), run.seed, run.cache, run.device)


@cache
def _task(workload: Workload) -> Task:
    return workload.task()
