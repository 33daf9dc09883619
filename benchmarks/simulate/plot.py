"""The papers' figures beside the simulated ones."""

from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.simulate.fault_cost import (
    COST_POINTS,
    COST_SHARES,
    MTBF_HOURS,
    PAPER_SAVINGS,
    Comparison,
    Sweep,
)
from cpsr.benchmarks.simulate.moevement import CLUSTERS, FIGURE_MTBF_MINUTES, ITERATION_FACTORS, Cell, ScaledCell
from cpsr.benchmarks.simulate.planner_grid import AIMS, MTBF_MINUTES, PHASES, Case

__all__ = ["draw_fault_cost", "draw_moevement", "draw_planner"]

COLOURS = {"CheckFreq": "#c0392b", "Gemini": "#e0a030", "MoEvement": "#1f6f8b", "PCcheck": "#7d5ba6"}
MARKERS = ("o", "s", "^", "D")
CURVE_COLOURS = ("#1f6f8b", "#4aa36c", "#e0a030", "#6b7780")


def draw_moevement(cells: Sequence[Cell], scaled: Sequence[ScaledCell]) -> Figure:
    """Table 3 cell by cell (left), and Fig. 11 (right)."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    table, scaling = figure.subplots(1, 2)
    _table_3(table, cells)
    _figure_11(scaling, scaled)
    figure.suptitle("Simulated from what MoEvement's paper states, against what it prints", fontsize=11)
    return figure


def _table_3(axes: Axes, cells: Sequence[Cell]) -> None:
    models = list(dict.fromkeys(cell.model for cell in cells))
    for system, colour in list(COLOURS.items())[:3]:
        for model, marker in zip(models, MARKERS, strict=True):
            own = [cell for cell in cells if (cell.system, cell.model) == (system, model)]
            x, y = [cell.paper_ettr for cell in own], [cell.simulated_ettr for cell in own]
            low = [cell.simulated_ettr - cell.simulated_low for cell in own]
            high = [cell.simulated_high - cell.simulated_ettr for cell in own]
            error = numpy.maximum([low, high], 0)
            axes.errorbar(x, y, yerr=error, fmt=marker, color=colour, ms=5, lw=0.8, label=f"{system}, {model}")
    axes.plot([0.65, 1], [0.65, 1], color="black", lw=0.8)
    axes.set_xlabel("ETTR printed in Table 3")
    axes.set_ylabel("ETTR simulated (bar: rounding of the configuration)")
    axes.legend(fontsize=7, ncols=1, loc="lower right")
    axes.set_title("Table 3: on the line they agree", loc="left", fontsize=10)


def _figure_11(axes: Axes, scaled: Sequence[ScaledCell]) -> None:
    position = {cluster.name: index for index, cluster in enumerate(CLUSTERS)}
    for system in ("Gemini", "MoEvement"):
        for minutes, style in zip(FIGURE_MTBF_MINUTES, ("-", "--", ":"), strict=True):
            own = [cell for cell in scaled if (cell.system, cell.mtbf_minutes) == (system, minutes)]
            middle = [cell.simulated_ettr for cell in own if cell.iteration_factor == ITERATION_FACTORS[0]]
            spread = [[c.simulated_ettr for c in own if c.cluster == name] for name in position]
            x = list(position.values())
            axes.plot(x, middle, style, color=COLOURS[system], marker="o", ms=4, label=f"{system}, MTBF {minutes} min")
            axes.fill_between(x, [min(s) for s in spread], [max(s) for s in spread], color=COLOURS[system], alpha=0.1)
    for cell in scaled:
        if cell.paper_ettr is not None and cell.iteration_factor == ITERATION_FACTORS[0]:
            axes.plot(position[cell.cluster], cell.paper_ettr, "*", ms=14, color=COLOURS[cell.system], mec="black")
    axes.plot([], [], "*", ms=10, color="white", mec="black", label="printed, MTBF 10 min")
    axes.set_xticks(list(position.values()), [f"{c.name}\n{c.gpus} GPUs" for c in CLUSTERS])
    axes.set_ylabel("ETTR simulated (band: iteration time x 0.75 to 1.5)")
    axes.legend(fontsize=7, loc="lower left")
    axes.set_title("Fig. 11: iteration times and restarts are not stated", loc="left", fontsize=10)


def draw_fault_cost(compared: Sequence[Comparison], swept: Sequence[Sweep]) -> Figure:
    """Savings in the paper's setting by end cost (left), and by the failure rate against Young's interval (right)."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    setting, rates = figure.subplots(1, 2)
    _setting(setting, compared)
    _rates(rates, swept)
    figure.suptitle("Simulated: total fault-tolerance cost of predicting recoveries", fontsize=11)
    return figure


