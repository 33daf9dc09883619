"""`cpsr bench stall`: what a checkpoint costs the training thread, side by side with other ways to save."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.stall.job import SIZES, Size
from cpsr.benchmarks.stall.measure import measure_methods
from cpsr.benchmarks.stall.methods import Cpsr
from cpsr.benchmarks.stall.plot import draw
from cpsr.benchmarks.stall.report import figures, show
from cpsr.benchmarks.stall.result import summarise
from cpsr.benchmarks.stall.rivals import warnings_of_rivals_only
from cpsr.benchmarks.stall.roster import ROSTER, Entry, installed
from cpsr.benchmarks.stall.trial import try_method
from cpsr.demo.device import CPU
from cpsr.errors import CPSRError

__all__ = ["main"]


def main(
    json_path: Path | None = None,
    pairs: int = 30,
    workdir: Path | None = None,
    sizes: Sequence[Size] = SIZES,
    roster: Sequence[Entry] = ROSTER,
    device: str = CPU,
) -> None:
    """Measure, print the tables, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
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
        show(call.console, results, list(trials.values()), left_out, call.machine, pairs)
        call.leave(figures(results, trials, left_out, pairs, sizes), draw(results, call.machine))
