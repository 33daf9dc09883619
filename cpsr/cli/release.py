"""`cpsr release`: frees host memory that a run has left on this machine."""

from pathlib import Path

from cpsr.checkpoint.file_lock import FileInUseError
from cpsr.checkpoint.memory_owners import HeldRun, free_orphans, free_run
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import ConfigError, CPSRError, RunMismatchError

__all__ = ["release_orphans", "release_run"]


def release_run(run_dir: Path) -> str:
    """Free what the run of a directory has left on this machine; one sentence reports how much.

    Raises:
        RunMismatchError: the directory holds no run.
        ConfigError: it cannot be read.
        CPSRError: a process uses it; nothing was freed.
    """
    try:
        found = run_id(run_dir)
    except RunMismatchError as error:
        raise RunMismatchError(
            f"{error}. `cpsr release --orphans` frees what runs whose directory is gone have left in {SHARED_MEMORY}, "
            "and lists memory of unknown runs"
        ) from error
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be read as a run directory ({error}); nothing was freed") from error
    try:
        freed = free_run(found, SHARED_MEMORY)
    except FileInUseError as error:
        raise CPSRError(f"the memory of {run_dir} is in use, and was not freed: {error}. End that first") from error
    return f"{run_dir}: {_megabytes(freed)} of host memory are free again; its checkpoints are untouched"


def release_orphans() -> list[str]:
    """Free what runs have left whose directory is gone, and list what stays all the same, with the way to free it."""
    found = [_line(run) for run in free_orphans(SHARED_MEMORY)]
    return found or [f"{SHARED_MEMORY} holds nothing of a run that is gone"]


def _line(run: HeldRun) -> str:
    name = f"run {run.run_id}" if run.owner is None else f"run {run.run_id} of {run.owner.run_dir}"
    if run.standing == "freed":
        return f"{name}: {_megabytes(run.bytes)} of host memory are free again: {run.why}"
    kept = f"{name}: {_megabytes(run.bytes)} are kept"
    if run.standing == "in use":
        return f"{kept}: {run.why}"
    why = run.why if run.owner is None else f"unknown whether it is gone: {run.why}; it ran on {run.owner.node}"
    return f"{kept}, {why}. Where no job needs it any more: rm {SHARED_MEMORY}/cpsr-{run.run_id}-*"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
