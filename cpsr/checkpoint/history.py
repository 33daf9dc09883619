"""The committed checkpoints of one rank as the series that a predictor reads: memory-mapped, piece by piece.

Of a checkpoint that another number of ranks saved, the rank's slices are put together from the files of those.
"""

import hashlib
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from cpsr.checkpoint.assemble import Piece, pieces_of
from cpsr.checkpoint.catalogue import scan_in_pieces, warn_once
from cpsr.checkpoint.manifest import FileRecord, RankManifest, slab_path
from cpsr.checkpoint.ranges import MissingRanges
from cpsr.checkpoint.saved import SavedCheckpoint, places_of
from cpsr.checkpoint.verify import DamagedFileError, check_in_pieces, map_tensors, read_manifest
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import HistoryEntry
from cpsr.state.shard import Shard

__all__ = ["DiskHistory", "RankSlices", "ReadManifest"]


@dataclass(frozen=True)
class RankSlices:
    """What a rank of this job owns.

    Attributes:
        rank: which one.
        ranks: of the job.
        operators: operator -> its slice.
    """

    rank: int
    ranks: int
    operators: Mapping[str, Piece]

    @classmethod
    def of(cls, rank: int, ranks: int, shard: Shard) -> "RankSlices":
        """Those of a shard."""
        return cls(rank, ranks, {name: next(pieces_of(one))[1] for name, one in shard.operators.items()})


class PlacedRange(NamedTuple):
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


_Ranges = Mapping[str, tuple[PlacedRange, ...]]  # operator -> the ranges of its slice, in order

# Between two yields: half a millisecond.
OPERATORS_AT_ONCE = 256


@dataclass(frozen=True)
class ReadManifest:
    """The part of a checkpoint's manifests that stays in memory; a whole one takes 2 kB an operator.

    Attributes:
        sha256: of the manifests with the rank's slices: its own, or all where another number of ranks saved it.
        entry: the checkpoint.
        ranges: where the slices lie that it has whole; checkpoints share the mapping where it is the same.
        taken_at: operators that were taken before the entry -> iteration.
        slabs: names and hashes of those with the slices, which later checkpoints may list, too.
    """

    sha256: str
    entry: HistoryEntry
    ranges: _Ranges
    taken_at: Mapping[str, int]
    slabs: frozenset[tuple[str, str]]


