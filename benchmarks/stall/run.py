"""`cpsr bench stall`: what a checkpoint costs the training thread, side by side with other ways to save."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import interval_text, progress_bar, save, verdict, warnings_only, work_directory
from cpsr.benchmarks.stall.job import SIZES, Job, Size
from cpsr.benchmarks.stall.measure import SizeSamples, measure_size
from cpsr.benchmarks.stall.methods import NEVER_ITERATIONS, Cpsr, Dcp, Method, TorchSave
from cpsr.benchmarks.stall.plot import draw
from cpsr.benchmarks.stall.result import RATIO_AIM, SizeResult, summarise
from cpsr.recovery import CPSRRecovery

__all__ = ["main"]

METHODS = 4
MILLISECONDS = 1000.0


def main(
    json_path: Path | None = None, pairs: int = 30, workdir: Path | None = None, sizes: Sequence[Size] = SIZES
) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
        pairs: checkpoints per method and size.
        workdir: on the file system to be measured; by default the one for temporary files.
        sizes: the training jobs.

    Raises:
        CPSRError: a save failed or was skipped; nothing is reported then.
    """
    console = Console()
    with work_directory(workdir) as directory, warnings_only(console), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP on a single process is meant here
        machine = describe_machine(directory)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        with progress_bar(console) as progress:
            task = progress.add_task("checkpoints", total=len(sizes) * METHODS * (pairs + 1))
            measured = [_measure(size, pairs, directory, lambda: progress.advance(task)) for size in sizes]
    results = [summarise(size.name, samples) for size, samples in zip(sizes, measured, strict=True)]
    _show(console, results, machine, pairs)
    if json_path is not None:
        figure = draw(results, machine)
        plot = save(json_path, _report(results, measured, machine, pairs, sizes), figure)
        console.print(f"figures: {json_path}   plot: {plot}")


def _measure(size: Size, pairs: int, parent: Path, on_block: Callable[[], None]) -> SizeSamples:
    job = Job(size)
    directory = parent / size.name.replace(" ", "-")
    directory.mkdir()
    with CPSRRecovery(job.adapter, _configuration(directory / "run")) as recovery:
        methods: list[Method] = [
            Cpsr(recovery),
            Dcp(job, directory, reuse_staging=False),
            Dcp(job, directory, reuse_staging=True),
            TorchSave(job, directory),
        ]
        assert len(methods) == METHODS
        return measure_size(job, methods, pairs, on_block)


def _configuration(run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "checkpoint": {
            "interval_iterations": NEVER_ITERATIONS,
            "final": False,
            "history_span_iterations": 0,  # as many as a real run would keep would only fill the disk
        },
    }


def _report(
    results: list[SizeResult], measured: list[SizeSamples], machine: dict[str, Any], pairs: int, sizes: Sequence[Size]
) -> dict[str, Any]:
    return {
        "benchmark": "stall",
        "machine": machine,
        "pairs": pairs,
        "jobs": [asdict(size) for size in sizes],
        "results": [result.to_json() for result in results],
        "samples": {result.size: asdict(samples) for result, samples in zip(results, measured, strict=True)},
    }


def _show(console: Console, results: list[SizeResult], machine: dict[str, Any], pairs: int) -> None:
    for result in results:
        console.print(_table(result))
    console.print(
        "Stall: extra time of the training thread over the checkpoint's step and the next one, against the pairs of "
        "steps before and after it; until durable: the same over all steps that began before it was durable. Medians "
        f"of {pairs} with 95% bootstrap intervals."
    )
    console.print(f"{machine['cpu_model']}, {machine['cores']} cores, torch threads: {machine['torch_threads']}")
    for result in results:
        for aim, met in result.aims().items():
            console.print(f"{verdict(met)}  {aim}")
        if result.unsettled:
            console.print(f"      {result.size}: the interval holds {RATIO_AIM}, so that this median settles nothing")


def _table(result: SizeResult) -> Table:
    title = (
        f"{result.size} of training state ({result.state_bytes:,} bytes); step {result.step_seconds * 1000:.0f} ms; "
        f"memcpy {interval_text(result.memcpy, MILLISECONDS, 1)} ms"
    )
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("method", min_width=19)
    for heading in ("stall,\nmemcpys", "stall,\nms", "until durable,\nms", "durable after,\nms"):
        table.add_column(heading, justify="right")
    for method in result.methods:
        table.add_row(
            method.name,
            interval_text(method.ratio, separator="\n"),
            interval_text(method.stall, MILLISECONDS, 1, "\n"),
            interval_text(method.until_durable, MILLISECONDS, 0, "\n"),
            interval_text(method.durable_seconds, MILLISECONDS, 0, "\n"),
            style="bold" if method.name == "cpsr" else None,
        )
    return table
