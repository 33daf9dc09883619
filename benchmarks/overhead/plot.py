"""The overhead benchmark as pictures."""

from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.overhead.bubbles import DATA_PARALLEL, STAGES, BubbleResult, StageResult
from cpsr.benchmarks.overhead.memory import MemoryRun
from cpsr.benchmarks.overhead.result import VariantResult
from cpsr.benchmarks.overhead.timeline import Timeline

__all__ = ["draw_all"]

COLOUR = "#1f6f8b"
OTHER_COLOUR = "#d08c2f"
AIM_COLOUR = "#c0392b"
# From the work of one alone to that of many who share it.
WORK_COLOURS = ("#8a4b08", "#b8741a", "#d9a441", "#ecc98a")
PERCENT = 100.0
MILLISECOND = 1e-3
MEGABYTE = 1e6
JITTER = 0.15
BAR_WIDTH = 0.35


def _draw(results: Sequence[VariantResult], machine: dict[str, Any]) -> Figure:
    """Every sample and each run's median; one panel a variant."""
    figure = Figure(figsize=(5.4 * len(results), 4.2), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        _panel(axes, result)
    _title(figure, "Overhead on a training step", machine)
    return figure


def _draw_bubbles(result: BubbleResult, machine: dict[str, Any]) -> Figure:
    """The predictor's work in an interval against its bubbles: measured stages, and larger jobs simulated from them."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    measured, simulated = figure.subplots(1, 2, width_ratios=(1, 1.6))
    _measured_stages(measured, result.stages)
    _simulated_jobs(simulated, result)
    _title(figure, f"Between two checkpoints, {result.interval_iterations} iterations apart", machine)
    return figure


def _draw_memory(run: MemoryRun, machine: dict[str, Any]) -> Figure:
    """A run's own memory over time, with the predictor and without, before the failure and after the restart."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    _lives(before, "until the failure", run.failing, run.failing_without)
    _lives(after, "the restarted process", run.restarted, run.restarted_without)
    before.set_ylabel("own memory of the process, MB (RssAnon)")
    before.set_ylim(bottom=0)
    before.legend(fontsize=8, loc="lower right")
    _title(figure, "Memory of a run that fails and comes back", machine)
    return figure


def _lives(axes: Axes, title: str, with_predictor: Timeline, without: Timeline) -> None:
    for life, colour, label in (
        (without, COLOUR, "without the predictor: exact restart"),
        (with_predictor, OTHER_COLOUR, "with the predictor: it learns, and predicts at the restart"),
    ):
        seconds, memory = zip(*life.samples, strict=True)
        axes.plot(seconds, numpy.asarray(memory) / MEGABYTE, color=colour, lw=0.9, label=label)
        axes.axvline(life.trained_seconds, color=colour, ls=":", lw=1)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("seconds (dotted: training begins)")


def _title(figure: Figure, what: str, machine: dict[str, Any]) -> None:
    figure.suptitle(f"{what} ({machine_text(machine)}, {machine['date'][:10]})", fontsize=11)


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
    axes.axhline(PERCENT * result.aim, color=AIM_COLOUR, ls="--", lw=1, label=f"aim: below {result.aim:.0%}")
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xticks(runs, [f"run {run}" for run in runs])
    axes.set_ylabel("overhead, % of a step")
    axes.set_title(f"{result.variant}, step {result.step_seconds / MILLISECOND:.0f} ms", loc="left", fontsize=10)
    axes.legend(fontsize=8)


def _measured_stages(axes: Axes, stages: Sequence[StageResult]) -> None:
    places = numpy.arange(len(stages))
    for shift, colour, label, values in (
        (-0.5, COLOUR, "bubbles", [stage.bubbles for stage in stages]),
        (0.5, WORK_COLOURS[0], "predictor's work", [stage.work for stage in stages]),
    ):
        heights = [one.value for one in values]
        errors = [[one.value - one.low for one in values], [one.high - one.value for one in values]]
        bars = axes.bar(
            places + shift * BAR_WIDTH, heights, BAR_WIDTH, yerr=errors, capsize=3, color=colour, label=label
        )
        axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=3)
    axes.set_xticks(places, [f"stage {stage.stage}\n{stage.parameters / MEGABYTE:.2f}M weights" for stage in stages])
    axes.set_ylabel("seconds in an interval")
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    axes.set_title(f"Measured: {len(stages)} stages, median and 95%", loc="left", fontsize=10)


def _simulated_jobs(axes: Axes, result: BubbleResult) -> None:
    for share, colour in zip(DATA_PARALLEL, WORK_COLOURS, strict=True):
        jobs = [job for job in result.simulated if job.data_parallel == share]
        if share == DATA_PARALLEL[0]:
            bubbles = [job.bubble_seconds for job in jobs]
            axes.plot(STAGES, bubbles, color=COLOUR, marker="o", ms=4, label="bubbles of the stage that waits least")
            measured = min(stage.bubbles.value for stage in result.stages)
            axes.plot(len(result.stages), measured, color="black", marker="*", ms=9, ls="", label="the same, measured")
        work = [job.work_seconds for job in jobs]
        axes.plot(STAGES, work, color=colour, marker="s", ms=3, label=f"predictor's work, shared by {share}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(STAGES, [str(stages) for stages in STAGES])
    axes.set_xlabel("pipeline stages, as many micro-batches")
    axes.set_ylabel("seconds in an interval")
    axes.legend(fontsize=8)
    axes.set_title("SIMULATED by the 1F1B schedule from those stages; not run", loc="left", fontsize=10)


def draw_all(
    memory_runs: Sequence[MemoryRun],
    variants: list[VariantResult],
    bubbles: BubbleResult | None,
    machine: dict[str, Any],
) -> dict[str, Figure]:
    """Figures by name: the first is the JSON file's own plot, the others lie beside it."""
    figures = {}
    if variants:
        figures["steps"] = _draw(variants, machine)
    if bubbles is not None:
        figures["bubbles"] = _draw_bubbles(bubbles, machine)
    if memory_runs:
        figures["memory"] = _draw_memory(memory_runs[-1], machine)
    return figures
