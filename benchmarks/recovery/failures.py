"""`cpsr bench recovery --failures N`: several failures in one run, and the loss over all the work done."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.failing import FailingRun, failure_points, follow, recomputing_losses
from cpsr.benchmarks.recovery.grid import Selection
from cpsr.benchmarks.recovery.jobs import runs_of, train, worths_of
from cpsr.benchmarks.recovery.methods.roster import HARNESS, find_methods
from cpsr.benchmarks.recovery.plot import COLOURS, ZERO_WITHIN_NATS, where
from cpsr.benchmarks.recovery.report import mean_text
from cpsr.benchmarks.recovery.result import PAPER_BELOW
from cpsr.benchmarks.recovery.statistics import Sample, grid_mean
from cpsr.fitter.end_cost import IterationWorth, end_cost_iterations
from cpsr.tables import print_table

__all__ = ["FailuresResult", "draw_failures", "main"]

SHOWN_BEFORE_ITERATIONS = 100  # of the run before its first failure
PANEL_HEIGHT = 3.0

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class FailuresResult:
    """One run under one method, beside recomputing and the run that never failed.

    Attributes:
        failing: which run.
        recoveries: of each failure, `checkpoint`, `failure`, `predicted` and `reason`.
        work: iterations trained, repeated ones counted again, from the first failure to the run's end.
        losses: validation losses there, in nats; NaN once training has diverged.
        recomputing: those of the run that repeats what it lost, after as much work.
        never_failed: those of the run that never failed, after as much work.
        below: share of the time since the first failure at which the loss was below recomputing's.
        final_gap_nats: final loss over that of the run that never failed; None where training diverged.
        repeated_iterations: trained again because of the failures.
        end_cost: of all failures, over the iterations that recomputing repeats; None where training diverged.
    """

    failing: FailingRun
    recoveries: list[dict[str, Any]]
    work: list[float]
    losses: list[float]
    recomputing: list[float]
    never_failed: list[float]
    below: float
    final_gap_nats: float | None
    repeated_iterations: int
    end_cost: float | None


def main(selection: Selection, count: int, cache: Path, json_path: Path | None = None, workers: int = 1) -> None:
    """Follow every method of the selection through runs that fail `count` times; print, draw and write.

    Args:
        selection: its workloads, intervals, seeds and methods; recomputing is always beside them.
        count: failures in each run.
        cache: keeps the runs; an interrupted call goes on from the last whole one.
        json_path: where the figures go, with the plot beside it.
        workers: processes, of one thread each.

    Raises:
        ConfigError: so many failures do not fit into the run.
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    methods = [name for name in find_methods(selection.methods) if name not in HARNESS]
    runs = runs_of(selection, cache)
    failing = [
        FailingRun(run, failure_points(run.workload.iterations, interval, count), method)
        for run in runs
        for interval in selection.intervals
        for method in methods
    ]
    device = selection.device
    with measuring("recovery, several failures", json_path, place=cache.parent, timed=False, device=device) as call:
        with Workers(workers) as pool:
            train(runs, pool, call.progress)
            worths = worths_of(runs, pool, call.progress)
            bar = call.progress.add_task(f"runs with {count} failures", total=len(failing))
            records = pool.each(follow, failing, lambda done: call.progress.update(bar, completed=done))
        results = [
            _judged(one, record, worths[one.run.workload.name]) for one, record in zip(failing, records, strict=True)
        ]
        _show(call.console, results)
        call.console.print(machine_text(call.machine))
        figures = {
            "selection": asdict(selection),
            "failures": count,
            "paper_share_below_baseline": PAPER_BELOW,
            "worths": {name: asdict(worth) for name, worth in worths.items()},
            "runs": [_plain(result) for result in results],
        }
        call.leave(figures, draw_failures(results, call.machine))


def _judged(failing: FailingRun, record: dict[str, Any], worth: IterationWorth) -> FailuresResult:
    """Its curve beside recomputing, for as long as the run that never failed was training too; and what it cost."""
    end = failing.run.workload.iterations
    curve = failing.run.trajectory().curve(0, end)
    true = curve.iterations.astype(numpy.float64), curve.losses.mean(axis=1)
    work = numpy.array(record["work"], dtype=numpy.float64)
    losses = numpy.array(record["losses"], dtype=numpy.float64)  # None becomes NaN, which is below nothing
    inside = work <= end
    work, losses = work[inside], losses[inside]
    recomputing = recomputing_losses(work, failing.points, *true)
    never_failed = numpy.interp(work, *true)
    gap = None
    if record["final_loss"] is not None:
        gap = record["final_loss"] - float(failing.run.trajectory().final_losses().mean())
    repeated = int(record["work"][-1]) - end
    horizons = sum(point.horizon for point in failing.points)
    return FailuresResult(
        failing,
        record["recoveries"],
        work.tolist(),
        losses.tolist(),
        recomputing.tolist(),
        never_failed.tolist(),
        float(numpy.mean(losses < recomputing)),
        gap,
        repeated,
        None if gap is None else end_cost_iterations(gap, worth, repeated) / horizons,
    )


