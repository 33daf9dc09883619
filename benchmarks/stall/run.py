"""`cpsr bench stall`: what a checkpoint costs the training thread, side by side with other ways to save."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring
from cpsr.benchmarks.stall.job import SIZES, Size
from cpsr.benchmarks.stall.measure import measure_methods
from cpsr.benchmarks.stall.methods import Cpsr
from cpsr.benchmarks.stall.result import RATIO_AIM, SizeResult, summarise
from cpsr.benchmarks.stall.rivals import INSTALL, ROSTER, Entry, installed, warnings_of_rivals_only
from cpsr.benchmarks.stall.trial import DAMAGES, Trial, try_method
from cpsr.demo.device import CPU, CUDA
from cpsr.errors import CPSRError

__all__ = ["main"]

MILLISECONDS = 1000.0
MEGABYTE = 1e6


def main(
    json_path: Path | None = None,
    pairs: int = 30,
    workdir: Path | None = None,
    sizes: Sequence[Size] = SIZES,
    roster: Sequence[Entry] = ROSTER,
    device: str = CPU,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        pairs: checkpoints per method and size.
        workdir: on the file system to be measured; by default the one for temporary files.
        sizes: the training jobs; damage is done at the first.
        roster: the methods; those whose packages are not installed are left out, which is reported.
        device: `cpu` or `cuda`, which the jobs train on.

    Raises:
        CPSRError: a save failed or was skipped while it was timed, or CPSR itself could not be run; nothing is
            reported then.
    """
    warnings_of_rivals_only()
    left_out = [entry.name for entry in roster if not installed(entry)]
    entries = [entry for entry in roster if installed(entry)]
    sizes = [replace(size, device=device) for size in sizes]
    with measuring("stall", json_path, workdir, device=device) as call, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP on a single process is meant here
        warnings.filterwarnings("ignore", "The pynvml package is deprecated")  # comes with DLRover
        modules = [entry.modules[0] for entry in entries if entry.modules]
        call.machine["versions"] |= {module: version(module) for module in modules}
        step, trials = call.bar("damage, memory", len(entries)), {}
        for entry in entries:
            trials[entry.name] = try_method(entry, sizes, call.directory)
            step()
        if (error := trials[Cpsr.name].error) is not None:
            raise CPSRError(error)
        usable = [entry for entry in entries if trials[entry.name].error is None]
        step = call.bar("checkpoints", len(usable) * len(sizes) * (pairs + 1))
        measured = [measure_methods(size, usable, pairs, call.directory, step) for size in sizes]
        results = [summarise(size.name, samples, trials) for size, samples in zip(sizes, measured, strict=True)]
        _show(call, results, list(trials.values()), left_out, pairs)
        call.leave(_figures(results, trials, left_out, pairs, sizes))


def _show(
    call: Measurement,
    results: Sequence[SizeResult],
    trials: Sequence[Trial],
    left_out: Sequence[str],
    pairs: int,
) -> None:
    """One table a size, the table of damage, what was left out, and the aims."""
    console = call.console
    for result in results:
        _show_stalls(call, result)
    console.print(
        "Stall: extra time of the training thread over the checkpoint's step and the next one, against the pairs of "
        "steps before and after it; until durable: the same over all steps that began before it was durable. Medians "
        f"of {pairs} with 95% bootstrap intervals. *: its files are not forced to the disk; durable is when it calls "
        "them complete. Host memory: peak above training alone, its own processes included, in copies of the state."
    )
    if call.machine["device"]["kind"] == CUDA:
        console.print(
            "A step ends when the GPU has computed it; copies on other streams go on. Memcpy: from the GPU into pinned "
            "memory. Pinned memory that the driver maps by itself may be missing in the figures of host memory."
        )
    rows = [
        (trial.name, *("could not be run" if trial.error else _answers(trial, damage) for damage in DAMAGES))
        for trial in trials
    ]
    call.table("What comes back from a damaged checkpoint", ("method", *DAMAGES), rows)
    console.print(
        "Each file of a checkpoint was damaged in turn, in the middle, and the state restored from the files alone. "
        "Verified: the checkpoint before it came back; unharmed: the right one did; error: an exception."
    )
    for trial in trials:
        if trial.error is not None:
            console.print(f"{trial.name} could not be run: {trial.error}", style="yellow", markup=False)
    if left_out:
        console.print(f"Left out, not installed: {', '.join(left_out)}. In a checkout: {INSTALL}", markup=False)
    console.print(f"torch threads: {call.machine['torch_threads']}")
    for result in results:
        for aim, met in result.aims().items():
            call.judge(aim, met)
        if result.unsettled:
            console.print(f"      {result.size}: the interval holds {RATIO_AIM}, so that this median settles nothing")


def _show_stalls(call: Measurement, result: SizeResult) -> None:
    title = (
        f"{result.size} of training state ({result.state_bytes:,} bytes); step {result.step_seconds * 1000:.0f} ms; "
        f"memcpy {interval_text(result.memcpy, MILLISECONDS, 1)} ms"
    )
    rows = [
        (
            method.name,
            interval_text(method.ratio, separator="\n"),
            interval_text(method.stall, MILLISECONDS, 1, "\n"),
            interval_text(method.until_durable, MILLISECONDS, 0, "\n"),
            interval_text(method.durable_seconds, MILLISECONDS, 0, "\n") + ("" if method.forced else " *"),
            f"{method.host_memory_bytes / result.state_bytes:.1f}\n({method.host_memory_bytes / MEGABYTE:.0f} MB)",
        )
        for method in result.methods
    ]
    headings = ("method", "stall,\nmemcpys", "stall,\nms", "until durable,\nms", "durable after,\nms", "host memory")
    call.table(title, headings, rows)


def _answers(trial: Trial, damage: str) -> str:
    """Answers with their number of files, where there is more than one file."""
    answers = trial.answers(damage)
    if sum(answers.values()) == 1:
        return next(iter(answers))
    return ", ".join(f"{answer} ({count})" for answer, count in answers.items())


def _figures(
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
