"""`cpsr bench recovery`: what a failure costs, by every way to come back."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.ending import worths
from cpsr.benchmarks.recovery.grid import Point, points
from cpsr.benchmarks.recovery.measure import Outcome, outcomes_at
from cpsr.benchmarks.recovery.report import draw, show, to_json
from cpsr.benchmarks.recovery.result import summarise
from cpsr.benchmarks.recovery.selection import Selection
from cpsr.benchmarks.recovery.trajectory import Run
from cpsr.benchmarks.recovery.workload import WORKLOADS

__all__ = ["main", "train"]

CACHE = Path("runs/bench-recovery")


def main(
    selection: Selection, cache: Path | None = None, json_path: Path | None = None, workers: int | None = None
) -> None:
    """Train what is missing in the cache, measure what is missing of the points, print, draw and write.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    kept, count = cache or CACHE, workers or default_workers()
    with measuring("recovery", json_path, place=kept.parent, timed=False, device=selection.device) as call:
        call.machine.update(torch_threads=1, workers=count)
        runs = [
            Run(WORKLOADS[name], seed, kept, selection.device)
            for name in selection.workloads
            for seed in range(selection.seeds)
        ]
        with Workers(count) as pool:
            worth = train(runs, pool, call.progress)
            asked = [
                (run, point, selection.methods, worth[run.workload.name])
                for run in runs
                for interval in selection.intervals
                for fraction in selection.fractions
                for lost in selection.lost
                for point in points(run.workload.iterations, interval, fraction, selection.points, lost)
            ]
            bar = call.progress.add_task("recoveries", total=len(asked))
            found = pool.each(_outcomes, asked, lambda done: call.progress.update(bar, completed=done))
        outcomes = [outcome for of in found for outcome in of]
        costs = summarise(selection, outcomes)
        show(call, selection, costs, outcomes, worth)
        call.leave(to_json(selection, costs, outcomes, worth))
        if json_path is not None:
            draw(selection, costs).savefig(json_path.with_suffix(".png"), dpi=110)


def train(runs: Sequence[Run], workers: Workers, progress: Progress) -> Mapping[str, IterationWorth]:
    """Train every fault-free run to its end; what an iteration of each workload is worth, by its name.

    Raises:
        CPSRError: trainings of other lengths do not show what an iteration is worth.
    """
    bar = progress.add_task("fault-free runs", total=len(runs))
    losses = workers.each(_final_loss, runs, lambda done: progress.update(bar, completed=done))
    bar = progress.add_task("trainings of other lengths", total=None)
    tick = lambda done, total: progress.update(bar, completed=done, total=total)  # noqa: E731 - one line says it
    return worths(dict(zip(runs, losses, strict=True)), runs[0].cache / "endings", workers, tick)


def _final_loss(run: Run) -> float:
    return float(run.trajectory().final_losses().mean())


def _outcomes(asked: tuple[Run, Point, tuple[str, ...], IterationWorth]) -> list[Outcome]:
    run, point, methods, worth = asked
    return outcomes_at(run.trajectory(), point, methods, worth)
