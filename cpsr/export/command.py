"""`cpsr export`: one checkpoint in another format, put in place at once or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cpsr.checkpoint.files import make_directory, sync_directory, write_tensors
from cpsr.errors import ConfigError, SaveError
from cpsr.export.dcp import write_dcp
from cpsr.export.universal import write_universal
from cpsr.export.whole_checkpoint import Precision, WholeState, open_whole, state_dict

__all__ = ["FORMATS", "run_export", "write_state_dict"]

FORMATS = ("universal", "dcp", "safetensors")

_DIRECTORIES: dict[str, Callable[[WholeState, Path], list[str]]] = {"universal": write_universal, "dcp": write_dcp}


def run_export(run_dir: Path, out: Path, format_: str, dtype: str, iteration: int | None) -> list[str]:
    """Export one committed checkpoint; the run's directory is only read.

    Args:
        run_dir: the run; it may be training.
        out: what is written, not there yet: a directory for `universal` and `dcp`, a file for `safetensors`.
        format_: one of `FORMATS`.
        dtype: `fp32` or `trained`, for `safetensors`.
        iteration: of the checkpoint; None is the newest whole one.

    Returns:
        What was exported, one line each.

    Raises:
        ConfigError: an argument is not usable, `out` is there already or lies in the run's directory.
        SaveError: it could not be written; nothing is left at `out`.
        CPSRError: see `open_whole`.
    """
    precision = _checked(run_dir, out, format_, dtype)
    state = open_whole(run_dir, iteration, moments=format_ in _DIRECTORIES)
    try:
        make_directory(out.parent)
        write = _DIRECTORIES.get(format_)
        lines = write_state_dict(state, out, precision) if write is None else _write_directory(state, out, write)
    except OSError as error:
        raise SaveError(f"{out} could not be written ({error}); nothing is left there") from error
    manifest = state.saved.manifest
    origin = f", {manifest.label}" if manifest.label else ""
    return [f"checkpoint {manifest.iteration} of {run_dir} ({manifest.world_size} ranks{origin}): {out}", *lines]


def _checked(run_dir: Path, out: Path, format_: str, dtype: str) -> Precision:
    if format_ not in FORMATS:
        raise ConfigError(f"unknown format {format_!r}; known are {', '.join(FORMATS)}")
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already, and nothing is ever overwritten; name another --out, or remove it")
    if out.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"{out} lies in the run's own directory {run_dir}, which is the run's alone; name another")
    if dtype == "trained":
        return "trained"
    if dtype == "fp32":
        return "fp32"
    raise ConfigError(f"unknown dtype {dtype!r}; known are fp32 and trained")


def _write_directory(state: WholeState, out: Path, write: Callable[[WholeState, Path], list[str]]) -> list[str]:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        lines = write(state, temporary)
        if os.path.lexists(out):  # a rename would replace an empty directory that came meanwhile
            raise SaveError(f"{out} has appeared meanwhile; nothing was written over it")
        temporary.rename(out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return lines


def write_state_dict(state: WholeState, path: Path, precision: Precision) -> list[str]:
    """Write the file: under a temporary name, read back, then renamed. Takes host memory for all weights.

    Args:
        state: the checkpoint.
        path: the file, not there yet; its directory exists.
        precision: see `state_dict`.

    Returns:
        What was written and what was not, one line each.

    Raises:
        SaveError: the file system refused, or what was read back differs; nothing is left at `path`.
        CheckpointCorruptError, UnsupportedEngineError: see `WholeState`.
    """
    tensors = state_dict(state, precision)
    # Readers of model files look for this format.
    write_tensors(path, tensors, metadata={"format": "pt"})
    sync_directory(path.parent)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    lines = [f"{len(tensors)} tensors of the state dict ({', '.join(kinds)})"]
    if state.identity.module.extra:
        lines.append(f"without the module's extra state, which is not saved: {', '.join(state.identity.module.extra)}")
    return lines
