"""The overhead benchmark as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, verdict
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS
from cpsr.benchmarks.overhead.bubbles import BubbleResult, Simulated
from cpsr.benchmarks.overhead.memory import MemoryResult
from cpsr.benchmarks.overhead.result import VariantResult
from cpsr.tables import print_table

__all__ = ["show"]

PERCENT = 100.0
MEGABYTE = 1e6


def show(
    console: Console,
    machine: dict[str, Any],
    variants: Sequence[VariantResult],
    bubbles: BubbleResult | None,
    memory: MemoryResult | None,
) -> None:
    """Print what was measured."""
    if variants:
        print_table(console, _overheads(variants))
        console.print(
            f"Wrapper: blocks of {BLOCK_STEPS} steps without a checkpoint; with it, without, without, with. Predictor: "
            "checkpoint intervals in which it works, and in which it does not. Medians with 95% bootstrap intervals."
        )
    if bubbles is not None:
        print_table(console, _stages(bubbles))
        print_table(console, _simulated(bubbles.simulated))
        if any(stage.taken_in_share < 1.0 for stage in bubbles.stages):
            console.print("[yellow]The work of what was not learned in time is missing in what is simulated.[/yellow]")
        _show_aims(console, bubbles.aims())
    if memory is not None:
        print_table(console, _memory(memory))
        _show_aims(console, memory.aims())
    console.print(f"{machine_text(machine)}, torch threads: {machine['torch_threads']}")


def _show_aims(console: Console, aims: dict[str, bool]) -> None:
    for aim, met in aims.items():
        console.print(f"{verdict(met)}  {aim}")


def _overheads(variants: Sequence[VariantResult]) -> Table:
    table = Table(title="Overhead on a training step", title_justify="left")
    for heading in ("job", "step, ms", "overhead, % of a step", "medians of the runs, %", "aim"):
        table.add_column(heading)
    for result in variants:
        table.add_row(
            result.variant,
            f"{result.step_seconds * 1000:.1f}",
            interval_text(result.overhead, PERCENT),
            "  ".join(f"{PERCENT * median:+.2f}" for median in sorted(result.run_medians)),
            f"{verdict(result.met)}  below {result.aim:.0%}",
        )
    return table


def _stages(bubbles: BubbleResult) -> Table:
    title = f"Measured: seconds in an interval of {bubbles.interval_iterations} iterations"
    table = Table("", title=title, title_justify="left")
    for stage in bubbles.stages:
        table.add_column(f"stage {stage.stage}", justify="right")
    rows = {
        "weights, million": [f"{stage.parameters / MEGABYTE:.2f}" for stage in bubbles.stages],
        "interval": [interval_text(stage.seconds) for stage in bubbles.stages],
        "bubbles": [interval_text(stage.bubbles, digits=3) for stage in bubbles.stages],
        "predictor's work": [interval_text(stage.work, digits=3) for stage in bubbles.stages],
        "of it inside bubbles, %": [f"{PERCENT * stage.inside_share:.2f}" for stage in bubbles.stages],
        "begun outside, s in all": [f"{stage.outside_seconds:.3f}" for stage in bubbles.stages],
        "slices that ran late, %": [f"{PERCENT * stage.late_slices_share:.2f}" for stage in bubbles.stages],
        "learned before the next, %": [f"{PERCENT * stage.taken_in_share:.0f}" for stage in bubbles.stages],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _simulated(jobs: Sequence[Simulated]) -> Table:
    title = "SIMULATED by the 1F1B schedule from the measured stages: the work as % of the bubbles (not run)"
    shares = sorted({job.data_parallel for job in jobs})
    headings = ["stages", "bubbles, s", *(f"shared by {share}" for share in shares)]
    table = Table(*headings, title=title, title_justify="left")
    for stages in sorted({job.stages for job in jobs}):
        row = sorted((job for job in jobs if job.stages == stages), key=lambda job: job.data_parallel)
        percents = [f"{PERCENT * job.work_seconds / job.bubble_seconds:.2f}" for job in row]
        table.add_row(str(stages), f"{row[0].bubble_seconds:.2f}", *percents)
    return table


def _memory(memory: MemoryResult) -> Table:
    table = Table("", title="Own memory with the predictor, above that without", title_justify="left")
    for run in range(len(memory.failing_bytes)):
        table.add_column(f"run {run + 1}", justify="right")
    table.add_row("peak before the failure, MB", *(f"{found / MEGABYTE:.1f}" for found in memory.failing_bytes))
    table.add_row("peak after the restart, MB", *(f"{found / MEGABYTE:.1f}" for found in memory.restarted_bytes))
    table.add_row("checkpoints learned from", *(str(count) for count in memory.learned_checkpoints))
    table.add_section()
    table.add_row("bound by its arithmetic, MB", f"{memory.bound_bytes / MEGABYTE:.1f}")
    return table
