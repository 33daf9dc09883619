"""Which of the recovery benchmark's measurements a call asks for."""

from pathlib import Path

from cpsr.benchmarks.harness.processes import default_workers
from cpsr.benchmarks.recovery import failures as failures_run
from cpsr.benchmarks.recovery import run as grid_run
from cpsr.benchmarks.recovery import warm_up as warm_up_run
from cpsr.benchmarks.recovery.grid import Selection
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.errors import ConfigError

__all__ = ["run_recovery"]


def run_recovery(
    selection: Selection,
    failures: int | None = None,
    warm_up: bool = False,
    cache: Path | None = None,
    json_path: Path | None = None,
    workers: int | None = None,
) -> None:
    """The grid, or the one measurement that is asked for instead.

    Args:
        selection: what to measure it on.
        failures: follow runs that fail so often.
        warm_up: failures early in the run.
        cache: keeps what was trained; None: `runs/bench-recovery`.
        json_path: where the figures go, with the plots beside it.
        workers: processes, of one thread each; None: up to two, and one where a workload needs the GPU for itself.

    Raises:
        ConfigError: more than one measurement is asked for, or one does not fit its run.
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    if failures is not None and warm_up:
        raise ConfigError("--failures and --warm-up exclude each other: name one of them")
    kept = grid_run.CACHE if cache is None else cache
    alone = any(WORKLOADS[name].needs_gpu for name in selection.workloads)
    count = workers or (1 if alone else default_workers())
    if failures is not None:
        failures_run.main(selection, failures, kept, json_path, count)
    elif warm_up:
        warm_up_run.main(selection, kept, json_path, count)
    else:
        grid_run.main(selection, kept, json_path, count)
