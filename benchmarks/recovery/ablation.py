"""`cpsr bench recovery --ablation`: the product's predictor with one component replaced at a time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.output import save
from cpsr.benchmarks.recovery.grid import Selection
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import ABLATION, FULL_PREDICTOR
from cpsr.benchmarks.recovery.plot import COLOURS, where
from cpsr.benchmarks.recovery.run import measure_grid
from cpsr.benchmarks.recovery.statistics import Mean, differences, grid_mean, samples_of
from cpsr.benchmarks.recovery.workers import describe
from cpsr.tables import print_table

__all__ = ["Arm", "compare", "draw_ablation", "main"]


@dataclass(frozen=True)
class Arm:
    """One arm of the ablation, over cells that count alike.

    Attributes:
        method: its name.
        change: what was replaced; empty for the full predictor.
        cells: how many cells have a lag.
        lag: persistent lag over the horizon.
        more: the same minus the full predictor's, paired by failure; None for the full predictor, and where no failure
            has both.
        declined: failures at which the arm advised against itself, so that the horizon was recomputed.
        without_lag: failures at which none can be told.
    """

    method: str
    change: str
    cells: int
    lag: Mean
    more: Mean | None
    declined: int
    without_lag: int


def main(selection: Selection, cache: Path, json_path: Path | None = None, workers: int = 1) -> None:
    """Measure every arm on a selection's grid; print, draw and write. The selection's methods do not matter.

    Args:
        selection: workloads, intervals, fractions, points and seeds.
        cache: as of the grid's measurement, with which it shares everything.
        json_path: where the figures go, with the plot beside it.
        workers: processes, of one thread each.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    console = Console()
    machine = describe(cache, workers)
    outcomes = measure_grid(selection, (FULL_PREDICTOR, *ABLATION), cache, workers, console)
    arms = compare(outcomes)
    _show(console, arms)
    if json_path is not None:
        report = {
            "benchmark": "recovery, ablation",
            "machine": machine,
            "selection": asdict(selection),
            "arms": [asdict(arm) for arm in arms],
        }
        plot = save(json_path, report, draw_ablation(arms, machine))
        console.print(f"figures: {json_path}   plot: {plot}")


def compare(outcomes: dict[str, list[Outcome]]) -> list[Arm]:
    """Every arm that has a lag somewhere, beside the full predictor, which is the first.

    Args:
        outcomes: by workload.
    """
    cells: dict[tuple[str, int, float], dict[str, list[Outcome]]] = {}
    for workload, of in outcomes.items():
        for outcome in of:
            cell = cells.setdefault((workload, outcome.point.interval, outcome.point.fraction), {})
            cell.setdefault(outcome.method, []).append(outcome)
    arms = []
    for method in (FULL_PREDICTOR, *ABLATION):
        mine = [cell.get(method, []) for cell in cells.values()]
        lags = [samples for samples in map(samples_of, mine) if samples]
        paired = [differences(cell.get(method, []), cell.get(FULL_PREDICTOR, [])) for cell in cells.values()]
        paired = [samples for samples in paired if samples]
        if lags:
            together = [outcome for of in mine for outcome in of]
            arms.append(
                Arm(
                    method,
                    ABLATION.get(method, ""),
                    len(lags),
                    grid_mean(lags),
                    grid_mean(paired) if paired and method != FULL_PREDICTOR else None,
                    sum(not outcome.predicted and outcome.lag_iterations is not None for outcome in together),
                    sum(outcome.lag_iterations is None for outcome in together),
                )
            )
    return arms


def _show(console: Console, arms: Sequence[Arm]) -> None:
    table = Table(title="The predictor with one component replaced", title_justify="left")
    table.add_column("arm")
    for heading in ("lag / u", "more than the full one", "declined", "untold"):
        table.add_column(heading, justify="right")
    for arm in arms:
        more = "-" if arm.more is None else _text(arm.more)
        table.add_row(_name(arm), _text(arm.lag), more, str(arm.declined), str(arm.without_lag))
    table.caption = (
        f"means over {max((arm.cells for arm in arms), default=0)} cells with their 95% intervals; more: paired by "
        "failure; declined: recomputed"
    )
    print_table(console, table)


def draw_ablation(arms: Sequence[Arm], machine: dict[str, Any]) -> Figure:
    """Lag over the horizon of every arm, and how much more than the full predictor's it is."""
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, arm in enumerate(arms):
        _bar(left, place, arm.lag)
        if arm.more is not None:
            _bar(right, place, arm.more)
    left.set_yticks(range(len(arms)), [_name(arm) for arm in arms], fontsize=8)
    left.invert_yaxis()
    left.axvline(1, color="black", lw=0.9, ls="--")
    left.set_xlabel("lag / horizon (1: recompute)")
    right.set_xlabel("more than the full predictor")
    for axes in (left, right):
        axes.axvline(0, color="black", lw=0.6)
    figure.suptitle(f"One component replaced at a time ({where(machine)})", fontsize=11)
    return figure


def _bar(axes: Axes, place: int, mean: Mean) -> None:
    axes.barh(place, mean.value, height=0.6, color=COLOURS[0 if place else 4], alpha=0.8)
    if mean.low is not None and mean.high is not None:
        axes.plot([mean.low, mean.high], [place, place], color="black", lw=1.4)


def _name(arm: Arm) -> str:
    return arm.change or f"full ({arm.method})"


def _text(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.2f}"
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
