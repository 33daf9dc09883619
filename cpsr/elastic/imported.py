"""Loads an imported checkpoint: whole tensors by name, of which each rank takes its part."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.loading import tensor_record
from cpsr.checkpoint.manifest import Manifest, RankManifest, file_name
from cpsr.checkpoint.resharding import load_resharded, read_small_state
from cpsr.checkpoint.verify import read_rank_manifest, read_tensors
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.evaluation import capture_random_states
from cpsr.errors import RunMismatchError
from cpsr.state.scalars import Scalars
from cpsr.state.shard import Shard

__all__ = ["load_imported"]

logger = logging.getLogger(__name__)


def load_imported(adapter: EngineAdapter, directory: Path, manifest: Manifest, into: Shard) -> dict[str, Any]:
    """Fill the views of `into` and return the small state; parameters outside the optimizer go into the engine.

    Random states, the position in the data and buffers that were not imported stay the job's own.

    Args:
        adapter: of this rank.
        directory: the checkpoint, whole.
        manifest: of its only rank.
        into: views of host memory to be written.

    Raises:
        RunMismatchError: it lacks what this job has, or has it in another form; `into` holds anything.
        CheckpointCorruptError, UnreadableFileError: as `load_resharded`.
        UnsupportedEngineError: the optimizer keeps other state than was imported.
    """
    scalars = Scalars.from_tree(read_small_state(directory, manifest, 0))
    engine = adapter.resharded(scalars.engine)
    record = read_rank_manifest(directory, manifest, 0)
    own = adapter.shard()
    load_resharded(directory, manifest, into)
    _read_outside(directory, record, into, own)
    _keep_buffers(into, own, record, quiet=adapter.rank != 0)
    found = replace(scalars, history_start=scalars.iteration + 1, engine=engine, rng=capture_random_states(adapter))
    return found.to_tree()


def _read_outside(directory: Path, record: RankManifest, into: Shard, own: Shard) -> None:
    """Take the buffers and frozen parameters that the checkpoint has."""
    targets = {**own.frozen, **into.others}
    absent = sorted(own.frozen.keys() - record.others.keys())
    if absent:
        raise RunMismatchError(
            f"{directory} was imported without the parameter {absent[0]} outside the optimizer. Nothing was changed; "
            "train it, or import a checkpoint that has it"
        )
    wanted = {name: targets[name] for name in record.others if name in targets}
    for name, target in wanted.items():
        if record.others[name] != (now := tensor_record(target)):
            raise RunMismatchError(
                f"{directory}: {name} was imported as {record.others[name]}, this rank has {now}. Nothing was "
                "changed; frozen parameters must be whole on each rank, and of the dtype that was saved"
            )

    def place(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device="cpu") if key.removeprefix("other/") in wanted else None

    file = file_name(0, "extra")
    found = read_tensors(directory / file, record.files[file], place) if wanted else {}
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(found[f"other/{name}"])


def _keep_buffers(into: Shard, own: Shard, record: RankManifest, *, quiet: bool) -> None:
    kept = sorted(own.others.keys() - record.others.keys())
    for name in kept:
        into.others[name].copy_(own.others[name])
    if kept and not quiet:
        logger.warning("the import holds no %s: buffers keep the values that this job gave them", ", ".join(kept))
