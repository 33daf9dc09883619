"""Latencies as the share of answers that took longer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib.figure import Figure

from cpsr.benchmarks.service.result import AIM_SECONDS, MILLISECONDS

__all__ = ["draw"]

COLOURS = ("#1f6f8b", "#e09f3e", "#777777")
AIM = "#c0392b"


def draw(seconds: Mapping[str, Sequence[float]], machine: dict[str, Any]) -> Figure:
    """One line a journal.

    Args:
        seconds: of every answer, by the journal's name.
        machine: that it was measured on.
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, taken), colour in zip(seconds.items(), COLOURS, strict=False):
        longer = 1.0 - numpy.arange(len(taken)) / len(taken)
        axes.step(MILLISECONDS * numpy.sort(taken), longer, where="post", color=colour, label=name)
    axes.axvline(MILLISECONDS * AIM_SECONDS, color=AIM, ls="--", lw=1, label="aim: 99 of 100 answers are faster")
    axes.axhline(0.01, color=AIM, ls=":", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="GET /plan, from when it was meant to be sent, ms")
    axes.set_ylabel("share of answers that took at least as long")
    axes.set_title(
        f"{machine['cpu_model']}, {machine['cores']} cores, load before {machine['load_before']:.1f}, "
        f"{machine['date'][:10]}",
        fontsize=10,
    )
    axes.legend(loc="lower left")
    return figure