class _Checkpoint:
    """A checkpoint whose files were verified, with the weights of a rank's slices mapped.

    Raises:
        CheckpointError: as `map_tensors`; or a file lacks what its manifest lists.
    """

    def __init__(self, directory: Path, manifest: ReadManifest) -> None:
        names = {one.file for found in manifest.ranges.values() for one in found}
        self._files = {name: map_tensors(slab_path(directory, name)) for name in sorted(names)}
        self.manifest = manifest
        for operator, found in manifest.ranges.items():
            for one in found:
                if f"param/{operator}" not in self._files[one.file]:
                    raise DamagedFileError(
                        slab_path(directory, one.file), f"lacks param/{operator}, which its manifest lists"
                    )

    @property
    def iteration(self) -> int:
        return self.manifest.entry.iteration

    def read(self, operator: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a slice: 1-D, of the file's type; a view where one range has all of them."""
        parts = []
        for one in self.manifest.ranges[operator]:
            begin, end = max(start, one.at), min(stop, one.at + one.numel)
            if begin < end:
                first = one.start + begin - one.at
                parts.append(self._files[one.file].flat(f"param/{operator}")[first : first + end - begin])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class DiskHistory:
    """`cpsr.predictor.protocol.History` over full and thinned checkpoints.

    Opening reads each weights file once to check its hash; damaged or unreadable checkpoints are left out, and logged
    once. Time and learning rate of an entry are `cumulative_learning_rate` and `learning_rate` of its
    scalars.

    Args:
        store_directory: `CheckpointStore.directory`.
        part: what the rank owns; of checkpoints by another number of ranks it is put together.
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
        part: RankSlices,
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
        self._part = part
        self._checkpoints: list[_Checkpoint] = []
        self._hashed = {slab for one in self._known.values() for slab in one.slabs}
        self._operators: list[str] = []
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
                # In an object of its own, with which the manifests that it has read go, megabytes each.
                yield from self._add(info.for_one_reader())
                yield
        self._operators = self._common_operators()

    @property
    def known(self) -> dict[int, ReadManifest]:
        """Iteration -> what was read of the entry's manifest."""
        return {checkpoint.iteration: checkpoint.manifest for checkpoint in self._checkpoints}

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """Ascending in iteration, without repeats."""
        return [checkpoint.manifest.entry for checkpoint in self._checkpoints]

    @property
    def operators(self) -> Sequence[str]:
        """The rank's operators that every entry holds whole."""
        return self._operators

    def numel(self, operator: str) -> int:
        """Elements of the operator's slice on this rank."""
        return self._part.operators[operator].numel

    def taken_at(self, operator: str, entry: int) -> int:
        """Iteration at which the operator was taken in that entry."""
        checkpoint = self._checkpoints[entry]
        return checkpoint.manifest.taken_at.get(operator, checkpoint.iteration)

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` of the operator in that entry: 1-D float32; a view of the file where it is float32.

        Raises:
            IndexError: the range is not within the slice.
        """
        if not 0 <= start <= stop <= self.numel(operator):
            raise IndexError(f"{operator} has {self.numel(operator)} elements, asked for [{start}, {stop})")
        if start == stop:
            return torch.empty(0, device="cpu")
        return self._checkpoints[entry].read(operator, start, stop).float()

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

    def _add(self, saved: SavedCheckpoint) -> Iterator[None]:
        part, listing = self._part, saved.listing
        words = listing.sha256(part.rank) if part.ranks == listing.world_size else listing.words
        sha256 = hashlib.sha256(words).hexdigest()
        try:
            read = self._known.get(saved.iteration)
            if read is None or read.sha256 != sha256:
                read = yield from self._read(saved, sha256)
            self._checkpoints.append(_Checkpoint(saved.directory, read))
        except (CheckpointError, SafetensorError, OSError) as error:
            if not isinstance(error, DamagedFileError) or _is_still(saved):
                self._exclude(saved.iteration, str(error))

    def _read(self, saved: SavedCheckpoint, sha256: str) -> Generator[None, None, ReadManifest]:
        """Find this rank's slices, and verify the files with them."""
        record = saved.record(self._part.rank % saved.manifest.world_size)
        yield
        ranges, files = yield from self._find(saved, record)
        for name, file in files.items():
            if (name, file.xxh3_128) not in self._hashed:  # else an earlier checkpoint lists it, too
                yield from check_in_pieces(slab_path(saved.directory, name), file)
                self._hashed.add((name, file.xxh3_128))
        entry = _entry(record)
        yield
        older = {name: one.iteration for name, one in record.operators.items() if one.iteration != record.iteration}
        taken_at = {name: at for name, at in older.items() if name in ranges}
        yield
        if self._checkpoints and self._checkpoints[-1].manifest.ranges == ranges:
            ranges = self._checkpoints[-1].manifest.ranges
        slabs = frozenset((name, file.xxh3_128) for name, file in files.items())
        return ReadManifest(sha256, entry, ranges, taken_at, slabs)

    def _find(
        self, saved: SavedCheckpoint, record: RankManifest
    ) -> Generator[None, None, tuple[_Ranges, Mapping[str, FileRecord]]]:
        """Where the slices lie that the checkpoint has whole, and the files with them.

        Yields after every manifest of a rank, and some operators.

        Raises:
            CheckpointError: a manifest is damaged or cannot be read, or another number of ranks saved experts of
                different iterations.
        """
        wanted, ranks = self._part.operators, saved.manifest.world_size
        foreign = self._part.ranks != ranks
        missing = {name: MissingRanges(one.start, one.numel) for name, one in wanted.items()}
        ranges: dict[str, list[PlacedRange]] = {name: [] for name in missing}
        cut_alike = set[str]()
        files: dict[str, FileRecord] = {}
        for other in saved.beginning_with(record.rank) if foreign else [record.rank]:
            saved_there = saved.record(other)
            if foreign and saved_there.sparse:
                raise CheckpointError(f"{ranks} ranks saved it, with operators of different iterations")
            for count, (key, piece, file) in enumerate(places_of(saved_there, "param/"), 1):
                own = wanted.get(name := key.removeprefix("param/"))
                if own is not None and file is not None and own.shape == piece.shape and own.is_cut_as(piece):
                    cut_alike.add(name)
                    for start, stop in missing[name].take(piece.start, piece.numel):
                        ranges[name].append(PlacedRange(start - own.start, stop - start, file, start - piece.start))
                        files[file] = saved.file(saved_there, file).record
                if count % OPERATORS_AT_ONCE == 0:
                    yield
            yield
        whole = (name for name in ranges if name in cut_alike and not missing[name].left)
        return {name: tuple(sorted(ranges[name])) for name in whole}, files

    def _exclude(self, iteration: int, reason: str) -> None:
        self.excluded[iteration] = reason
        warn_once(self._directory, f"checkpoint {iteration} is left out of the prediction: {reason}")

    def _common_operators(self) -> list[str]:
        if not self._checkpoints:
            return []
        different = {id(one.manifest.ranges): one.manifest.ranges for one in self._checkpoints}.values()
        common = [name for name in self._part.operators if all(name in one for one in different)]
        if left_out := sorted(self._part.operators.keys() - common):
            message = f"operators that are new, gone or changed in shape cannot be predicted: {left_out}"
            warn_once(self._directory, message)
        return common


def _is_still(saved: SavedCheckpoint) -> bool:
    """Whether a checkpoint is there as it was listed: retention did not delete it, nor another save replace it."""
    try:
        return read_manifest(saved.directory).save == saved.listing.save
    except CheckpointError as error:
        return not isinstance(error, DamagedFileError)


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
