"""A rank's frozen weights of a checkpoint that another number of ranks saved; by ranges, where they are split."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import FileRecord, FrozenRecord, Manifest, holds_frozen
from cpsr.checkpoint.missing_ranges import MissingRanges
from cpsr.checkpoint.ranges import WantedRange, read_ranges
from cpsr.checkpoint.resharding import read_small_state
from cpsr.checkpoint.verify import DamagedFileError, read_rank_manifest
from cpsr.errors import RunMismatchError
from cpsr.state.frozen import word_of

__all__ = ["load_resharded_frozen"]


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
