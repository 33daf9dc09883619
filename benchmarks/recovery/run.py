"""`cpsr bench recovery`: what a failure costs, by every way to come back."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import Progress

from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import DOTS_PER_INCH, progress_bar, save
from cpsr.benchmarks.recovery.grid import Point, Selection, points
from cpsr.benchmarks.recovery.measure import Outcome, PointMeasurement, needed_until
from cpsr.benchmarks.recovery.methods import find_methods
from cpsr.benchmarks.recovery.plot import draw_cost, draw_gaps
from cpsr.benchmarks.recovery.report import show
from cpsr.benchmarks.recovery.result import summarise
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-recovery")


@dataclass(frozen=True)
class _Job:
    """One training run and the failures in it."""

    trajectory: Trajectory
    points: list[Point]

    @property
    def until(self) -> int:
        """How far the fault-free run is needed."""
        return max(needed_until(point) for point in self.points)


def main(selection: Selection, cache: Path = CACHE, json_path: Path | None = None) -> None:
    """Train what is missing in the cache, measure what is missing of the points, print, draw and write.

    Args:
        selection: what to measure.
        cache: keeps trajectories and measured points; an interrupted call goes on from there.
        json_path: where the figures go; the plots are put beside it.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    console = Console()
    methods = find_methods(selection.methods)
    machine = describe_machine(cache.parent)
    outcomes: dict[str, list[Outcome]] = {}
    for name in selection.workloads:
        outcomes[name] = _measure_workload(name, selection, methods, cache, console)
    result = summarise(selection, machine, methods, outcomes)
    show(console, result)
    if json_path is not None:
        cost, gaps = draw_cost(result), draw_gaps(result, outcomes)
        plot = save(json_path, result.to_json(outcomes), cost)
        beside = plot.with_name(f"{plot.stem}-gap.png")
        matplotlib.use("Agg")
        gaps.savefig(beside, dpi=DOTS_PER_INCH)
        console.print(f"figures: {json_path}   plots: {plot}, {beside}")


def _measure_workload(
    name: str, selection: Selection, methods: tuple[str, ...], cache: Path, console: Console
) -> list[Outcome]:
    workload = WORKLOADS[name]
    task = workload.task()
    outcomes = []
    for seed in range(selection.seeds):
        job = _Job(Trajectory(workload, task, seed, cache), _points(workload.iterations, selection))
        with progress_bar(console) as progress:
            outcomes += _measure_job(job, f"{name}, seed {seed}", methods, progress)
    return outcomes


def _points(iterations: int, selection: Selection) -> list[Point]:
    return [
        point
        for interval in selection.intervals
        for fraction in selection.fractions
        for point in points(iterations, interval, fraction, selection.points)
    ]


def _measure_job(job: _Job, label: str, methods: tuple[str, ...], progress: Progress) -> list[Outcome]:
    training = progress.add_task(f"{label}: fault-free run", total=job.trajectory.missing(job.until))
    job.trajectory.extend(job.until, lambda: progress.advance(training))
    measuring = progress.add_task(f"{label}: recoveries", total=len(job.points) * len(methods))
    outcomes = []
    for point in job.points:
        measurement = PointMeasurement(job.trajectory, point)
        for method in methods:
            outcomes.append(measurement.outcome(method))
            progress.advance(measuring)
    return outcomes
