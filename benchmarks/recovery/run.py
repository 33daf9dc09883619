"""`cpsr bench recovery`: what a failure costs, by every way to come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.progress import Progress

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.ending import worths
from cpsr.benchmarks.recovery.grid import Point, Selection, points
from cpsr.benchmarks.recovery.measure import Outcome, PointMeasurement
from cpsr.benchmarks.recovery.methods import HARNESS, PREDICTORS, find_methods, learned, sees_the_run
from cpsr.benchmarks.recovery.report import draw_cost, show
from cpsr.benchmarks.recovery.result import summarise
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS, Task, Workload
from cpsr.demo.device import CPU
from cpsr.fitter.end_cost import IterationWorth

__all__ = ["Run", "main", "train", "worths_of"]

CACHE = Path("runs/bench-recovery")
Worths = Mapping[str, IterationWorth]


@dataclass(frozen=True)
class Run:
    """One training run, before it is trained; plain enough to be sent to another process."""

    workload: Workload
    seed: int
    cache: Path
    device: str = CPU

    def trajectory(self) -> Trajectory:
        """What of it is in the cache."""
        return _trajectory(self)


@cache
def _trajectory(run: Run) -> Trajectory:
    """Kept for the run's next point: the fingerprint in its name takes three iterations to find."""
    return Trajectory(run.workload, _task(run.workload), run.seed, run.cache, run.device)


@cache
def _task(workload: Workload) -> Task:
    return workload.task()


@dataclass(frozen=True)
class _Asked:
    """One failure of a run, and the methods that it is recovered by."""

    run: Run
    point: Point
    methods: tuple[str, ...]
    worth: IterationWorth


@dataclass(frozen=True)
class _Lessons:
    """What a method learns along a run's checkpoints, up to each of some."""

    run: Run
    method: str
    interval: int
    checkpoints: tuple[int, ...]


def main(
    selection: Selection, cache: Path | None = None, json_path: Path | None = None, workers: int | None = None
) -> None:
    """Train what is missing in the cache, measure what is missing of the points, print, draw and write.

    Args:
        selection: what to measure.
        cache: keeps trajectories and measured points, where an interrupted call goes on; None: `runs/bench-recovery`.
        json_path: where the figures go; the plot is put beside it.
        workers: processes, of one thread each; None: up to two. The results do not depend on how many.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    kept, methods, count = cache or CACHE, find_methods(selection.methods), workers or default_workers()
    with measuring("recovery", json_path, place=kept.parent, timed=False, device=selection.device) as call:
        call.machine.update(torch_threads=1, workers=count)
        runs = [
            Run(WORKLOADS[name], seed, kept, selection.device)
            for name in selection.workloads
            for seed in range(selection.seeds)
        ]
        with Workers(count) as pool:
            train(runs, pool, call.progress)
            worth = worths_of(runs, pool, call.progress)
            outcomes = _recover(runs, selection, methods, worth, pool, call.progress)
        result = summarise(selection, methods, outcomes, worth)
        show(call, result)
        call.leave(result.to_json(outcomes), draw_cost(result, call.machine))


def train(runs: Sequence[Run], workers: Workers, progress: Progress) -> None:
    """Train every fault-free run to its end."""
    bar = progress.add_task("fault-free runs", total=len(runs))
    workers.each(_extend, runs, lambda done: progress.update(bar, completed=done))


def _extend(run: Run) -> None:
    run.trajectory().extend(run.workload.iterations)


def worths_of(runs: Sequence[Run], workers: Workers, progress: Progress) -> Worths:
    """What an iteration is worth, by workload, from whole runs and trainings of other lengths with their seeds.

    Raises:
        CPSRError: a workload's trainings do not show what an iteration is worth.
    """
    own: dict[Workload, dict[int, float]] = {}
    for run in runs:
        own.setdefault(run.workload, {})[run.seed] = float(run.trajectory().final_losses().mean())
    bar = progress.add_task("trainings of other lengths", total=None)
    tick = lambda done, total: progress.update(bar, completed=done, total=total)  # noqa: E731 - one line says it
    return worths(own, runs[0].cache / "endings", runs[0].device, workers, tick)


def _recover(
    runs: Sequence[Run],
    selection: Selection,
    methods: tuple[str, ...],
    worth: Worths,
    workers: Workers,
    progress: Progress,
) -> dict[str, list[Outcome]]:
    """Outcomes of the methods at every failure point, by workload."""
    asked = [
        _Asked(run, point, methods, worth[run.workload.name])
        for run in runs
        for interval in selection.intervals
        for fraction in selection.fractions
        for lost in selection.lost
        for point in points(run.workload.iterations, interval, fraction, selection.points, lost)
    ]
    learners = dict.fromkeys(PREDICTORS[name].learns_as or name for name in methods if name not in HARNESS)
    lessons = [
        _Lessons(run, method, interval, checkpoints)
        for run in runs
        for interval in selection.intervals
        for checkpoints in [
            tuple(sorted({one.point.checkpoint for one in asked if one.run == run and one.point.interval == interval}))
        ]
        for method in learners
        if sees_the_run(method)
    ]
    bar = progress.add_task("learning along the runs", total=len(lessons))
    workers.each(_follow, lessons, lambda done: progress.update(bar, completed=done))
    bar = progress.add_task("recoveries", total=len(asked))
    found = workers.each(_outcomes, asked, lambda done: progress.update(bar, completed=done))
    outcomes: dict[str, list[Outcome]] = {name: [] for name in selection.workloads}
    for one, of in zip(asked, found, strict=True):
        outcomes[one.run.workload.name] += of
    return outcomes


def _follow(lessons: _Lessons) -> None:
    for checkpoint in lessons.checkpoints:
        learned(lessons.method, lessons.run.trajectory(), lessons.interval, checkpoint)


def _outcomes(asked: _Asked) -> list[Outcome]:
    measurement = PointMeasurement(asked.run.trajectory(), asked.point, asked.worth)
    return [measurement.outcome(method) for method in asked.methods]
