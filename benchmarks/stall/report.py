"""The stall benchmark's tables, and what is to be known with them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.measurement import interval_text, machine_text, verdict
from cpsr.benchmarks.stall.damage import DAMAGES
from cpsr.benchmarks.stall.job import Size
from cpsr.benchmarks.stall.result import RATIO_AIM, SizeResult
from cpsr.benchmarks.stall.roster import INSTALL
from cpsr.benchmarks.stall.trial import Trial
from cpsr.demo.device import CUDA
from cpsr.tables import print_table

__all__ = ["figures", "show"]

MILLISECONDS = 1000.0
MEGABYTE = 1e6


def show(
    console: Console,
    results: Sequence[SizeResult],
    trials: Sequence[Trial],
    left_out: Sequence[str],
    machine: dict[str, Any],
    pairs: int,
) -> None:
    """Print one table a size, the table of damage, what was left out, and the aims."""
    for result in results:
        print_table(console, _stalls(result))
    console.print(
        "Stall: extra time of the training thread over the checkpoint's step and the next one, against the pairs of "
        "steps before and after it; until durable: the same over all steps that began before it was durable. Medians "
        f"of {pairs} with 95% bootstrap intervals. *: its files are not forced to the disk; durable is when it calls "
        "them complete. Host memory: peak above training alone, its own processes included, in copies of the state."
    )
    if machine["device"]["kind"] == CUDA:
        console.print(
            "A step ends when the GPU has computed it; copies on other streams go on. Memcpy: from the GPU into pinned "
            "memory. Pinned memory that the driver maps by itself may be missing in the figures of host memory."
        )
    print_table(console, _damage(trials))
    console.print(
        "Each file of a checkpoint was damaged in turn, in the middle, and the state restored from the files alone. "
        "Verified: the checkpoint before it came back; unharmed: the right one did; error: an exception."
    )
    for trial in trials:
        if trial.error is not None:
            console.print(f"{trial.name} could not be run: {trial.error}", style="yellow", markup=False)
    if left_out:
        console.print(f"Left out, not installed: {', '.join(left_out)}. In a checkout: {INSTALL}", markup=False)
    console.print(f"{machine_text(machine)}, torch threads: {machine['torch_threads']}")
    for result in results:
        _aims(console, result)


def _aims(console: Console, result: SizeResult) -> None:
    for aim, met in result.aims().items():
        console.print(f"{verdict(met)}  {aim}")
    if result.unsettled:
        console.print(f"      {result.size}: the interval holds {RATIO_AIM}, so that this median settles nothing")


def _stalls(result: SizeResult) -> Table:
    title = (
        f"{result.size} of training state ({result.state_bytes:,} bytes); step {result.step_seconds * 1000:.0f} ms; "
        f"memcpy {interval_text(result.memcpy, MILLISECONDS, 1)} ms"
    )
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("method", min_width=19)
    for heading in (
        "stall,\nmemcpys",
        "stall,\nms",
        "until durable,\nms",
        "durable after,\nms",
        "host memory,\ncopies",
    ):
        table.add_column(heading, justify="right")
    for method in result.methods:
        table.add_row(
            method.name,
            interval_text(method.ratio, separator="\n"),
            interval_text(method.stall, MILLISECONDS, 1, "\n"),
            interval_text(method.until_durable, MILLISECONDS, 0, "\n"),
            interval_text(method.durable_seconds, MILLISECONDS, 0, "\n") + ("" if method.forced else " *"),
            f"{method.host_memory_bytes / result.state_bytes:.1f}\n({method.host_memory_bytes / MEGABYTE:.0f} MB)",
            style="bold" if method.name == "cpsr" else None,
        )
    return table


def _damage(trials: Sequence[Trial]) -> Table:
    table = Table(title="What comes back from a damaged checkpoint", title_justify="left")
    table.add_column("method", min_width=19)
    for damage in DAMAGES:
        table.add_column(damage)
    for trial in trials:
        if trial.error is None:
            table.add_row(
                trial.name,
                *(_answers(trial, damage) for damage in DAMAGES),
                style="bold" if trial.name == "cpsr" else None,
            )
        else:
            table.add_row(trial.name, *("could not be run" for _ in DAMAGES))
    return table


def _answers(trial: Trial, damage: str) -> str:
    """Answers with their number of files, where there is more than one file."""
    answers = trial.answers(damage)
    if sum(answers.values()) == 1:
        return next(iter(answers))
    return ", ".join(f"{answer} ({count})" for answer, count in answers.items())


def figures(
    results: list[SizeResult], trials: dict[str, Trial], left_out: list[str], pairs: int, sizes: Sequence[Size]
) -> dict[str, Any]:
    """Plain data for the JSON file."""
    return {
        "pairs": pairs,
        "jobs": [asdict(size) for size in sizes],
        "results": [result.to_json() for result in results],
        "trials": [asdict(trial) | {"verifies": trial.verifies} for trial in trials.values()],
        "left_out": left_out,
    }
