"""A rank's part of a checkpoint that another number of ranks saved: read by ranges, each byte from one file.

No rank holds more than its own part and the buffer of `cpsr.checkpoint.ranges`. Frozen weights are taken by their hash
where a rank had the same part of them, else by ranges, too.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.loading import SCALARS, decoded_scalars, operator_record, tensor_record
from cpsr.checkpoint.manifest import (
    FileRecord,
    FrozenRecord,
    Manifest,
    OperatorRecord,
    RankManifest,
    file_name,
    holds_frozen,
    rank_manifest_name,
)
from cpsr.checkpoint.ranges import MissingRanges, WantedRange, read_ranges
from cpsr.checkpoint.verify import DamagedFileError, read_rank_manifest, read_tensors
from cpsr.errors import RunMismatchError
from cpsr.state.frozen_parameters import word_of
from cpsr.state.shard import OperatorState, Shard

__all__ = ["load_buffers", "load_resharded", "load_resharded_frozen", "read_small_state"]

_KEPT = "nothing was changed; start with as many ranks as the run had, or use another run_dir"


class _Wanted(MissingRanges):
    """The ranges of one operator that are still to be read."""

    def __init__(self, operator: OperatorState) -> None:
        super().__init__(operator.parameter.offset, operator.parameter.numel)
        self.operator = operator
        self.record = operator_record(operator)


def load_resharded(directory: Path, manifest: Manifest, into: Shard) -> int:
    """Copy this rank's weights and moments out of the files of all ranks that saved the checkpoint.

    Args:
        directory: the checkpoint, whole.
        manifest: of all ranks.
        into: views of host memory to be written, contiguous.

    Returns:
        The bytes that were read from the disk, whole pieces.

    Raises:
        CheckpointCorruptError: a file is damaged; `into` holds anything.
        UnreadableFileError: the file system refuses to give a file now; `into` holds anything.
        RunMismatchError: the checkpoint has not all that this rank needs, or it is split in a way that cannot be dealt
            to another number of ranks; `into` holds anything.
    """
    read = 0
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
                read += read_ranges(directory / file, record.files[file], ranges)
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
    if not wanted.record.is_cut_as(record):
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


def load_resharded_frozen(
    directory: Path, manifest: Manifest, saved_by: int, files: FrozenFiles, saved: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Give the engine its settled parameters, and return what a snapshot of this rank would have of all of them.

    Where the rank `saved_by` had the same part of a parameter, that is taken by its hash. Of others each rank reads the
    ranges that it needs, from whichever ranks had them.

    Args:
        directory: the checkpoint, whole.
        manifest: of all ranks.
        saved_by: the rank whose small state is taken.
        files: of this rank.
        saved: what that small state has of them, as `FrozenWeights.state`.

    Raises:
        CheckpointCorruptError: a file is damaged or missing; the engine's parameters hold anything.
        UnreadableFileError: the file system refuses to give it now; likewise.
        RunMismatchError: a parameter was split in a way that cannot be dealt, or it is not known how; nothing was
            changed.
    """
    weights, record = files.weights, read_rank_manifest(directory, manifest, saved_by)
    weights.present(())  # takes the engine's views anew
    own = {name: files.described(name) for name in weights.tensors}
    alike = {name for name, one in own.items() if name in record.frozen and record.frozen[name].described == one}
    parts = {name: _Part(name, weights.tensors[name], one) for name, one in own.items() if name not in alike}
    described = _find(directory, manifest, parts) if parts else {}
    files.load(directory, saved_by, only=alike)
    if alike == own.keys() == record.frozen.keys():
        return saved
    weights.forget(parts)
    _read(directory, manifest, parts, described)
    values = {name: part.finished() for name, part in parts.items()}
    moved = {name: one for name, one in saved.get("moved", {}).items() if name in alike}
    moved |= {name: one for name, one in values.items() if parts[name].moved}
    settled = [name for name in own if name not in moved]
    return {"word": word_of(weights.present(settled)), "moved": moved}


