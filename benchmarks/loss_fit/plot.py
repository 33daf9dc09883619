"""Fitted loss curves as a picture, as the paper's Fig. 12."""

from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.loss_fit.losses import RunLosses
from cpsr.benchmarks.loss_fit.result import CONFIDENCE, PhaseFit

__all__ = ["draw"]

COLUMNS = 2
LOSSES = "#6b767c"
COLOURS = ("#1f6f8b", "#c0392b", "#7d3c98", "#b9770e", "#1e8449", "#34495e", "#d35400", "#6c7a0a")
PLACES = 200  # along each curve
EDGE = 0.05  # of the losses' range above and below
# The first losses fall by more than all the others together; the axis leaves out this share of the points.
EARLY_FRACTION = 0.02


def draw(curves: Sequence[tuple[RunLosses, Sequence[PhaseFit]]]) -> Figure:
    """One panel a curve: its losses, each phase's fit as a line over that phase, and its forecast of the next."""
    rows = -(-len(curves) // COLUMNS)
    columns = min(COLUMNS, len(curves))
    figure = Figure(figsize=(6.5 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (losses, fits) in zip(panels, curves, strict=False):
        _panel(axes, losses, fits)
    for axes in panels[len(curves) :]:
        axes.remove()
    figure.suptitle(
        f"Loss curves fitted online at the ends of phases: line over the phase, dashed forecast of the next with its "
        f"{CONFIDENCE:.0%} band",
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, losses: RunLosses, fits: Sequence[PhaseFit]) -> None:
    axes.plot(losses.iterations, losses.losses, ".", ms=3, color=LOSSES, alpha=0.7, mew=0)
    for number, phase in enumerate(fits):
        colour = COLOURS[number % len(COLOURS)]
        past = numpy.linspace(max(phase.first_iteration, losses.iterations[0]), phase.last_iteration, PLACES)
        ahead = numpy.linspace(phase.last_iteration, phase.next_iteration, PLACES)
        low, high = phase.fit.band(ahead, CONFIDENCE)
        axes.fill_between(ahead, low, high, color=colour, alpha=0.12, lw=0)
        axes.plot(past, phase.fit.at(past), color=colour, lw=1.6)
        label = f"{phase.last_iteration}: {phase.fit.family.replace('_', ' ')}, next RMSE {phase.next_rmse_nats:.3f}"
        axes.plot(ahead, phase.fit.at(ahead), color=colour, lw=1.6, ls="--", label=label)
    early = int(EARLY_FRACTION * len(losses.losses))
    low_loss, high_loss = float(losses.losses.min()), float(losses.losses[early:].max())
    edge = EDGE * (high_loss - low_loss)
    axes.set_ylim(low_loss - edge, high_loss + edge)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"{losses.kind} loss, nats")
    axes.set_title(losses.run, loc="left", fontsize=10)
    if fits:
        axes.legend(fontsize=7, frameon=False)
