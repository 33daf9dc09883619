"""A rank's slices of the weights, put together from the files of another number of ranks: mapped, read in pieces."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cpsr.checkpoint.loading import operator_record
from cpsr.checkpoint.manifest import FileRecord, Manifest, OperatorRecord, RankManifest, file_name
from cpsr.checkpoint.missing_ranges import MissingRanges
from cpsr.checkpoint.verify import map_tensors, read_rank_manifest
from cpsr.state.shard import Shard

__all__ = ["AssembledTensors", "FoundSlices", "Piece", "RankSlices", "find_slices", "same_cut"]


@dataclass(frozen=True)
class RankSlices:
    """What a rank of this job owns.

    Attributes:
        rank: which one.
        ranks: of the job.
        operators: operator -> its slice, as a manifest describes it.
    """

    rank: int
    ranks: int
    operators: Mapping[str, OperatorRecord]

    @classmethod
    def of(cls, rank: int, ranks: int, shard: Shard) -> "RankSlices":
        """Those of a shard."""
        return cls(rank, ranks, {name: operator_record(one) for name, one in shard.operators.items()})


class Piece(NamedTuple):
    """A range of a slice, in a file.

    Attributes:
        at: its first element in the slice.
        numel: its elements.
        file: name of the file.
        start: its first element in the file's tensor.
    """

    at: int
    numel: int
    file: str
    start: int


@dataclass(frozen=True)
class FoundSlices:
    """Where the slices of a rank lie in a checkpoint of other ranks.

    Attributes:
        pieces: operator -> its pieces in order; operators that the checkpoint does not have whole are absent.
        files: the files with these.
        sparse: whether any rank's operators are of different iterations.
        record: of the rank whose small state this one would take.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    files: Mapping[str, FileRecord]
    sparse: bool
    record: RankManifest


def same_cut(one: OperatorRecord, other: OperatorRecord) -> bool:
    """Whether both are ranges of one parameter, or the same block of it: other blocks are not taken apart."""
    if one.block is None or other.block is None:
        return one.block is other.block
    return (one.block, one.offset, one.numel) == (other.block, other.offset, other.numel)


def find_slices(directory: Path, manifest: Manifest, slices: RankSlices) -> Generator[None, None, FoundSlices]:
    """Find a rank's slices; yields after every manifest of a rank.

    Args:
        directory: the checkpoint.
        manifest: of all ranks.
        slices: of the rank that is to read it.

    Raises:
        CheckpointError: a manifest is damaged or cannot be read.
    """
    missing = {name: MissingRanges(one.offset, one.numel) for name, one in slices.operators.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in missing}
    files: dict[str, FileRecord] = {}
    sparse, first, taken = False, slices.rank % manifest.world_size, None
    for rank in [first, *(other for other in range(manifest.world_size) if other != first)]:
        record = read_rank_manifest(directory, manifest, rank)
        taken = taken or record
        sparse |= record.sparse
        file = file_name(rank, "params")
        for name, one in record.operators.items():
            own = slices.operators.get(name)
            if own is None or one.saved_by not in (None, rank) or own.global_shape != one.global_shape:
                continue
            for start, stop in missing[name].take(one.offset, one.numel) if same_cut(own, one) else ():
                pieces[name].append(Piece(start - own.offset, stop - start, file, start - one.offset))
                files[file] = record.files[file]
        yield
    whole = {name: tuple(sorted(found)) for name, found in pieces.items() if not missing[name].left}
    assert taken is not None
    return FoundSlices(whole, files, sparse, taken)


class AssembledTensors:
    """The weights of a rank's slices, in mapped files.

    Args:
        directory: the checkpoint, whose files were verified.
        pieces: see `FoundSlices`.

    Raises:
        CheckpointError: as `map_tensors`.
    """

    def __init__(self, directory: Path, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        names = {piece.file for found in pieces.values() for piece in found}
        self._files = {name: map_tensors(directory / name) for name in sorted(names)}
        self._pieces = pieces

    def read(self, operator: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a slice: 1-D, of the file's type; a view where one piece has all of them."""
        parts = []
        for piece in self._pieces[operator]:
            begin, end = max(start, piece.at), min(stop, piece.at + piece.numel)
            if begin < end:
                first = piece.start + begin - piece.at
                parts.append(self._files[piece.file].flat(f"param/{operator}")[first : first + end - begin])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
