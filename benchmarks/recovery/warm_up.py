"""`cpsr bench recovery --warm-up`: how soon in a run the predictor is worth using."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.grid import HORIZON_SHARE, Point, Selection
from cpsr.benchmarks.recovery.jobs import Job, measure, runs_of
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import HARNESS, find_methods
from cpsr.benchmarks.recovery.plot import COLOURS, COST_RANGE, where
from cpsr.benchmarks.recovery.statistics import Mean, cost_samples, grid_mean
from cpsr.tables import print_table

__all__ = ["PLACES", "Place", "draw_warm_up", "main", "summarise_places", "warm_up_points"]

PLACES = (150, 200, 250, 300, 400, 500, 600, 800, 1000)  # iterations at which the run fails
PAPER_SETTLED = 800  # iterations after which the paper's predictor had settled
PANEL_HEIGHT = 3.0


@dataclass(frozen=True)
class Place:
    """One method at one place of the warm-up.

    Attributes:
        workload: its name.
        interval: iterations between checkpoints.
        method: its name.
        iteration: mean iteration of the failures.
        points: failures with an end cost.
        declined: of these, the ones at which the method advised against itself, so that the horizon was recomputed.
        cost: end cost over the horizon.
    """

    workload: str
    interval: int
    method: str
    iteration: float
    points: int
    declined: int
    cost: Mean


def warm_up_points(interval: int, count: int) -> tuple[Point, ...]:
    """Failures after `count` checkpoints in a row, from each place on; `fraction` is the place's number."""
    horizon = max(1, min(round(HORIZON_SHARE * interval), interval - 1))
    firsts = [max(1, round((place - horizon) / interval)) * interval for place in PLACES]
    checkpoints = [(number, first + place * interval) for number, first in enumerate(firsts) for place in range(count)]
    return tuple(Point(interval, float(number), at, at + horizon) for number, at in checkpoints)


