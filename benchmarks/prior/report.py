"""The prior table on the terminal, and expected beside measured costs as a picture."""

import numpy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as TextTable
from scipy import stats

from cpsr.benchmarks.prior.fit import Left, Recoveries, expected_of_parts, expected_without
from cpsr.benchmarks.recovery.plot import COLOURS
from cpsr.predictor.calibration import FEATURES, Table
from cpsr.tables import print_table

__all__ = ["draw", "show"]

SHOWN_ITERATIONS = (-200, 300)


def show(console: Console, recoveries: Recoveries, table: Table, left: list[Left], grouped: list[Left]) -> None:
    """Print the terms of the expected cost, and how the table does on runs and on groups that it has not seen."""
    console.print(
        f"{table.source['recoveries']} recoveries at {table.source['failures']} failures; a single one scatters by "
        f"{table.noise_iterations:.0f} iterations around the expectation of its run"
    )
    known = numpy.isfinite(recoveries.lags)
    if known.sum() > 2:
        correlation = stats.spearmanr(recoveries.lags[known], recoveries.costs[known]).statistic
        console.print(f"rank correlation of the lag after 60-160 iterations with the end cost: {correlation:+.2f}")
    coefficients = TextTable(title="Terms of the expected end cost, in iterations", title_justify="left")
    for heading in ("term", "coefficient", "between runs"):
        coefficients.add_column(heading, justify="left" if heading == "term" else "right")
    for name, mean, variance in zip(FEATURES, table.mean, table.covariance.diagonal(), strict=True):
        coefficients.add_row(name, f"{mean:+.3f}", f"{variance**0.5:.3f}")
    print_table(console, coefficients)
    _show_parts(console, recoveries)
    _show_left(console, "Each run, by the table without it", left)
    if grouped:
        _show_left(console, "Each run, by the table without its task and optimizer", grouped)


def _show_left(console: Console, title: str, left: list[Left]) -> None:
    judged = TextTable(title=title, title_justify="left")
    for heading in ("run", "recoveries", "rank correlation", "chosen / u", "recomputed", "restart from c / u"):
        judged.add_column(heading, justify="left" if heading == "run" else "right")
    for one in left:
        chosen = float(numpy.mean(one.chosen_over_horizon))
        costs = f"{chosen:+.2f}", f"{one.recomputed:.0%}", f"{one.stale_over_horizon:+.2f}"
        judged.add_row(one.run, str(one.recoveries), f"{one.correlation:+.2f}", *costs)
    every = numpy.concatenate([one.chosen_over_horizon for one in left])
    dearer = f"{numpy.mean(every > 1.0):.0%} cost more than recomputing"
    judged.caption = f"over {len(every)} failures: median {numpy.median(every):+.2f} u, {dearer}"
    print_table(console, judged)


def _show_parts(console: Console, recoveries: Recoveries) -> None:
    if (recoveries.lost_shares == 1.0).all():
        return
    expected, measured = expected_of_parts(recoveries)
    correlation = stats.spearmanr(expected, measured).statistic
    console.print(
        f"{len(measured)} recoveries of a lost part, by whole states of other runs: {expected.mean():+.1f} iterations "
        f"expected, {measured.mean():+.1f} measured, rank correlation {correlation:+.2f}"
    )


def draw(recoveries: Recoveries) -> Figure:
    """Expected against measured end cost; each run by the table without it."""
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(sorted(set(recoveries.runs))):
        found = (numpy.clip(costs, *SHOWN_ITERATIONS) for costs in expected_without(recoveries, name))
        axes.plot(*found, ".", color=COLOURS[place % len(COLOURS)], label=name)
    axes.plot(SHOWN_ITERATIONS, SHOWN_ITERATIONS, color="black", lw=0.8)
    axes.set_xlabel("expected end cost, iterations (by the table without the run)")
    axes.set_ylabel("measured end cost, iterations")
    axes.legend(fontsize=6, frameon=False)
    return figure
