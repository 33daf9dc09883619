"""A rank's part of a checkpoint that another number of ranks saved: read by ranges, each byte from one file.

No rank holds more than its own part and the buffer of `cpsr.checkpoint.ranges`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.assembled import same_cut
from cpsr.checkpoint.loading import SCALARS, decoded_scalars, operator_record, tensor_record
from cpsr.checkpoint.manifest import Manifest, OperatorRecord, RankManifest, file_name, rank_manifest_name
from cpsr.checkpoint.missing_ranges import MissingRanges
from cpsr.checkpoint.ranges import WantedRange, read_ranges
from cpsr.checkpoint.verify import DamagedFileError, read_rank_manifest, read_tensors
from cpsr.errors import RunMismatchError
from cpsr.state.shard import OperatorState, Shard

__all__ = ["ReadBytes", "load_buffers", "load_resharded", "read_small_state"]

_KEPT = "nothing was changed; start with as many ranks as the run had, or use another run_dir"


@dataclass
class ReadBytes:
    """What one rank has read of a checkpoint.

    Attributes:
        tensors: bytes of weights and moments that it holds.
        disk: bytes that were read for these, whole pieces.
    """

    tensors: int = 0
    disk: int = 0


class _Wanted(MissingRanges):
    """The ranges of one operator that are still to be read."""

    def __init__(self, operator: OperatorState) -> None:
        super().__init__(operator.parameter.offset, operator.parameter.numel)
        self.operator = operator
        self.record = operator_record(operator)


def load_resharded(directory: Path, manifest: Manifest, into: Shard) -> ReadBytes:
    """Copy this rank's weights and moments out of the files of all ranks that saved the checkpoint.

    Args:
        directory: the checkpoint, whole.
        manifest: of all ranks.
        into: views of host memory to be written, contiguous.

    Raises:
        CheckpointCorruptError: a file is damaged; `into` holds anything.
        UnreadableFileError: the file system refuses to give a file now; `into` holds anything.
        RunMismatchError: the checkpoint has not all that this rank needs, or it is split in a way that cannot be dealt
            to another number of ranks; `into` holds anything.
    """
    read = ReadBytes(sum(operator.state_bytes for operator in into.operators.values()))
    wanted = {name: _Wanted(one) for name, one in into.operators.items()}
    for rank in range(manifest.world_size):
        record = read_rank_manifest(directory, manifest, rank)
        _require_dense(directory, record)
        params: list[WantedRange] = []
        moments: list[WantedRange] = []
        for name, one in record.operators.items():
            if name in wanted and one.saved_by in (None, rank):
                _add_ranges(directory, wanted[name], one, params, moments)
        for kind, ranges in (("params", params), ("moments", moments)):
            if ranges:
                file = file_name(rank, kind)  # type: ignore[arg-type]
                read.disk += read_ranges(directory / file, record.files[file], ranges)
    for name, rest in wanted.items():
        if rest.left:
            start, stop = rest.left[0]
            raise RunMismatchError(
                f"{directory} has no elements {start} to {stop} of {name} on any of its {manifest.world_size} ranks, "
                f"as a range of rows or as the block that this rank has; {_KEPT}"
            )
    return read


def read_small_state(directory: Path, manifest: Manifest, rank: int) -> Any:
    """A rank's small state, verified.

    Args:
        directory: the checkpoint, whole.
        manifest: of all ranks.
        rank: of those that saved it.

    Raises:
        CheckpointCorruptError, UnreadableFileError: as `load_resharded`.
    """
    record = read_rank_manifest(directory, manifest, rank)
    tensors = _read_extra(directory, record, lambda key: key.startswith(SCALARS))
    return decoded_scalars(directory / rank_manifest_name(rank), record.scalars, tensors)


def load_buffers(directory: Path, manifest: Manifest, rank: int, into: Shard) -> None:
    """Copy the buffers out of the files of one rank; those that it did not have, of the first rank that had them.

    Args:
        directory: the checkpoint, whole.
        manifest: of all ranks.
        rank: of those that saved it.
        into: takes the buffers.

    Raises:
        CheckpointCorruptError, UnreadableFileError: as `load_resharded`.
        RunMismatchError: no rank had such a buffer.
    """
    left = {name: tensor_record(one) for name, one in into.others.items()}
    for saved_by in [rank, *(other for other in range(manifest.world_size) if other != rank)] if left else ():
        record = read_rank_manifest(directory, manifest, saved_by)
        here = {f"other/{name}": name for name, one in left.items() if record.others.get(name) == one}
        tensors = _read_extra(directory, record, here.__contains__) if here else {}
        with torch.no_grad():
            for key, name in here.items():
                into.others[name].copy_(tensors[key])
                del left[name]
        if not left:
            return
    if left:
        name = min(left)
        raise RunMismatchError(f"{directory}: no rank saved a buffer {name} like this job's ({left[name]}); {_KEPT}")


def _read_extra(directory: Path, record: RankManifest, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Tensors of a rank beside its weights and moments."""
    file = file_name(record.rank, "extra")
    if file not in record.files:
        raise DamagedFileError(directory / rank_manifest_name(record.rank), f"lists {sorted(record.files)}, not {file}")

    def place(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device="cpu") if wanted(key) else None

    return read_tensors(directory / file, record.files[file], place)


def _require_dense(directory: Path, record: RankManifest) -> None:
    if record.sparse:
        raise RunMismatchError(
            f"{directory} was saved with experts.policy: experts of different iterations are not dealt to another "
            f"number of ranks; {_KEPT}"
        )


def _add_ranges(
    directory: Path, wanted: _Wanted, record: OperatorRecord, params: list[WantedRange], moments: list[WantedRange]
) -> None:
    """Add what a rank's slice of an operator has of the ranges that are left."""
    operator = wanted.operator
    if not same_cut(wanted.record, record):
        return
    _require_same_kind(directory, wanted, record)
    for start, stop in wanted.take(record.offset, record.numel):
        here = slice(start - operator.parameter.offset, stop - operator.parameter.offset)
        there = start - record.offset
        params.append(WantedRange(f"param/{operator.name}", there, operator.parameter.values[here]))
        for moment, values in operator.moments.items():
            key = f"moment/{moment}/{operator.name}"
            if values.numel() == operator.parameter.numel:
                moments.append(WantedRange(key, there, values[here]))
            else:  # the whole parameter's, by row or by block; it comes with the first element
                moments += [WantedRange(key, 0, values)] if start == 0 else []


def _require_same_kind(directory: Path, wanted: _Wanted, record: OperatorRecord) -> None:
    for what in ("global_shape", "dtype", "moments"):
        then, here = getattr(record, what), getattr(wanted.record, what)
        if then != here:
            raise RunMismatchError(
                f"{directory}: {wanted.operator.name} was saved with {what} {then}, this rank has {here}; {_KEPT}"
            )
