"""The committed checkpoints of one rank as the series that a predictor reads: memory-mapped, piece by piece.

Of a checkpoint that another number of ranks saved, the rank's slices are put together from the files of those.
"""

import hashlib
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from cpsr.checkpoint.catalogue import CheckpointInfo, scan_in_pieces, warn_once
from cpsr.checkpoint.loading import operator_record
from cpsr.checkpoint.manifest import (
    FileRecord,
    Manifest,
    OperatorRecord,
    RankManifest,
    experts_taken_at,
    file_name,
    holds_weights,
)
from cpsr.checkpoint.ranges import MissingRanges
from cpsr.checkpoint.tensor_file import MappedTensors
from cpsr.checkpoint.verify import (
    DamagedFileError,
    check_in_pieces,
    files_left_to,
    map_tensors,
    open_tensors,
    read_manifest,
    read_rank_manifest,
)
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import HistoryEntry
from cpsr.state.shard import Shard

__all__ = ["AssembledTensors", "DiskHistory", "FoundSlices", "Piece", "RankSlices", "ReadManifest", "find_slices"]


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
            for start, stop in missing[name].take(one.offset, one.numel) if own.is_cut_as(one) else ():
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


# Between two yields: half a millisecond.
OPERATORS_AT_ONCE = 256


class _Slice(NamedTuple):
    global_shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class ReadManifest:
    """The part of a rank's manifest that stays in memory; the whole takes 2 kB an operator. Checkpoints share slices.

    Attributes:
        sha256: of the manifests with the rank's slices: its own, or all where another number of ranks saved it.
        entry: the checkpoint.
        slices: operator -> its slice.
        taken_at: operators that were taken before the entry -> iteration.
        places: operators outside the rank's common file -> name of their file.
        expert_files: hashes of the experts' files, which later checkpoints may carry.
        pieces: where another number of ranks saved it: operator -> where its slice lies in their files.
    """

    sha256: str
    entry: HistoryEntry
    slices: Mapping[str, _Slice]
    taken_at: Mapping[str, int]
    places: Mapping[str, str]
    expert_files: frozenset[str] = frozenset()
    pieces: Mapping[str, tuple[Piece, ...]] | None = None


class _Left(NamedTuple):
    """Operators that another rank wrote, and its files of weights that hold them."""

    files: Mapping[str, FileRecord]
    operators: Collection[str]


@dataclass(frozen=True)
class _Checkpoint:
    read: ReadManifest
    file: MappedTensors | AssembledTensors  # nothing is read before it is asked for
    experts: Mapping[str, MappedTensors]  # the files of the operators that are not in that one

    @classmethod
    def opened(cls, read: ReadManifest, directory: Path, rank: int) -> "_Checkpoint":
        """Map its files; CheckpointError where one is missing, or none of tensors."""
        if read.pieces is not None:
            return cls(read, AssembledTensors(directory, read.pieces), {})
        own = {name: map_tensors(directory / name) for name in set(read.places.values())}
        file = map_tensors(directory / file_name(rank, "params"))
        return cls(read, file, {operator: own[name] for operator, name in read.places.items()})

    @property
    def iteration(self) -> int:
        return self.read.entry.iteration

    def weights(self, operator: str, start: int, stop: int) -> torch.Tensor:
        if isinstance(self.file, AssembledTensors):
            return self.file.read(operator, start, stop)
        return self.experts.get(operator, self.file).flat(f"param/{operator}")[start:stop]


