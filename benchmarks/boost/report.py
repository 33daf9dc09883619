"""Iterations saved by each way: on the terminal, as a plot, and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.boost.result import NEEDED_PERCENT, CorpusResult, Saved, is_worth_an_option
from cpsr.benchmarks.harness.measurement import verdict
from cpsr.benchmarks.recovery.plot import COLOURS, where
from cpsr.benchmarks.recovery.statistics import Mean
from cpsr.benchmarks.tune.report import plain as plain_sweeps
from cpsr.tables import print_table

__all__ = ["draw", "plain", "show"]

PANEL_HEIGHT = 2.2


def show(console: Console, results: Sequence[CorpusResult]) -> None:
    """A table for each corpus, and whether the rule is met."""
    for one in results:
        best, worth = one.sweep.best, one.worth
        table = Table(title=f"{one.sweep.setting.name}, peak rate {best.peak:.2e}", title_justify="left")
        for heading in ("way", "setting", "iterations saved, %", "by seed"):
            table.add_column(heading, justify="left" if heading in ("way", "setting") else "right")
        for saved in one.saved.values():
            seeds = ", ".join("diverged" if value is None else f"{value:+.1f}" for value in saved.percent)
            table.add_row(saved.way, saved.setting, _text(saved.mean), seeds)
        table.caption = (
            f"one iteration is worth {1e3 * worth.nats:.3f} +- {1e3 * worth.standard_error_nats:.3f} thousandths of a "
            f"nat; the move saves {_text(one.beside_outer)} more than the outer optimizer"
        )
        print_table(console, table)
    for one in results:
        console.print(f"{one.sweep.setting.name}: {verdict(one.is_enough)}")
    console.print(f"rule (at least {NEEDED_PERCENT:g}%, not behind the outer optimizer, on every corpus): ", end="")
    console.print(verdict(is_worth_an_option(results)))


def _text(mean: Mean | None) -> str:
    if mean is None:
        return "diverged"
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.1f}"
    return f"{mean.value:+.1f} ({mean.low:+.1f} to {mean.high:+.1f})"


def plain(results: Sequence[CorpusResult]) -> dict[str, Any]:
    """For JSON: every training's end."""
    return {
        "rule_met": is_worth_an_option(results),
        "corpora": [
            {
                "setting": one.sweep.setting.name,
                "rule_met": one.is_enough,
                "worth": asdict(one.worth),
                "saved": [asdict(saved) for saved in one.saved.values()],
                "move_beside_outer": None if one.beside_outer is None else asdict(one.beside_outer),
                "final_losses_nats": one.losses,
                "selection": [
                    {"setting": name, "seed": seed, "final_loss_nats": loss}
                    for (name, seed), loss in one.chosen.trials.items()
                ],
                "sweep": plain_sweeps([one.sweep])[0],
            }
            for one in results
        ],
    }


def draw(results: Sequence[CorpusResult], machine: dict[str, Any]) -> Figure:
    """A panel for each corpus, a row for each way: a dot per seed, the mean with its interval."""
    figure = Figure(figsize=(8, 1.2 + PANEL_HEIGHT * len(results)), layout="constrained")
    axes_of = figure.subplots(len(results), 1, squeeze=False, sharex=True)[:, 0]
    for axes, one in zip(axes_of, results, strict=True):
        _panel(axes, list(one.saved.values()))
        axes.set_title(one.sweep.setting.name, loc="left", fontsize=10)
    axes_of[-1].set_xlabel("iterations saved against the tuned baseline, %")
    figure.suptitle(f"Moves without a failure ({where(machine)})", fontsize=11)
    return figure


def _panel(axes: Axes, rows: Sequence[Saved]) -> None:
    for row, saved in enumerate(rows):
        colour = COLOURS[2 * row % len(COLOURS)]
        known = [value for value in saved.percent if value is not None]
        axes.plot(known, [row] * len(known), ".", color=colour, ms=4, alpha=0.7)
        mean = saved.mean
        if mean is None:
            continue
        if mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [row, row], color=colour, lw=1.6)
        axes.plot(mean.value, row, "o", color=colour, ms=6)
    axes.axvline(0.0, color="black", lw=0.8)
    axes.axvline(NEEDED_PERCENT, color="black", lw=0.8, ls="--")
    axes.set_yticks(range(len(rows)), [saved.way for saved in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
