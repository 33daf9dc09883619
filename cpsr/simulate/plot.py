"""A simulation as a picture: where the wall time went, and how ETTR spreads over the runs."""

from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.simulate.outcome import QUANTILES, Outcome

__all__ = ["draw"]

COLOURS = {"stall": "#e0a030", "lost": "#c0392b", "restart": "#7d5ba6", "waiting": "#95a5a6"}
OURS, OTHERS = "#1f6f8b", "#6b7780"


def draw(outcomes: Sequence[Outcome], title: str) -> Figure:
    """The cost of each system by its parts (left), and its ETTR over the runs (right)."""
    figure = Figure(figsize=(12, 1.8 + 0.5 * len(outcomes)), layout="constrained")
    costs, spread = figure.subplots(1, 2)
    _costs(costs, outcomes)
    _spread(spread, outcomes)
    figure.suptitle(title, fontsize=11)
    return figure


def _costs(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    rows = numpy.arange(len(outcomes))
    ends = {"left": numpy.zeros(len(outcomes)), "right": numpy.zeros(len(outcomes))}
    for name, colour in COLOURS.items():
        parts = [getattr(outcome, f"{name}_seconds").mean() / outcome.job.wall_seconds for outcome in outcomes]
        shares = 100 * numpy.array(parts)
        # A recovery that comes out ahead gives time back: its share lies left of zero.
        start = numpy.where(shares >= 0, ends["right"], ends["left"])
        axes.barh(rows, shares, left=start, color=colour, label=name, height=0.65)
        ends["right"] += numpy.maximum(shares, 0)
        ends["left"] += numpy.minimum(shares, 0)
    for row, outcome in enumerate(outcomes):
        total = 100 * outcome.cost_fraction.mean()
        axes.annotate(f" {total:.2f}%", (ends["right"][row], row), va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.axvline(0, color="black", lw=0.6)
    axes.set_xlabel("share of the wall time, % (the figure is the sum)")
    axes.set_yticks(rows, [f"{o.system.name}, every {o.system.checkpoints.interval_iterations}" for o in outcomes])
    axes.invert_yaxis()
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _spread(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for row, outcome in enumerate(outcomes):
        low, quarter, middle, upper, high = numpy.quantile(outcome.ettr, QUANTILES)
        colour = OURS if outcome.system.name == "cpsr" else OTHERS
        axes.plot([low, high], [row, row], color=colour, lw=1.5)
        axes.plot([quarter, upper], [row, row], color=colour, lw=7, solid_capstyle="butt")
        axes.plot(middle, row, "o", color="white", ms=4, mec=colour)
        axes.annotate(
            f"{middle:.4f}", (middle, row), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_yticks(range(len(outcomes)), [])
    axes.set_ylim(len(outcomes) - 0.5, -0.7)
    axes.set_xlabel("ETTR over the runs: 5, 25, 50, 75, 95%")
