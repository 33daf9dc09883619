"""The recovery benchmark as pictures: cost by interval and stage, and the loss gap after the recovery."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import ORACLE, RECOMPUTE
from cpsr.benchmarks.recovery.result import RecoveryResult
from cpsr.benchmarks.recovery.statistics import CellResult

__all__ = ["COLOURS", "COST_RANGE", "ZERO_WITHIN_NATS", "draw_cost", "draw_gaps", "where"]

COLOURS = [to_hex(matplotlib.colormaps["tab20"](place)) for place in range(20)]
GROUP_WIDTH = 0.76  # of the room between two cells; the methods stand side by side in it
COST_RANGE = (-1.5, 3.0)  # horizons; what lies outside is drawn at the edge
PANEL_HEIGHT = 2.6
ZERO_WITHIN_NATS = 0.01  # the gap's axis is linear up to here


def draw_cost(result: RecoveryResult) -> Figure:
    """End cost over the horizon, by interval and stage: one panel a workload (the paper's Fig. 7)."""
    shown = [name for name in result.methods if name != RECOMPUTE]
    panels = result.selection.workloads
    figure = Figure(figsize=(12, 1.3 + PANEL_HEIGHT * len(panels)), layout="constrained")
    axes_of = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, workload in zip(axes_of, panels, strict=True):
        _cost_panel(axes, [cell for cell in result.cells if cell.cell.workload == workload], shown)
        axes.set_title(workload, loc="left", fontsize=10)
    axes_of[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.suptitle(f"End cost of a recovery, as a share of recomputing ({where(result.machine)})", fontsize=11)
    return figure


def draw_gaps(result: RecoveryResult, outcomes: dict[str, list[Outcome]]) -> Figure:
    """Mean paired loss gap after the recovery: one row a workload, one column a stage."""
    shown = [name for name in result.methods if name not in (RECOMPUTE, ORACLE)]
    workloads, fractions = result.selection.workloads, result.selection.fractions
    size = (max(9.0, 1.5 + 3.6 * len(fractions)), 1.3 + PANEL_HEIGHT * len(workloads))  # the title needs nine
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(workloads), len(fractions), squeeze=False, sharex=True)
    for row, workload in zip(grid, workloads, strict=True):
        for axes, fraction in zip(row, fractions, strict=True):
            lost = result.selection.lost[0]
            mine = [one for one in outcomes[workload] if (one.point.fraction, one.point.lost) == (fraction, lost)]
            _gap_panel(axes, mine, shown)
            axes.set_title(f"{workload}, failure at {fraction:.0%}", loc="left", fontsize=9)
        row[0].set_ylabel("gap, nats")
    for axes in grid[-1]:
        axes.set_xlabel("iterations after the failure")
    grid[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    intervals = ", ".join(str(interval) for interval in result.selection.intervals)
    figure.suptitle(
        f"Validation loss over the run that never failed, checkpoints every {intervals} iterations "
        f"({where(result.machine)})",
        fontsize=11,
    )
    return figure


def _cost_panel(axes: Axes, cells: Sequence[CellResult], shown: Sequence[str]) -> None:
    groups = list(dict.fromkeys((cell.cell.interval, cell.cell.fraction, cell.cell.lost) for cell in cells))
    step = GROUP_WIDTH / max(len(shown), 1)
    for place, method in enumerate(shown):
        offset = (place - (len(shown) - 1) / 2) * step
        for index, cell in enumerate(cell for cell in cells if cell.method == method):
            at = groups.index((cell.cell.interval, cell.cell.fraction, cell.cell.lost)) + offset
            _mean_mark(axes, at, cell, COLOURS[place % len(COLOURS)], method if index == 0 else None)
    axes.axhline(1, color="black", lw=0.9, ls="--")
    axes.annotate(
        "recompute", (len(groups) - 0.5, 1), xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=8
    )
    axes.axhline(0, color="black", lw=0.6)
    labels = [
        f"every {interval}\nat {fraction:.0%}" + ("" if lost == "all" else f"\n{lost} lost")
        for interval, fraction, lost in groups
    ]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(*COST_RANGE)
    axes.set_ylabel("end cost / u")


def _mean_mark(axes: Axes, at: float, cell: CellResult, colour: str, label: str | None) -> None:
    low, high = COST_RANGE
    value = float(numpy.clip(cell.end_cost.value, low, high))
    outside = value != cell.end_cost.value
    if cell.end_cost.low is not None and cell.end_cost.high is not None:
        axes.plot([at, at], numpy.clip([cell.end_cost.low, cell.end_cost.high], low, high), color=colour, lw=1.6)
    marker = "o" if not outside else "^" if cell.end_cost.value > high else "v"
    axes.plot([at], [value], marker, ms=5, color=colour, label=label, clip_on=False)


def _gap_panel(axes: Axes, outcomes: Sequence[Outcome], shown: Sequence[str]) -> None:
    for place, method in enumerate(shown):
        curves = [outcome.curve for outcome in outcomes if outcome.method == method and outcome.curve is not None]
        whole = [curve for curve in curves if curve["after"]]
        if whole:
            after, gaps = _mean_gaps(whole)
            axes.plot(after, gaps, color=COLOURS[place % len(COLOURS)], lw=1.4, label=method)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_yscale("symlog", linthresh=ZERO_WITHIN_NATS)
    axes.yaxis.set_major_formatter("{x:g}")


def _mean_gaps(curves: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Evaluations lie on multiples of five iterations of the run: those of all curves, by their nearest five."""
    at: dict[int, list[float]] = {}
    for curve in curves:
        for after, gap in zip(curve["after"], curve["gaps_nats"], strict=True):
            at.setdefault(5 * round(after / 5), []).append(gap)
    return sorted(at), [float(numpy.mean(at[after])) for after in sorted(at)]


def where(machine: dict[str, Any]) -> str:
    """The machine, as a figure's title has it."""
    return f"{machine_text(machine)}, {machine['date'][:10]}"
