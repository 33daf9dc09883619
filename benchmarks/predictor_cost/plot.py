"""The cost of prediction as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.predictor_cost.measure import MethodSamples
from cpsr.benchmarks.predictor_cost.result import MEGABYTE, MEMORY_AIM_BYTES, RATIO_AIM, MethodResult

__all__ = ["draw"]

OURS, AIM = "#1f6f8b", "#c0392b"
BAR_HEIGHT = 0.5
JITTER = 0.16  # half the height over which a method's turns are spread


def draw(
    results: Sequence[MethodResult], samples: Sequence[MethodSamples], machine: dict[str, Any], title: str
) -> Figure:
    """Memory, speed against reading, and time against training: one panel each, one row a method."""
    figure = Figure(figsize=(13, 1.9 + 0.6 * len(results)), layout="constrained")
    memory, speed, duration = figure.subplots(1, 3, sharey=True)
    rows = range(len(results))
    _bars(memory, [result.peak_bytes / MEGABYTE for result in results], MEMORY_AIM_BYTES / MEGABYTE)
    memory.set_xlabel("peak of own memory above the level before, MB")
    _ratios(speed, results, samples)
    # Each method has the same five iterations to stay below.
    _bars(duration, [result.seconds.value for result in results], results[0].training_seconds)
    duration.set_xlabel("forecast and prediction, s (line: 5 training iterations)")
    memory.set_yticks(rows, [result.method for result in results])
    memory.set_ylim(len(results) - 0.5, -0.5)
    figure.suptitle(f"{title} ({machine_text(machine)}, {machine['date'][:10]})", fontsize=11)
    return figure


def _bars(axes: Axes, values: Sequence[float], aim: float) -> None:
    for row, value in enumerate(values):
        axes.barh(row, value, height=BAR_HEIGHT, color=OURS)
        axes.annotate(f"{value:.3g}", (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(aim, color=AIM, ls="--", lw=1)
    axes.set_xlim(0, 1.2 * max(aim, *values))


def _ratios(axes: Axes, results: Sequence[MethodResult], samples: Sequence[MethodSamples]) -> None:
    spread = numpy.random.default_rng(0)
    for row, (result, sample) in enumerate(zip(results, samples, strict=True)):
        turns = sample.repeats
        ratios = numpy.array([turn.sum_seconds / (turn.forecast_seconds + turn.predict_seconds) for turn in turns])
        axes.scatter(ratios, row + spread.uniform(-JITTER, JITTER, ratios.size), s=12, color=OURS, alpha=0.6, lw=0)
        error = [[result.ratio.value - result.ratio.low], [result.ratio.high - result.ratio.value]]
        axes.errorbar(result.ratio.value, row, xerr=error, fmt="D", ms=6, color="black", capsize=4, lw=1.4)
    axes.axvline(RATIO_AIM, color=AIM, ls="--", lw=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("rate over that of reading the checkpoints once")
