"""`cpsr bench plan`: how long one plan takes, by the number of ranks and by what differs between them."""

from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from cpsr.benchmarks.harness.measurement import measuring, verdict
from cpsr.benchmarks.plan.timing import KINDS, Timing, measure
from cpsr.tables import print_table

__all__ = ["main"]

RANKS = (1, 8, 64, 256, 1000)
REPEATS = 15
AIM_RANKS, AIM_SECONDS = 1000, 0.1
MILLISECONDS = 1000.0


def main(json_path: Path | None = None) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
    """
    with measuring("plan", json_path) as call:
        timings = [measure(kind, ranks, REPEATS) for kind in KINDS for ranks in RANKS]
        print_table(call.console, _table(timings))
        figures = {
            "repeats": REPEATS,
            "aim_seconds": AIM_SECONDS,
            "results": [vars(timing) for timing in timings],
        }
        call.leave(figures, _draw(timings))


def _table(timings: list[Timing]) -> Table:
    table = Table("ranks", "what differs", "median, ms", "longest, ms", "aim", title="Time of one plan")
    for timing in timings:
        aim = f"{verdict(timing.median_seconds < AIM_SECONDS)}  below {MILLISECONDS * AIM_SECONDS:.0f}"
        table.add_row(
            str(timing.ranks),
            timing.kind,
            f"{MILLISECONDS * timing.median_seconds:.1f}",
            f"{MILLISECONDS * timing.longest_seconds:.1f}",
            aim if timing.ranks == AIM_RANKS else "",
        )
    return table


def _draw(timings: list[Timing]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        own = [timing for timing in timings if timing.kind == kind]
        milliseconds = [MILLISECONDS * timing.median_seconds for timing in own]
        axes.plot([timing.ranks for timing in own], milliseconds, marker="o", label=kind)
    axes.axhline(MILLISECONDS * AIM_SECONDS, color="grey", linestyle="--", linewidth=1, label="aim at 1,000 ranks")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="one plan, ms", title="What differs between the ranks")
    axes.legend()
    return figure