class _Part:
    """This rank's part of one parameter, put together from parts of other ranks.

    Attributes:
        settled: pieces in files: file, first element in the tensor there, and range here.
        moved: pieces in small states: rank, first element there, and range here.
    """

    def __init__(self, name: str, tensor: torch.Tensor, own: FrozenRecord) -> None:
        self.name = name
        self.settled: list[tuple[str, int, slice]] = []
        self.moved: list[tuple[int, int, slice]] = []
        self._tensor = tensor
        self._own = own
        self._offset = own.offset or 0
        self._missing = MissingRanges(self._offset, tensor.numel())
        self._flat: torch.Tensor | None = None

    def take(self, directory: Path, rank: int, saved: FrozenRecord) -> None:
        """Note what a rank's part has of the ranges that are left."""
        own = self._own
        if (saved.dtype, saved.whole_shape) != (own.dtype, own.whole_shape):
            raise RunMismatchError(
                f"{directory}: the parameter {self.name} outside the optimizer was saved by rank {rank} as "
                f"{saved.dtype} of shape {saved.whole_shape}, this job has {own.dtype} of shape {own.whole_shape}. "
                "Nothing was changed; use the model that it was saved from"
            )
        if saved.block != own.block or (own.block is not None and saved.offset != own.offset):
            return
        first = saved.offset or 0
        for start, stop in self._missing.take(first, math.prod(saved.shape)):
            here = slice(start - self._offset, stop - self._offset)
            if saved.file is None:
                self.moved.append((rank, start - first, here))
            else:
                self.settled.append((saved.file, start - first, here))

    def require_whole(self, directory: Path) -> None:
        """Raise RunMismatchError where no rank has some of it."""
        if self._missing.left:
            start, stop = self._missing.left[0]
            raise RunMismatchError(
                f"{directory}: no rank has saved elements {start} to {stop} of the parameter {self.name} outside the "
                "optimizer, as a range of rows or as the block that this rank has. Nothing was changed; start with as "
                "many ranks as the run had"
            )

    @property
    def flat(self) -> torch.Tensor:
        """Takes the elements: a view of the engine's, where these are settled and follow each other in memory."""
        if self._flat is None:
            tensor, direct = self._tensor, self._tensor.is_contiguous() and not self.moved
            self._flat = tensor.view(-1) if direct else torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        return self._flat

    def finished(self) -> torch.Tensor:
        """All values, which the engine has too if they are settled."""
        values = self.flat.view(self._tensor.shape)
        if not self.moved and not self._tensor.is_contiguous():
            with torch.no_grad():
                self._tensor.copy_(values)
        return values


def _find(directory: Path, manifest: Manifest, parts: Mapping[str, _Part]) -> dict[str, FileRecord]:
    """Find the ranges of every part, and return the records of all files."""
    files: dict[str, FileRecord] = {}
    for rank in range(manifest.world_size):
        record = read_rank_manifest(directory, manifest, rank)
        files |= {file: one for file, one in record.files.items() if holds_frozen(file)}
        for name, one in record.frozen.items():
            if name in parts:
                parts[name].take(directory, rank, one)
    for part in parts.values():
        part.require_whole(directory)
    return files


def _read(directory: Path, manifest: Manifest, parts: Mapping[str, _Part], described: Mapping[str, FileRecord]) -> None:
    """Read the ranges: each file once, and one file at a time on its way to a device."""
    for file in sorted({file for part in parts.values() for file, _, _ in part.settled}):
        if file not in described:
            raise DamagedFileError(directory / file, "is not described by the manifest of the rank that wrote it")
        ranges: list[WantedRange] = []
        targets: list[torch.Tensor] = []
        for part in parts.values():
            for start, here in [(start, here) for name, start, here in part.settled if name == file]:
                target = part.flat[here]
                room = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
                ranges.append(WantedRange(f"frozen/{part.name}", start, room))
                targets.append(target)
        read_ranges(directory / file, described[file], ranges)
        with torch.no_grad():
            for target, wanted in zip(targets, ranges, strict=True):
                if target is not wanted.target:
                    target.copy_(wanted.target)
    for rank in sorted({rank for part in parts.values() for rank, _, _ in part.moved}):
        values = read_small_state(directory, manifest, rank)["frozen"]["moved"]
        for part in parts.values():
            for start, here in [(start, here) for name, start, here in part.moved if name == rank]:
                part.flat[here] = values[part.name].reshape(-1)[start : start + here.stop - here.start]