def _show(console: Console, results: Sequence[FailuresResult]) -> None:
    for title, mine in _by_panel(results).items():
        table = Table(title=f"{title}: several failures in one run", title_justify="left")
        table.add_column("method", no_wrap=True)
        for heading in ("predicted", "end cost / u", "final gap, nats", "below recomputing"):
            table.add_column(heading, justify="right")
        for method in dict.fromkeys(result.failing.method for result in mine):
            runs = [result for result in mine if result.failing.method == method]
            recoveries = [recovery for result in runs for recovery in result.recoveries]
            table.add_row(
                method,
                f"{sum(recovery['predicted'] for recovery in recoveries)} of {len(recoveries)}",
                _cost_text(runs),
                _gap_text(runs),
                f"{numpy.mean([result.below for result in runs]):.1%}",
            )
        table.caption = (
            "end cost: final gap in iterations of equal worth plus iterations trained again, over those that "
            "recomputing repeats; below: share of the time since the first failure"
        )
        print_table(console, table)
    for method in dict.fromkeys(result.failing.method for result in results):
        shares = [result.below for result in results if result.failing.method == method]
        console.print(
            f"{method}: below recomputing {numpy.mean(shares):.1%} of the time over {len(shares)} runs (the paper's "
            f"predictor: {PAPER_BELOW:.1%}, other model, other hardware)"
        )


def _cost_text(runs: Sequence[FailuresResult]) -> str:
    samples = [
        Sample(one.failing.run.workload.name, one.failing.run.seed, one.end_cost)
        for one in runs
        if one.end_cost is not None
    ]
    return mean_text(grid_mean([samples])) if len(samples) == len(runs) else "diverged"


def _gap_text(runs: Sequence[FailuresResult]) -> str:
    gaps = [one.final_gap_nats for one in runs if one.final_gap_nats is not None]
    return f"{numpy.mean(gaps):+.4f}" if len(gaps) == len(runs) else "diverged"


def _by_panel(results: Sequence[FailuresResult]) -> dict[str, list[FailuresResult]]:
    panels: dict[str, list[FailuresResult]] = {}
    for result in results:
        title = f"{result.failing.run.workload.name}, a checkpoint every {result.failing.points[0].interval}"
        panels.setdefault(title, []).append(result)
    return panels


def draw_failures(results: Sequence[FailuresResult], machine: dict[str, Any]) -> Figure:
    """Loss, and its gap to the run that never failed, over the work done (the paper's Fig. 8); first seed only."""
    panels = _by_panel([result for result in results if result.failing.run.seed == 0])
    figure = Figure(figsize=(13, 1.0 + PANEL_HEIGHT * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for row, (title, mine) in zip(grid, panels.items(), strict=True):
        _loss_panel(row[0], mine)
        _gap_panel(row[1], mine)
        row[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
        row[0].set_title(title, loc="left", fontsize=10)
        for axes in row:
            _mark_failures(axes, mine[0])
    for axes in grid[-1]:
        axes.set_xlabel("work done, iterations (repeated ones count again)")
    figure.suptitle(f"Several failures in one run ({where(machine)})", fontsize=11)
    return figure


def _loss_panel(axes: Axes, results: Sequence[FailuresResult]) -> None:
    first = results[0]
    failing = first.failing
    start = failing.points[0].failure - SHOWN_BEFORE_ITERATIONS
    curve = failing.run.trajectory().curve(start, failing.run.workload.iterations)
    axes.plot(curve.iterations, curve.losses.mean(axis=1), color="black", lw=0.8)
    axes.plot(first.work, first.recomputing, color="grey", lw=1.2)
    for place, result in enumerate(results):
        axes.plot(result.work, result.losses, color=COLOURS[2 * place % len(COLOURS)], lw=1.0)
    axes.set_ylabel("validation loss, nats")


def _gap_panel(axes: Axes, results: Sequence[FailuresResult]) -> None:
    first = results[0]
    axes.axhline(0, color="black", lw=0.8, label="never failed")
    gaps = numpy.array(first.recomputing) - first.never_failed
    axes.plot(first.work, gaps, color="grey", lw=1.2, label="recompute")
    for place, result in enumerate(results):
        label = f"{result.failing.method} ({result.below:.0%} below recompute)"
        colour = COLOURS[2 * place % len(COLOURS)]
        axes.plot(result.work, numpy.array(result.losses) - result.never_failed, color=colour, lw=1.0, label=label)
    axes.set_yscale("symlog", linthresh=ZERO_WITHIN_NATS)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("gap, nats")


def _mark_failures(axes: Axes, result: FailuresResult) -> None:
    for point in result.failing.points:
        axes.axvline(point.failure, color="black", lw=0.6, ls=":")


def _plain(result: FailuresResult) -> dict[str, Any]:
    return {
        "workload": result.failing.run.workload.name,
        "seed": result.failing.run.seed,
        "interval": result.failing.points[0].interval,
        "method": result.failing.method,
        "recoveries": result.recoveries,
        "below": result.below,
        "final_gap_nats": result.final_gap_nats,
        "repeated_iterations": result.repeated_iterations,
        "end_cost_over_horizons": result.end_cost,
    }
