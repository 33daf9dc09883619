"""The expert benchmark as pictures."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.experts.costs import Cost
from cpsr.benchmarks.experts.names import (
    CATCH_UP,
    CATCH_UP_NOTHING,
    MADE_UP,
    STALE,
    STALL_AIM,
)
from cpsr.benchmarks.experts.result import Arithmetic, Result, Stalled
from cpsr.benchmarks.experts.sizes import SAVED_TOKENS, SnapshotSize, SweepPoint
from cpsr.benchmarks.experts.written import Written

__all__ = ["draw"]

COLOURS = ("#1f6f8b", "#d08c2f", "#7a9e3f", "#8a4b08", "#777777")
AIM_COLOUR = "#c0392b"
MODE_COLOURS = {
    STALE: "#d08c2f",
    MADE_UP: "#777777",
    CATCH_UP: "#a03070",
    CATCH_UP_NOTHING: "#c9b3d9",
}
MODE_SHIFT = 0.12  # of the markers of different modes
PERCENT, MEGABYTE = 100.0, 1e6


def draw(result: Result, costs: Sequence[Cost], machine: dict[str, Any]) -> dict[str, Figure]:
    """Figures by name; those of parts that were not measured are left out."""
    figures = {}
    if result.arithmetic is not None:
        figures["sizes"] = _draw_arithmetic(result.arithmetic)
    if result.stalls:
        figures["stall"] = _draw_stalls(result.stalls, machine)
    if result.written:
        figures["writes"] = _draw_writes(result.written, machine)
    if costs:
        figures["failures"] = _draw_failures(costs, machine)
    return figures


def _draw_arithmetic(arithmetic: Arithmetic) -> Figure:
    figure = Figure(figsize=(14, 4.7), layout="constrained")
    bars, sweep = figure.subplots(1, 2)
    _bars(bars, arithmetic.sizes)
    _sweep(sweep, arithmetic.sweep)
    figure.suptitle("Sparse snapshots of mixtures of experts: arithmetic on shapes", fontsize=11)
    return figure


def _bars(axes: Axes, sizes: Sequence[SnapshotSize]) -> None:
    shapes = list(dict.fromkeys(size.shape for size in sizes))
    policies = list(dict.fromkeys(size.policy for size in sizes))
    width = 0.8 / len(policies)
    for place, (policy, colour) in enumerate(zip(policies, COLOURS, strict=True)):
        mine = [size for size in sizes if size.policy == policy]
        heights = [PERCENT * (1 - size.saved) for size in mine]
        bars = axes.bar(numpy.arange(len(mine)) + place * width, heights, width, color=colour, label=policy)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(numpy.arange(len(shapes)) + 0.4 - width / 2, shapes)
    axes.set_ylabel("snapshot, % of the whole state")
    axes.legend(fontsize=8)
    axes.set_title("Bytes of one snapshot: K = 1 of 8 and 6 of 64 experts", loc="left", fontsize=10)


def _sweep(axes: Axes, points: Sequence[SweepPoint]) -> None:
    for skew, colour in zip(sorted({point.skew for point in points}), COLOURS, strict=True):
        mine = [point for point in points if point.skew == skew]
        ratios = [point.dense_bytes / point.snapshot_bytes for point in mine]
        axes.plot([point.experts for point in mine], ratios, marker="o", ms=4, color=colour, label=f"skew {skew:g}")
    axes.set_xscale("log", base=2)
    experts = sorted({point.experts for point in points})
    axes.set_xticks(experts, [str(one) for one in experts])
    axes.set_xlabel("experts of a layer, GPT-1.6B")
    axes.set_ylabel("whole state over a snapshot")
    axes.legend(fontsize=8)
    axes.set_title(f"Snapshots of the experts with {SAVED_TOKENS:.0%} of the tokens", loc="left", fontsize=10)


def _draw_stalls(stalls: Sequence[Stalled], machine: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    ways = list(dict.fromkeys(one.way for one in stalls))
    for way, colour in zip(ways, COLOURS, strict=False):
        mine = [one for one in stalls if one.way == way]
        values = [PERCENT * one.added.value for one in mine]
        below = [PERCENT * (one.added.value - one.added.low) for one in mine]
        above = [PERCENT * (one.added.high - one.added.value) for one in mine]
        sizes = [one.snapshot_bytes / MEGABYTE for one in mine]
        axes.errorbar(sizes, values, yerr=[below, above], fmt="o", capsize=3, color=colour, label=way)
    axes.axhline(PERCENT * STALL_AIM, color=AIM_COLOUR, ls="--", lw=1, label=f"aim: below {STALL_AIM:.0%}")
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("copied by a snapshot of one rank, MB")
    axes.set_ylabel("added to a step, %")
    axes.legend(fontsize=8)
    _title(figure, "A snapshot after every iteration", machine)
    return figure


def _draw_writes(found: Sequence[Written], machine: dict[str, Any]) -> Figure:
    """For each model, what each way to share out takes of what ranks write that share nothing."""
    labels, ways = list(dict.fromkeys(one.label for one in found)), list(dict.fromkeys(one.way for one in found))
    figure = Figure(figsize=(5.6 * len(labels), 4.2), layout="constrained")
    row = figure.subplots(1, len(labels), squeeze=False, sharey=True)[0]
    row[0].set_ylabel("% of what each rank takes that writes all of its own")
    row[0].set_ylim(0, 1.3 * PERCENT)  # with room for the legend
    for axes, label in zip(row, labels, strict=True):
        for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
            (one,) = (one for one in found if (one.label, one.way) == (label, way))
            shares = [one.bytes_share, one.write_share]
            values = [PERCENT * share.value for share in shares]
            below = [PERCENT * (share.value - share.low) for share in shares]
            above = [PERCENT * (share.high - share.value) for share in shares]
            places = numpy.arange(len(shares)) + 0.26 * (place - 1)
            axes.bar(places, values, 0.25, yerr=[below, above], capsize=3, color=colour, label=way)
        axes.set_xticks(range(2), ["bytes of the busiest rank", "time to write"])
        axes.set_title(label, loc="left", fontsize=10)
        axes.legend(fontsize=8, ncols=len(ways), loc="upper center")
    _title(figure, "What ranks hold alike, shared out", machine)
    return figure


def _draw_failures(costs: Sequence[Cost], machine: dict[str, Any]) -> Figure:
    cells = list(dict.fromkeys((cost.label, cost.policy) for cost in costs))
    figure = Figure(figsize=(12, 3.6 * len(cells) + 0.6), layout="constrained")
    rows = figure.subplots(len(cells), 2, squeeze=False, width_ratios=(2, 1))
    first_of: dict[str, tuple[Axes, Axes]] = {}
    for (label, policy), (gaps, lags) in zip(cells, rows, strict=True):
        if label in first_of:  # policies of one model are read against each other
            gaps.sharey(first_of[label][0])
            lags.sharey(first_of[label][1])
        first_of.setdefault(label, (gaps, lags))
        mine = [cost for cost in costs if (cost.label, cost.policy) == (label, policy)]
        _gaps(gaps, mine)
        gaps.set_title(
            f"{label}, {policy}: mean over {len({cost.seed for cost in mine})} seeds", loc="left", fontsize=10
        )
        _lags(lags, mine)
    _title(figure, "Four failures in one run", machine)
    return figure


def _gaps(axes: Axes, costs: Sequence[Cost]) -> None:
    for mode in dict.fromkeys(cost.mode for cost in costs):
        mine = [cost for cost in costs if cost.mode == mode]
        for cost in mine:
            axes.plot(cost.iterations, cost.gaps_nats, color=MODE_COLOURS[mode], lw=0.5, alpha=0.4)
        mean = numpy.mean([cost.gaps_nats for cost in mine], axis=0)
        axes.plot(mine[0].iterations, mean, color=MODE_COLOURS[mode], lw=1.8, label=f"experts: {mode}")
    for restored in costs[0].restored:
        axes.axvline(restored, color="black", ls=":", lw=0.8)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlabel("iteration (dotted: checkpoints that failures went back to)")
    axes.set_ylabel("validation loss over\nthe run without failures, nats")
    axes.legend(fontsize=8)


def _lags(axes: Axes, costs: Sequence[Cost]) -> None:
    """Every seed's lag after each failure, and the median: one lag that was counted as a bound moves it little."""
    failures = numpy.arange(1, len(costs[0].restored) + 1)
    modes = list(dict.fromkeys(cost.mode for cost in costs))
    for place, mode in enumerate(modes):
        at = failures + MODE_SHIFT * (place - (len(modes) - 1) / 2)
        lags = [cost.lags_iterations for cost in costs if cost.mode == mode]
        for failure, seeds in zip(at, zip(*lags, strict=True), strict=True):
            known = [lag for lag in seeds if lag is not None]
            axes.plot([failure] * len(known), known, "o", ms=4, alpha=0.5, color=MODE_COLOURS[mode])
            if known:
                axes.plot(failure, statistics.median(known), "_", ms=14, mew=2, color=MODE_COLOURS[mode])
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlim(0.5, failures[-1] + 0.5)
    axes.set_xticks(failures)
    axes.set_xlabel("failures so far (bar: median of the seeds)")
    axes.set_ylabel("lag after 60-160 iterations")


def _title(figure: Figure, what: str, machine: dict[str, Any]) -> None:
    figure.suptitle(
        f"{what} ({machine['cpu_model']}, {machine['cores']} cores, load before {machine['load_before']:.1f}, "
        f"{machine['date'][:10]})",
        fontsize=11,
    )
