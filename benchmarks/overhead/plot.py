"""The overhead benchmark as a picture."""

from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.overhead.result import OVERHEAD_AIM, VariantResult

__all__ = ["draw"]

COLOUR = "#1f6f8b"
PERCENT = 100.0
JITTER = 0.15


def draw(results: list[VariantResult], machine: dict[str, Any]) -> Figure:
    """Every sample and each run's median; one panel a variant."""
    figure = Figure(figsize=(6 * len(results), 4.2), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        _panel(axes, result)
    figure.suptitle(
        f"Wrapper overhead on steps without a checkpoint ({machine['cpu_model']}, {machine['cores']} cores, "
        f"{machine['date'][:10]})",
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, result: VariantResult) -> None:
    spread = numpy.random.default_rng(0)
    runs = range(1, len(result.overheads) + 1)
    for run, overheads, median in zip(runs, result.overheads, result.run_medians, strict=True):
        percents = PERCENT * numpy.asarray(overheads)
        axes.scatter(
            run + spread.uniform(-JITTER, JITTER, percents.size), percents, s=14, color=COLOUR, alpha=0.5, lw=0
        )
        axes.plot([run - 0.28, run + 0.28], [PERCENT * median] * 2, color="black", lw=2)
    low, high = PERCENT * result.overhead.low, PERCENT * result.overhead.high
    value = PERCENT * result.overhead.value
    axes.axhspan(low, high, color=COLOUR, alpha=0.15, lw=0, label=f"median {value:.2f}%, 95% {low:.2f} to {high:.2f}%")
    axes.axhline(PERCENT * OVERHEAD_AIM, color="#c0392b", ls="--", lw=1, label=f"aim: below {OVERHEAD_AIM:.0%}")
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xticks(runs, [f"run {run}" for run in runs])
    axes.set_ylabel("overhead, % of a step")
    axes.set_title(f"{result.variant}, step {result.step_seconds * 1000:.0f} ms", loc="left", fontsize=10)
    axes.legend(fontsize=8)
