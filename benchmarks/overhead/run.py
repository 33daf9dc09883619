"""`cpsr bench overhead`: what the wrapper costs on steps without a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import interval_text, progress_bar, save, verdict, warnings_only, work_directory
from cpsr.benchmarks.overhead import launch, torch_job
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, Pair
from cpsr.benchmarks.overhead.plot import draw
from cpsr.benchmarks.overhead.result import OVERHEAD_AIM, VariantResult, summarise

__all__ = ["main"]

RUNS = 4  # jobs started anew: what differs from start to start must show
VARIANTS = {
    "torch, one process": torch_job.run,
    f"DeepSpeed ZeRO-1, {launch.RANKS} ranks": launch.run,
}
PERCENT = 100.0


def main(json_path: Path | None = None, pairs: int = 30, workdir: Path | None = None, runs: int = RUNS) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
        pairs: blocks with and without the wrapper, per run; rounded up to an even number, as the order alternates.
        workdir: holds the runs' directories; by default a temporary one.
        runs: jobs per variant.

    Raises:
        CPSRError: a job failed.
    """
    console = Console()
    pairs += pairs % 2
    measured: dict[str, list[list[Pair]]] = {variant: [] for variant in VARIANTS}
    with work_directory(workdir) as directory, warnings_only(console), progress_bar(console) as progress:
        machine = describe_machine(directory)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        task = progress.add_task("runs", total=runs * len(VARIANTS))
        for number in range(runs):
            for index, (variant, run) in enumerate(VARIANTS.items()):
                run_directory = directory / f"run-{number}-{index}"
                run_directory.mkdir()
                measured[variant].append(run(run_directory, pairs))
                progress.advance(task)
    results = [summarise(variant, measured[variant]) for variant in VARIANTS]
    _show(console, results, machine, pairs, runs)
    if json_path is not None:
        plot = save(json_path, _report(results, measured, machine, pairs), draw(results, machine))
        console.print(f"figures: {json_path}   plot: {plot}")


def _report(
    results: list[VariantResult], measured: dict[str, list[list[Pair]]], machine: dict[str, Any], pairs: int
) -> dict[str, Any]:
    return {
        "benchmark": "overhead",
        "machine": machine,
        "pairs": pairs,
        "block_steps": BLOCK_STEPS,
        "results": [result.to_json() for result in results],
        "samples": {variant: [[asdict(pair) for pair in run] for run in runs] for variant, runs in measured.items()},
    }


def _show(console: Console, results: list[VariantResult], machine: dict[str, Any], pairs: int, runs: int) -> None:
    table = Table(title="Wrapper overhead on steps without a checkpoint", title_justify="left")
    for heading in ("job", "step, ms", "overhead, % of a step", "medians of the runs, %", "aim"):
        table.add_column(heading)
    for result in results:
        table.add_row(
            result.variant,
            f"{result.step_seconds * 1000:.1f}",
            interval_text(result.overhead, PERCENT),
            "  ".join(f"{PERCENT * median:+.2f}" for median in sorted(result.run_medians)),
            f"{verdict(result.met)}  below {OVERHEAD_AIM:.0%}",
        )
    console.print(table)
    console.print(
        f"Blocks of {BLOCK_STEPS} steps with the wrapper, without, without, with; {runs} runs of {pairs} pairs. "
        "Medians with 95% bootstrap intervals."
    )
    console.print(f"{machine['cpu_model']}, {machine['cores']} cores, torch threads: {machine['torch_threads']}")
