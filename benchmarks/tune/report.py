"""Final loss over the peak rate: on the terminal, as a plot, and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.recovery.plot import COLOURS, where
from cpsr.benchmarks.tune.sweep import Rate, Sweep
from cpsr.tables import print_table

__all__ = ["draw", "plain", "show"]

PANEL_HEIGHT = 3.4


def show(console: Console, sweeps: Sequence[Sweep]) -> None:
    """One row per setting: the best rate, and what its neighbours lose."""
    table = Table(title="Final loss by peak learning rate", title_justify="left")
    table.add_column("training", no_wrap=True)
    for heading in ("best rate", "final loss, nats", "1.4 times lower", "1.4 times higher", "rates tried"):
        table.add_column(heading, justify="right")
    for one in sweeps:
        best = one.best
        beside = {rate.step - best.step: rate for rate in one.rates}
        gaps = [_gap(beside[side], best) for side in (-1, 1)]
        table.add_row(one.setting.name, f"{best.peak:.2e}", f"{best.loss:.4f}", *gaps, str(len(one.rates)))
    table.caption = "neighbours: what they end above the best, in nats, with twice its standard error over seeds"
    print_table(console, table)


def _gap(rate: Rate, best: Rate) -> str:
    """Paired by seed."""
    pairs = [(one.loss, other.loss) for one, other in zip(rate.ended, best.ended, strict=True) if one.loss is not None]
    gaps = [loss - other for loss, other in pairs if other is not None]
    if len(gaps) < len(rate.ended):
        return "diverges"
    if len(gaps) == 1:
        return f"{gaps[0]:+.4f}"
    return f"{numpy.mean(gaps):+.4f} ± {2 * numpy.std(gaps, ddof=1) / len(gaps) ** 0.5:.4f}"


def plain(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """For JSON: every training's end, by setting and rate."""
    return [
        {
            **asdict(one.setting),
            "best_peak_learning_rate": one.best.peak,
            "rates": [
                {"peak_learning_rate": rate.peak, "step": rate.step, "ended": [asdict(end) for end in rate.ended]}
                for rate in one.rates
            ],
        }
        for one in sweeps
    ]


def draw(sweeps: Sequence[Sweep], machine: dict[str, Any]) -> Figure:
    """A panel per task, optimizer and length, a line per schedule; a dot per seed, a ring around the best."""
    panels: dict[str, list[Sweep]] = {}
    for one in sweeps:
        title = f"{one.setting.task}, {one.setting.optimizer}, {one.setting.iterations} iterations"
        panels.setdefault(title, []).append(one)
    figure = Figure(figsize=(8, 1.0 + PANEL_HEIGHT * len(panels)), layout="constrained")
    axes_of = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, mine) in zip(axes_of, panels.items(), strict=True):
        for place, one in enumerate(mine):
            colour = COLOURS[2 * place % len(COLOURS)]
            known = [rate for rate in one.rates if numpy.isfinite(rate.loss)]
            axes.plot([rate.peak for rate in known], [rate.loss for rate in known], color=colour, lw=1.2)
            for rate in known:
                losses = [end.loss for end in rate.ended]
                axes.plot([rate.peak] * len(losses), losses, ".", color=colour, ms=4)
            axes.plot(one.best.peak, one.best.loss, "o", mfc="none", color=colour, ms=10, label=one.setting.schedule)
        axes.set_xscale("log")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel("final loss, nats")
        axes.legend(fontsize=8, frameon=False)
    axes_of[-1].set_xlabel("peak learning rate")
    figure.suptitle(f"Final loss by peak learning rate ({where(machine)})", fontsize=11)
    return figure