class DiskHistory:
    """`cpsr.predictor.protocol.History` over full and thinned checkpoints.

    Opening reads each weights file once to check its hash; damaged or unreadable checkpoints are left out, and logged
    once. Time and learning rate of an entry are `cumulative_learning_rate` and `learning_rate` of its
    scalars.

    Args:
        store_directory: `CheckpointStore.directory`.
        part: the rank whose part is read, of checkpoints by as many ranks as there are; or what it owns: then it is put
            together from checkpoints of another number of ranks, too.
        before: only checkpoints of earlier iterations; None is all.
        since: only checkpoints of this iteration and later ones.
        known: iteration -> what this process has read of that checkpoint before (`DiskHistory.known`): where its
            manifest is the same, neither that nor the weights are read again to check them.
        opened: False opens no checkpoint yet: `open` does it piece by piece.

    Attributes:
        excluded: iteration -> why that checkpoint is left out.

    Raises:
        ValueError: `store_directory` is the run's directory and not its `checkpoints`.
    """

    def __init__(
        self,
        store_directory: Path,
        part: int | RankSlices,
        before: int | None = None,
        since: int = 0,
        known: Mapping[int, ReadManifest] | None = None,
        *,
        opened: bool = True,
    ) -> None:
        if (store_directory / "checkpoints").is_dir():
            raise ValueError(f"{store_directory} is the run's directory; the history reads its 'checkpoints'")
        self.excluded: dict[int, str] = {}
        self._directory = store_directory
        self._known = known or {}
        self._range = since, math.inf if before is None else before
        self._owned = part if isinstance(part, RankSlices) else None
        self._rank = part.rank if isinstance(part, RankSlices) else part
        self._checkpoints: list[_Checkpoint] = []
        self._hashed: set[tuple[int, int, str]] = set()
        self._operators: dict[str, _Slice] = {}
        if opened:
            for _ in self.open():
                pass

    def open(self) -> Iterator[None]:
        """Open the checkpoints, once.

        Every `next` reads a manifest (6 ms for 1000 operators), or 4 MiB of weights to check their hash, or takes some
        operators over.
        """
        since, end = self._range
        catalogue = yield from scan_in_pieces(self._directory)
        for problem in [*catalogue.problems, *catalogue.unreadable]:
            if problem.iteration is not None and since <= problem.iteration < end:
                self._exclude(problem.iteration, f"{problem.file}: {problem.what}")
        for info in catalogue.checkpoints:
            if since <= info.iteration < end:
                yield from self._add(info)
                yield
        self._operators = self._common_operators()

    @property
    def known(self) -> dict[int, ReadManifest]:
        """Iteration -> what was read of the entry's manifest."""
        return {checkpoint.iteration: checkpoint.read for checkpoint in self._checkpoints}

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """Ascending in iteration, without repeats."""
        return [checkpoint.read.entry for checkpoint in self._checkpoints]

    @property
    def operators(self) -> Sequence[str]:
        """Operators that every entry holds with the newest entry's shape and split."""
        return list(self._operators)

    def numel(self, operator: str) -> int:
        """Elements of the operator's slice on this rank."""
        return self._operators[operator].numel

    def taken_at(self, operator: str, entry: int) -> int:
        """Iteration at which the operator was taken in that entry."""
        checkpoint = self._checkpoints[entry]
        return checkpoint.read.taken_at.get(operator, checkpoint.iteration)

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` of the operator in that entry: 1-D float32; a view of the file where it is float32.

        Raises:
            IndexError: the range is not within the slice.
        """
        if not 0 <= start <= stop <= self.numel(operator):
            raise IndexError(f"{operator} has {self.numel(operator)} elements, asked for [{start}, {stop})")
        if start == stop:
            return torch.empty(0, device="cpu")
        return self._checkpoints[entry].weights(operator, start, stop).float()

    def keep(self, iterations: Collection[int]) -> None:
        """Leave out every other checkpoint: ranks must predict from the same ones."""
        for checkpoint in self._checkpoints:
            if checkpoint.iteration not in iterations:
                self._exclude(checkpoint.iteration, "it does not belong here, or another rank cannot read it")
        self._checkpoints = [item for item in self._checkpoints if item.iteration in iterations]
        self._operators = self._common_operators()

    def close(self) -> None:
        """Unmap the files."""
        for _ in self.close_in_pieces():
            pass

    def close_in_pieces(self) -> Iterator[None]:
        """`close`, where every `next` unmaps the files of one checkpoint."""
        while self._checkpoints:
            self._checkpoints.pop()  # with the last view of its files the map goes
            yield

    def _add(self, info: CheckpointInfo) -> Iterator[None]:
        owned = self._owned
        try:
            manifest = read_manifest(info.directory)
            other_size = owned is not None and manifest.world_size != owned.ranks
            if not other_size and self._rank >= manifest.world_size:
                raise CheckpointError(f"was saved by {manifest.world_size} ranks, this is rank {self._rank}")
            hashes = [manifest.ranks[rank].sha256 for rank in (sorted(manifest.ranks) if other_size else [self._rank])]
            sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
            read = self._known.get(info.iteration)
            if read is None or read.sha256 != sha256:
                found = self._find(info, manifest, owned) if other_size and owned else self._read(info, manifest)
                read = replace((yield from found), sha256=sha256)
            self._checkpoints.append(_Checkpoint.opened(read, info.directory, self._rank))
        except (CheckpointError, SafetensorError, OSError) as error:
            self._exclude(info.iteration, str(error))

    def _find(
        self, info: CheckpointInfo, manifest: Manifest, slices: RankSlices
    ) -> Generator[None, None, ReadManifest]:
        """Find this rank's slices in the other ranks' files, and verify these."""
        found = yield from find_slices(info.directory, manifest, slices)
        if found.sparse:
            raise CheckpointError(f"{manifest.world_size} ranks saved it, with operators of different iterations")
        for name, file in found.files.items():
            yield from self._check(info.directory / name, file)
        own = {name: slices.operators[name] for name in found.pieces}
        cut = {name: _Slice(one.global_shape, one.offset, one.numel) for name, one in own.items()}
        return ReadManifest("", _entry(found.record), self._shared(cut), {}, {}, pieces=found.pieces)

    def _read(self, info: CheckpointInfo, manifest: Manifest) -> Generator[None, None, ReadManifest]:
        """Read and verify this rank's part."""
        directory = info.directory
        record = read_rank_manifest(directory, manifest, self._rank)
        yield
        path = directory / file_name(self._rank, "params")
        if path.name not in record.files:
            raise DamagedFileError(path, "is not listed in its manifest")
        checked = {word for one in self._known.values() for word in one.expert_files}
        files = {name: file for name, file in record.files.items() if holds_weights(name)}
        left = _left_to_others(directory, manifest, record)
        files |= {name: file for other in left for name, file in other.files.items()}
        for name, file in files.items():
            if file.xxh3_128 not in checked:  # else it is carried from a checkpoint that was verified
                yield from self._check(directory / name, file)
        places = yield from _places(directory, record)
        for other in left:
            places |= yield from _held_in(directory, other.files, other.operators)
        absent = {f"param/{name}" for name in record.operators.keys() - places.keys()} - _names(path)
        if absent:
            raise DamagedFileError(path, f"lacks {min(absent)}, which its manifest lists")
        yield
        entry = _entry(record)
        slices = yield from self._slices(record)
        taken_at = {name: one.iteration for name, one in record.operators.items() if one.iteration != record.iteration}
        # Only carried files can be known already: another rank's common file is new in every checkpoint.
        carried = (name for name in places.values() if experts_taken_at(name) is not None)
        words = frozenset(files[name].xxh3_128 for name in carried)
        return ReadManifest("", entry, slices, taken_at, places, words)

    def _check(self, path: Path, record: FileRecord) -> Iterator[None]:
        """Compare a file with its hash, once where checkpoints carry it along."""
        found = path.stat()
        known = found.st_dev, found.st_ino, record.xxh3_128
        if known not in self._hashed:
            yield from check_in_pieces(path, record)
            self._hashed.add(known)

    def _slices(self, record: RankManifest) -> Generator[None, None, Mapping[str, _Slice]]:
        """Slices by operator; checkpoints with equal slices share one mapping."""
        slices: dict[str, _Slice] = {}
        for name, one in record.operators.items():
            slices[name] = _Slice(one.global_shape, one.offset, one.numel)
            if len(slices) % OPERATORS_AT_ONCE == 0:
                yield
        return self._shared(slices)

    def _shared(self, slices: dict[str, _Slice]) -> Mapping[str, _Slice]:
        before = self._checkpoints[-1].read.slices if self._checkpoints else None
        return slices if before is None or before != slices else before

    def _exclude(self, iteration: int, reason: str) -> None:
        self.excluded[iteration] = reason
        warn_once(self._directory, f"checkpoint {iteration} is left out of the prediction: {reason}")

    def _common_operators(self) -> dict[str, _Slice]:
        if not self._checkpoints:
            return {}
        different = list({id(item.read.slices): item.read.slices for item in self._checkpoints}.values())
        newest = self._checkpoints[-1].read.slices
        common = {
            name: operator for name, operator in newest.items() if all(one.get(name) == operator for one in different)
        }
        known = {name for one in different for name in one}
        if left_out := sorted(known - common.keys()):
            message = f"operators that are new, gone or changed in shape cannot be predicted: {left_out}"
            warn_once(self._directory, message)
        return common


def _left_to_others(directory: Path, manifest: Manifest, record: RankManifest) -> list[_Left]:
    """The operators in other ranks' files."""
    found: list[_Left] = []
    for writer, operators in record.by_writer().items():
        files = files_left_to(directory, manifest, writer, operators.values())
        found.append(_Left({name: file for name, file in files.items() if holds_weights(name)}, operators.keys()))
    return found


def _held_in(directory: Path, files: Iterable[str], operators: Iterable[str]) -> Generator[None, None, dict[str, str]]:
    """Operators -> the one of these files that holds it; yields after every file."""
    found: dict[str, str] = {}
    for name in files:
        names = _names(directory / name)
        found |= {operator: name for operator in operators if f"param/{operator}" in names}
        yield
    return found


def _places(directory: Path, record: RankManifest) -> Generator[None, None, dict[str, str]]:
    """Operators outside the common file -> name of their file; yields after every file."""
    found: dict[str, str] = {}
    for taken_at, operators in record.by_iteration().items() if record.sparse else ():
        name = file_name(record.rank, "params", taken_at)
        if name in record.files:
            found |= yield from _held_in(directory, [name], operators)
    return found


def _names(path: Path) -> set[str]:
    """Tensors in a file."""
    with open_tensors(path) as file:
        return set(file.keys())


def _entry(record: RankManifest) -> HistoryEntry:
    """The entry; CheckpointError with what its scalars lack."""
    scalars = record.scalars if isinstance(record.scalars, dict) else {}
    numbers: list[float] = []
    for key in ("cumulative_learning_rate", "learning_rate"):
        value = scalars.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"its scalars hold no finite {key!r} (found {value!r})")
        numbers.append(float(value))
    return HistoryEntry(record.iteration, numbers[0], numbers[1])