def _setting(axes: Axes, compared: Sequence[Comparison]) -> None:
    for rival in PAPER_SAVINGS:
        savings = 100 * numpy.array([comparison.savings[rival] for comparison in compared])
        axes.plot(COST_SHARES, savings.mean(axis=0), color=COLOURS[rival], lw=2, label=f"mean saving over {rival}")
        axes.axhline(100 * PAPER_SAVINGS[rival], color=COLOURS[rival], ls="--", lw=1, label=f"paper, {rival}")
    for comparison, style in zip(compared, (":", "-.", "--"), strict=True):
        line = 100 * numpy.array(comparison.savings["CheckFreq"])
        axes.plot(COST_SHARES, line, style, color="#95a5a6", lw=1.2, label=f"{comparison.workload} over CheckFreq")
    for point in COST_POINTS:
        axes.axvline(point.share, color="#1f6f8b", lw=0.8)
        axes.annotate(f"{point.share:+.2f}", (point.share, 74), rotation=90, fontsize=8, ha="right", va="top")
    axes.axvline(1.0, color="black", lw=0.8)
    axes.annotate("recompute", (1.0, 74), rotation=90, fontsize=8, ha="left", va="top")
    axes.set_ylim(0, 75)
    axes.set_xlabel("end cost over u (1: recomputing)")
    axes.set_ylabel("lower total cost, %")
    axes.legend(fontsize=7, loc="lower left")
    axes.set_title(
        "Paper's setting: one failure in 12.5 h, rivals at 2%, Table III's intervals", loc="left", fontsize=10
    )


def _rates(axes: Axes, swept: Sequence[Sweep]) -> None:
    for sweep, colour in zip(swept, CURVE_COLOURS, strict=True):
        label = f"end cost {sweep.curve}"
        axes.plot(MTBF_HOURS, 100 * numpy.array(sweep.over_young), "o-", color=colour, ms=4, label=label)
    axes.axhline(0, color="black", lw=0.6)
    axes.axhline(100, color="black", lw=0.6, ls=":")
    axes.annotate("failures cost nothing", (MTBF_HOURS[-1], 100), fontsize=8, ha="right", va="bottom")
    axes.set_xscale("log")
    axes.set_xticks(MTBF_HOURS, [f"{hours * 60:.0f} min" if hours < 1 else f"{hours:.0f} h" for hours in MTBF_HOURS])
    axes.tick_params(axis="x", labelsize=8)
    axes.minorticks_off()
    axes.set_xlabel("mean time between failures")
    axes.set_ylabel("lower total cost than recomputing at Young's interval, %")
    axes.legend(fontsize=8)
    axes.set_title(f"{swept[0].workload}: each plans its own interval", loc="left", fontsize=10)


def draw_planner(found: Sequence[Case]) -> Figure:
    """Cost above brute force (left) and above the best rival (right), with the true curve and with wrong ones."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, name, against in zip(panels, ("over_brute", "over_rival"), ("brute force", "best rival"), strict=True):
        for error, colour in zip((1.0, 0.7, 1.3), CURVE_COLOURS, strict=False):
            own = [case for case in found if case.curve_error == error]
            x = [_place(case) for case in own]
            label = "true curve" if error == 1.0 else f"curve x {error:g}"
            axes.plot(x, [100 * getattr(case, name) for case in own], "o", color=colour, ms=4, alpha=0.8, label=label)
        for aim, style in ((AIMS[against], "-"), (AIMS[f"{against}, curve 30% off"], "--")):
            axes.axhline(100 * aim, color="#c0392b", ls=style, lw=0.8, label=f"aim {100 * aim:.0f}%")
        axes.set_xticks(range(len(PHASES)), list(PHASES))
        axes.set_ylabel(f"cost above {against}, %")
        axes.set_xlabel("phase (within each: MTBF from 10 min to 12 h)")
        axes.legend(fontsize=8)
    figure.suptitle("Simulated: the planned interval over MTBF x state x phase", fontsize=11)
    return figure


def _place(case: Case) -> float:
    within = MTBF_MINUTES.index(case.mtbf_minutes) / (len(MTBF_MINUTES) - 1) - 0.5
    return list(PHASES).index(case.phase) + 0.7 * within
