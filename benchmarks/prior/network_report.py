"""Cosines of the network's directions with later motion: on the terminal, and along the run as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.prior.network import INTERVALS, LINE, Judged
from cpsr.benchmarks.recovery.plot import COLOURS, where
from cpsr.tables import print_table

__all__ = ["draw", "mean_cosine", "show"]

EARLY_SHARE = 1 / 3  # of the checkpoints
BIN_ITERATIONS = 100


def show(console: Console, found: Sequence[Judged]) -> None:
    """Mean cosines by what was left out and by interval, and how far each way is above the line, over groups."""
    groups = list(dict.fromkeys(one.left_out for one in found))
    table = Table(title="Mean cosine with the motion of the next 100 to 200 iterations", title_justify="left")
    early = f"first {EARLY_SHARE:.0%}"
    for heading in (
        "direction",
        *groups,
        *(f"interval {interval}" for interval in INTERVALS),
        early,
        "over the line's",
    ):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    for way in found[0].cosines:
        parts = [[one for one in found if one.left_out == group] for group in groups]
        parts += [[one for one in found if one.interval == interval] for interval in INTERVALS]
        means = [f"{mean_cosine(part, way):.4f}" for part in parts]
        table.add_row(way, *means, f"{mean_cosine(found, way, EARLY_SHARE):.4f}", _over_line(found, way))
    table.caption = "each group's runs by a network pretrained on the others; +- the standard error over groups"
    print_table(console, table)


def mean_cosine(found: Sequence[Judged], way: str, share: float = 1.0) -> float:
    """Mean over runs and intervals, each the mean of its checkpoints.

    Args:
        found: at least one.
        way: by name.
        share: of each run's checkpoints, the oldest.
    """
    return float(numpy.mean([numpy.mean(_oldest(one.cosines[way], share)) for one in found]))


def _oldest(cosines: Sequence[float], share: float) -> Sequence[float]:
    return cosines[: max(1, round(share * len(cosines)))]


def _over_line(found: Sequence[Judged], way: str) -> str:
    if way == LINE:
        return ""
    by_group: dict[str, list[float]] = {}
    for one in found:
        by_group.setdefault(one.left_out, []).append(mean_cosine([one], way) - mean_cosine([one], LINE))
    means = [float(numpy.mean(values)) for values in by_group.values()]
    error = f" +- {numpy.std(means, ddof=1) / len(means) ** 0.5:.4f}" if len(means) > 1 else ""
    return f"{numpy.mean(means):+.4f}{error}"


def draw(found: Sequence[Judged], machine: dict[str, Any]) -> Figure:
    """How far each way is above the line along the run, a panel for each interval."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    grid = figure.subplots(1, len(INTERVALS), squeeze=False, sharey=True)[0]
    for axes, interval in zip(grid, INTERVALS, strict=True):
        _panel(axes, [one for one in found if one.interval == interval])
        axes.set_title(f"checkpoint every {interval} iterations", loc="left", fontsize=9)
    grid[0].set_ylabel("cosine with later motion, over the line's")
    grid[-1].legend(fontsize=8, frameon=False)
    figure.suptitle(f"The network's direction on runs that it was not pretrained on ({where(machine)})", fontsize=10)
    return figure


def _panel(axes: Axes, found: Sequence[Judged]) -> None:
    for place, way in enumerate(name for name in found[0].cosines if name != LINE):
        bins: dict[int, list[float]] = {}
        for one in found:
            for iteration, mine, line in zip(one.iterations, one.cosines[way], one.cosines[LINE], strict=True):
                bins.setdefault(iteration // BIN_ITERATIONS, []).append(mine - line)
        middles = [(number + 0.5) * BIN_ITERATIONS for number in sorted(bins)]
        means = [float(numpy.mean(bins[number])) for number in sorted(bins)]
        axes.plot(middles, means, color=COLOURS[2 * place], label=way)
    axes.axhline(0.0, color="black", lw=0.8)
    axes.set_xlabel("iteration")
