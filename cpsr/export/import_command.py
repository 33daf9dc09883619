"""`cpsr import`: another tool's checkpoint as a new run, which the user's job goes on with on any number of ranks."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from cpsr.errors import CheckpointError, ConfigError
from cpsr.export.foreign import ForeignState, write_run
from cpsr.export.from_dcp import read_dcp
from cpsr.export.from_deepspeed import read_deepspeed
from cpsr.export.from_universal import read_universal

__all__ = ["SOURCES", "run_import"]

SOURCES: Mapping[str, Callable[[Path], ForeignState]] = {
    "universal": read_universal,
    "dcp": read_dcp,
    "deepspeed": read_deepspeed,
}


def run_import(source: Path, run_dir: Path, format_: str | None) -> list[str]:
    """Make a run directory of a checkpoint; the source is only read, and nothing in it is executed.

    Args:
        source: directory of the checkpoint.
        run_dir: of the run that is made, not there yet.
        format_: one of `SOURCES`; None: seen from the files.

    Returns:
        What was imported and what begins anew, one line each.

    Raises:
        ConfigError: an argument is not usable.
        CheckpointError: the source is not whole or cannot be read, or the run could not be written.
        UnsupportedEngineError: the source holds what cannot be imported; the message names it.
    """
    if format_ is not None and format_ not in SOURCES:
        raise ConfigError(f"unknown format {format_!r}; known are {', '.join(SOURCES)}")
    if os.path.lexists(run_dir):
        raise ConfigError(f"{run_dir} is there already, and nothing is ever overwritten; name another --run-dir")
    if not source.is_dir():
        raise ConfigError(f"{source} is no directory")
    kind = format_ or _format_of(source)
    state = SOURCES[kind](source)
    if not state.parameters:
        raise CheckpointError(f"{source} holds no parameter with optimizer state. Nothing was written")
    write_run(state, f"{source.absolute()} ({kind})", run_dir)
    return _said(state, source, kind, run_dir)


def _format_of(source: Path) -> str:
    if (source / ".metadata").exists():
        return "dcp"
    if (source / "latest_universal").exists() or (source / "zero").is_dir():
        return "universal"
    if (source / "latest").exists() or list(source.glob("*_model_states.pt")):
        return "deepspeed"
    raise ConfigError(
        f"{source} is of no known format ({', '.join(SOURCES)}); name the directory with .metadata, latest_universal, "
        "latest or *_model_states.pt"
    )


def _said(state: ForeignState, source: Path, kind: str, run_dir: Path) -> list[str]:
    counted = ", ".join(f"{key} {value}" for key, value in state.counters.items()) or f"iteration {state.iteration}"
    moments = sorted({moment for one in state.parameters.values() for moment in one.moments})
    lines = [
        f"{source} ({kind}): {run_dir}, iteration {state.iteration}; start the job with this run_dir, on any number of "
        "ranks",
        f"{len(state.parameters)} parameters with {', '.join(moments) or 'no moments'}; {counted}; {len(state.groups)} "
        f"parameter groups; {len(state.outside)} tensors outside the optimizer",
    ]
    if not state.schedule:
        lines.append("no learning-rate schedule is in it: that of the job begins anew")
    lines.append("random states, the position in the data and registered objects begin anew")
    return lines
