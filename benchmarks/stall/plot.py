"""The stall benchmark as a picture."""

from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.harness.measurement import machine_text
from cpsr.benchmarks.stall.result import RATIO_AIM, SizeResult

__all__ = ["draw"]

OURS, OTHERS = "#1f6f8b", "#b0b7bd"
JITTER = 0.16  # half the height over which a method's samples are spread


def draw(results: list[SizeResult], machine: dict[str, Any]) -> Figure:
    """Every sample, its median and interval, in memcpys of the same bytes; one panel a size."""
    figure = Figure(
        figsize=(11, 1.2 + sum(1.0 + 0.45 * len(result.methods) for result in results)), layout="constrained"
    )
    for axes, result in zip(figure.subplots(len(results), 1, squeeze=False)[:, 0], results, strict=True):
        _panel(axes, result)
    figure.suptitle(
        f"Extra time of the training thread per checkpoint ({machine_text(machine)}, "
        f"{machine['torch_threads']} torch threads, {machine['date'][:10]})",
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, result: SizeResult) -> None:
    spread = numpy.random.default_rng(0)
    for row, method in enumerate(result.methods):
        colour = OURS if method.name == "cpsr" else OTHERS
        ratios = numpy.asarray(method.stalls) / result.memcpy.value
        axes.scatter(ratios, row + spread.uniform(-JITTER, JITTER, ratios.size), s=12, color=colour, alpha=0.6, lw=0)
        error = [[method.ratio.value - method.ratio.low], [method.ratio.high - method.ratio.value]]
        axes.errorbar(method.ratio.value, row, xerr=error, fmt="D", ms=6, color="black", capsize=4, lw=1.4)
        axes.annotate(
            f"{method.ratio.value:.2f} x, {method.stall.value * 1000:.0f} ms",
            (method.ratio.value, row),
            xytext=(0, 12),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.axvline(RATIO_AIM, color="#c0392b", ls="--", lw=1, label=f"aim: {RATIO_AIM} x memcpy")
    axes.axvline(0, color="black", lw=0.6)
    axes.set_xscale("symlog", linthresh=2, linscale=1.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(result.methods)), [method.name for method in result.methods])
    axes.set_ylim(len(result.methods) - 0.4, -0.6)
    axes.set_xlabel(f"stall, in memcpys of the same bytes (1 = {result.memcpy.value * 1000:.1f} ms)")
    axes.set_title(
        f"{result.size} of training state, step {result.step_seconds * 1000:.0f} ms", loc="left", fontsize=10
    )
    axes.legend(loc="lower left", fontsize=8)
