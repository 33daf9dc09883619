"""`cpsr bench recovery`: what a failure costs, by every way to come back."""

from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.grid import Point, Selection, points
from cpsr.benchmarks.recovery.jobs import Job, Worths, measure, runs_of
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import find_methods
from cpsr.benchmarks.recovery.plot import draw_cost, draw_gaps
from cpsr.benchmarks.recovery.report import show
from cpsr.benchmarks.recovery.result import summarise

__all__ = ["CACHE", "main", "measure_grid"]

CACHE = Path("runs/bench-recovery")


def main(selection: Selection, cache: Path = CACHE, json_path: Path | None = None, workers: int = 1) -> None:
    """Train what is missing in the cache, measure what is missing of the points, print, draw and write.

    Args:
        selection: what to measure.
        cache: keeps trajectories and measured points; an interrupted call goes on from there.
        json_path: where the figures go; the plots are put beside it.
        workers: processes, of one thread each; the results do not depend on how many.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    methods = find_methods(selection.methods)
    with measuring("recovery", json_path, place=cache.parent, timed=False, device=selection.device) as call:
        call.machine.update(torch_threads=1, workers=workers)
        outcomes, worths = measure_grid(selection, methods, cache, workers, call.progress)
        result = summarise(selection, call.machine, methods, outcomes, worths)
        show(call.console, result)
        call.leave(result.to_json(outcomes), {"cost": draw_cost(result), "gap": draw_gaps(result, outcomes)})


def measure_grid(
    selection: Selection, methods: Sequence[str], cache: Path, workers: int, progress: Progress
) -> tuple[dict[str, list[Outcome]], Worths]:
    """Outcomes of methods at every failure point of a selection, and the worth of an iteration, by workload.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    runs = runs_of(selection, cache)
    with Workers(workers) as pool:
        jobs = [Job(run, _points(run.workload.iterations, selection), tuple(methods)) for run in runs]
        measured, worths = measure(jobs, pool, progress)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in selection.workloads}
    for run, of in zip(runs, measured, strict=True):
        outcomes[run.workload.name] += of
    return outcomes, worths


def _points(iterations: int, selection: Selection) -> tuple[Point, ...]:
    return tuple(
        point
        for interval in selection.intervals
        for fraction in selection.fractions
        for lost in selection.lost
        for point in points(iterations, interval, fraction, selection.points, lost)
    )