def main(selection: Selection, cache: Path, json_path: Path | None = None, workers: int = 1) -> None:
    """Measure the selection's methods at failures early in the run; print, draw and write.

    Args:
        selection: workloads, intervals, seeds, methods, and `points` failures at every place.
        cache: as of the grid's measurement.
        json_path: where the figures go, with the plot beside it.
        workers: processes, of one thread each.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    methods = tuple(name for name in find_methods(selection.methods) if name not in HARNESS)
    runs = runs_of(selection, cache)
    jobs = [
        Job(run, warm_up_points(interval, selection.points), methods)
        for run in runs
        for interval in selection.intervals
    ]
    with measuring("recovery, warm-up", json_path, place=cache.parent, timed=False, device=selection.device) as call:
        with Workers(workers) as pool:
            measured, _ = measure(jobs, pool, call.progress)
        outcomes: dict[tuple[str, int], list[Outcome]] = {}
        for job, of in zip(jobs, measured, strict=True):
            outcomes.setdefault((job.run.workload.name, job.points[0].interval), []).extend(of)
        places = [place for (name, interval), of in outcomes.items() for place in summarise_places(name, interval, of)]
        accuracies = _accuracies(outcomes)
        _show(call.console, places)
        call.console.print(machine_text(call.machine))
        figures = {
            "selection": asdict(selection),
            "paper_settled_iterations": PAPER_SETTLED,
            "places": [asdict(place) for place in places],
            "accuracy": [
                {"workload": name, "interval": interval, "method": method, "scores": scores}
                for (name, interval, method), scores in accuracies.items()
            ],
        }
        call.leave(figures, draw_warm_up(places, accuracies, call.machine))


def summarise_places(workload: str, interval: int, outcomes: Sequence[Outcome]) -> list[Place]:
    """Means over the failures of each place, by method; a method that always diverged at a place is left out there."""
    groups: dict[tuple[str, float], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.method, outcome.point.fraction), []).append(outcome)
    places = []
    for (method, _), of in groups.items():
        known = [outcome for outcome in of if outcome.end_cost_iterations is not None]
        if known:
            iteration = float(numpy.mean([outcome.point.failure for outcome in of]))
            declined = sum(not outcome.predicted for outcome in known)
            cost = grid_mean([cost_samples(workload, known)])
            places.append(Place(workload, interval, method, iteration, len(known), declined, cost))
    return places


def _accuracies(outcomes: dict[tuple[str, int], list[Outcome]]) -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    """The scores that predictors keep of themselves, as far as the latest failure of the first seed saw them."""
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for (name, interval), of in outcomes.items():
        for outcome in sorted(of, key=lambda one: one.point.failure):
            if outcome.seed == 0 and outcome.accuracy:
                found[name, interval, outcome.method] = outcome.accuracy
    return found


def _show(console: Console, places: Sequence[Place]) -> None:
    for workload, interval in dict.fromkeys((place.workload, place.interval) for place in places):
        title = f"{workload}, a checkpoint every {interval} iterations: end cost / u by iteration of the failure"
        table = Table(title=title, title_justify="left")
        table.add_column("failure at", justify="right")
        mine = [place for place in places if (place.workload, place.interval) == (workload, interval)]
        methods = list(dict.fromkeys(place.method for place in mine))
        for method in methods:
            table.add_column(method, justify="right")
        for iteration in sorted({place.iteration for place in mine}):
            at = {place.method: place for place in mine if place.iteration == iteration}
            table.add_row(f"{iteration:.0f}", *(_text(at.get(method)) for method in methods))
        table.caption = f"recomputed where in brackets; the paper's predictor settled after {PAPER_SETTLED} iterations"
        print_table(console, table)


def draw_warm_up(
    places: Sequence[Place], accuracies: dict[tuple[str, int, str], list[dict[str, Any]]], machine: dict[str, Any]
) -> Figure:
    """End cost over the horizon against the iteration of the failure; beside it, what predictors say of themselves."""
    panels = list(dict.fromkeys((place.workload, place.interval) for place in places))
    columns = 2 if accuracies else 1
    figure = Figure(figsize=(4 + 5.5 * columns, 1.0 + PANEL_HEIGHT * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), columns, squeeze=False)
    for row, (workload, interval) in zip(grid, panels, strict=True):
        mine = [place for place in places if (place.workload, place.interval) == (workload, interval)]
        methods = list(dict.fromkeys(place.method for place in mine))
        _cost_panel(row[0], mine, methods)
        row[0].set_title(f"{workload}, a checkpoint every {interval}", loc="left", fontsize=10)
        if accuracies:
            for number, method in enumerate(methods):
                colour = COLOURS[2 * number % len(COLOURS)]
                _accuracy_panel(row[1], accuracies.get((workload, interval, method), []), method, colour)
            row[1].set_title("cosine with the next checkpoint's difference", loc="left", fontsize=10)
            row[1].legend(loc="lower right", fontsize=8)
        row[0].legend(loc="upper right", fontsize=8, ncols=2)
    grid[-1][0].set_xlabel("iteration of the failure")
    if accuracies:
        grid[-1][1].set_xlabel("iteration of the checkpoint")
    figure.suptitle(f"Recoveries early in a run ({where(machine)})", fontsize=11)
    return figure


def _cost_panel(axes: Axes, places: Sequence[Place], methods: Sequence[str]) -> None:
    for number, method in enumerate(methods):
        mine = sorted((place for place in places if place.method == method), key=lambda place: place.iteration)
        colour = COLOURS[2 * number % len(COLOURS)]
        at = [place.iteration for place in mine]
        axes.plot(
            at, [numpy.clip(place.cost.value, *COST_RANGE) for place in mine], "o-", ms=4, color=colour, label=method
        )
        for place in mine:
            if not COST_RANGE[0] <= place.cost.value <= COST_RANGE[1]:
                edge, marker = (COST_RANGE[1], "^") if place.cost.value > COST_RANGE[1] else (COST_RANGE[0], "v")
                axes.plot([place.iteration], [edge], marker, ms=8, color=colour, clip_on=False)
            if place.cost.low is not None and place.cost.high is not None:
                bounds = numpy.clip([place.cost.low, place.cost.high], *COST_RANGE)
                axes.plot([place.iteration] * 2, bounds, color=colour, lw=1.0)
    axes.axhline(1, color="black", lw=0.9, ls="--")
    axes.axhline(0, color="black", lw=0.6)
    axes.axvline(PAPER_SETTLED, color="black", lw=0.6, ls=":")
    axes.set_ylim(*COST_RANGE)
    axes.set_ylabel("end cost / u")


def _accuracy_panel(axes: Axes, scores: Sequence[dict[str, Any]], method: str, colour: str) -> None:
    """What a predictor predicted before it learned from each checkpoint, and dashed what its line did."""
    if not scores:
        return
    at = [score["iteration"] for score in scores]
    axes.plot(at, [score["vitp_cosine"] for score in scores], color=colour, lw=1.2, label=method)
    axes.plot(
        at, [score["line_cosine"] for score in scores], color=colour, lw=1.0, ls="--", label=f"{method}, its line"
    )


def _text(place: Place | None) -> str:
    if place is None:
        return "-"
    text = f"{place.cost.value:+.2f}"
    return f"({text})" if place.declined == place.points else text
