"""`cpsr bench stall`: what a checkpoint costs the training thread, side by side with other ways to save."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring
from cpsr.benchmarks.stall.job import SIZES, Size
from cpsr.benchmarks.stall.measure import measure_methods
from cpsr.benchmarks.stall.methods import Cpsr
from cpsr.benchmarks.stall.result import SizeResult, summarise
from cpsr.benchmarks.stall.rivals import INSTALL, ROSTER, Entry, installed, warnings_of_rivals_only
from cpsr.benchmarks.stall.trial import Trial, try_method
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

    `sizes` are of the jobs; of `roster` what is not installed is left
    out, and reported.

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
        step, trials = call.bar("memory", len(entries)), {}
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
        errors = {name: trial.error for name, trial in trials.items() if trial.error is not None}
        plain = {"jobs": [asdict(size) for size in sizes], "results": [result.to_json() for result in results]}
        call.leave({"pairs": pairs, **plain, "not_run": errors, "left_out": left_out})


def _show(
    call: Measurement,
    results: Sequence[SizeResult],
    trials: Sequence[Trial],
    left_out: Sequence[str],
    pairs: int,
) -> None:
    """One table a size, what was left out, and the aims."""
    console = call.console
    for result in results:
        _show_stalls(call, result)
    console.print(
        "Stall: extra time of the training thread over the checkpoint's step and the next one, against the pairs of "
        "steps before and after it; until durable: the same over all steps that began before it was durable. Medians "
        f"of {pairs} with 95% bootstrap intervals. *: its files are not forced to the disk; durable is when it calls "
        "them complete. Processor: extra time of all threads of this process over the steps until durable. Host "
        "memory: peak above training alone, its own processes included, in copies of the state."
    )
    if call.machine["device"]["kind"] == CUDA:
        console.print(
            "A step ends when the GPU has computed it; copies on other streams go on. Memcpy: from the GPU into pinned "
            "memory. Pinned memory that the driver maps by itself may be missing in the figures of host memory."
        )
    for trial in trials:
        if trial.error is not None:
            console.print(f"{trial.entry.name} could not be run: {trial.error}", style="yellow", markup=False)
    if left_out:
        console.print(f"Left out, not installed: {', '.join(left_out)}. In a checkout: {INSTALL}", markup=False)
    console.print(f"torch threads: {call.machine['torch_threads']}")
    for result in results:
        call.judge(result.aims())


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
            interval_text(method.processor, MILLISECONDS, 0, "\n"),
            interval_text(method.durable_seconds, MILLISECONDS, 0, "\n") + ("" if method.forced else " *"),
            f"{method.host_memory_bytes / result.state_bytes:.1f}\n({method.host_memory_bytes / MEGABYTE:.0f} MB)",
        )
        for method in result.methods
    ]
    headings = (
        "method",
        "stall,\nmemcpys",
        "stall,\nms",
        "until durable,\nms",
        "processor,\nms",
        "durable after,\nms",
        "host memory",
    )
    call.table(title, headings, rows)
