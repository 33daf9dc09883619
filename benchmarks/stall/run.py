"""`cpsr bench stall`: what a checkpoint costs the training thread, side by side with other ways to save."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import progress_bar, save, warnings_only, work_directory
from cpsr.benchmarks.stall.job import SIZES, Job, Size
from cpsr.benchmarks.stall.measure import SizeSamples, measure_size
from cpsr.benchmarks.stall.methods import Cpsr
from cpsr.benchmarks.stall.plot import draw
from cpsr.benchmarks.stall.report import show
from cpsr.benchmarks.stall.result import SizeResult, summarise
from cpsr.benchmarks.stall.rivals import warnings_of_rivals_only
from cpsr.benchmarks.stall.roster import ROSTER, Entry, installed
from cpsr.benchmarks.stall.trial import Trial, try_method
from cpsr.errors import CPSRError

__all__ = ["main"]


def main(
    json_path: Path | None = None,
    pairs: int = 30,
    workdir: Path | None = None,
    sizes: Sequence[Size] = SIZES,
    roster: Sequence[Entry] = ROSTER,
) -> None:
    """Measure, print the tables, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
        pairs: checkpoints per method and size.
        workdir: on the file system to be measured; by default the one for temporary files.
        sizes: the training jobs; damage is done at the first.
        roster: the methods; those whose packages are not installed are left out, which is said.

    Raises:
        CPSRError: a save failed or was skipped while it was timed, or CPSR itself could not be run; nothing is
            reported then.
    """
    console = Console()
    warnings_of_rivals_only()
    left_out = [entry.name for entry in roster if not installed(entry)]
    entries = [entry for entry in roster if installed(entry)]
    with work_directory(workdir) as directory, warnings_only(console), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP on a single process is meant here
        warnings.filterwarnings("ignore", "The pynvml package is deprecated")  # comes with DLRover
        machine = describe_machine(directory)
        machine["versions"] |= {entry.modules[0]: version(entry.modules[0]) for entry in entries if entry.modules}
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        with progress_bar(console) as progress:
            task = progress.add_task("damage, memory, checkpoints", total=len(entries) * (1 + len(sizes) * (pairs + 1)))
            trials = _try_all(entries, sizes, directory, lambda: progress.advance(task))
            if (error := trials[Cpsr.name].error) is not None:
                raise CPSRError(error)
            usable = [entry for entry in entries if trials[entry.name].error is None]
            progress.update(task, total=len(entries) + len(usable) * len(sizes) * (pairs + 1))
            measured = [_measure(size, usable, pairs, directory, lambda: progress.advance(task)) for size in sizes]
    results = [summarise(size.name, samples, trials) for size, samples in zip(sizes, measured, strict=True)]
    show(console, results, list(trials.values()), left_out, machine, pairs)
    if json_path is not None:
        report = _report(results, measured, trials, left_out, machine, pairs, sizes)
        plot = save(json_path, report, draw(results, machine))
        console.print(f"figures: {json_path}   plot: {plot}")


def _try_all(
    entries: Sequence[Entry], sizes: Sequence[Size], directory: Path, on_trial: Callable[[], None]
) -> dict[str, Trial]:
    trials = {}
    for entry in entries:
        trials[entry.name] = try_method(entry, sizes, directory)
        on_trial()
    return trials


def _measure(
    size: Size, entries: Sequence[Entry], pairs: int, parent: Path, on_block: Callable[[], None]
) -> SizeSamples:
    job = Job(size)
    directory = parent / size.name.replace(" ", "-")
    with ExitStack() as opened:
        methods = []
        for number, entry in reversed(list(enumerate(entries))):  # CPSR last: its signal handlers go first
            home = directory / f"method-{number}"
            home.mkdir(parents=True)
            methods.append(opened.enter_context(entry.open(job, home)))
        return measure_size(job, methods, pairs, on_block)


def _report(
    results: list[SizeResult],
    measured: list[SizeSamples],
    trials: dict[str, Trial],
    left_out: list[str],
    machine: dict[str, Any],
    pairs: int,
    sizes: Sequence[Size],
) -> dict[str, Any]:
    return {
        "benchmark": "stall",
        "machine": machine,
        "pairs": pairs,
        "jobs": [asdict(size) for size in sizes],
        "results": [result.to_json() for result in results],
        "trials": [asdict(trial) | {"verifies": trial.verifies} for trial in trials.values()],
        "left_out": left_out,
        "samples": {result.size: asdict(samples) for result, samples in zip(results, measured, strict=True)},
    }
