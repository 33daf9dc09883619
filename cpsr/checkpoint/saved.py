"""A committed checkpoint: what its ranks have saved, as slabs, and their small states."""

import hashlib
import resource
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from cpsr.checkpoint.assemble import Piece, Slab, assemble, wanted_of
from cpsr.checkpoint.manifest import (
    COMMIT,
    FileRecord,
    FrozenRecord,
    Kind,
    Listing,
    Manifest,
    OperatorRecord,
    RankManifest,
    TensorRecord,
    dtype_name,
    rank_manifest_name,
    slab_name,
    slab_path,
    writer_of,
)
from cpsr.checkpoint.ranges import SlabFile, WantedRange
from cpsr.checkpoint.replicated import state_hash
from cpsr.checkpoint.verify import DamagedFileError, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import SCALARS, decode
from cpsr.state.shard import OperatorState, Shard

__all__ = ["FileSlab", "SavedCheckpoint", "fingerprint", "operator_record", "piece_of", "places_of", "tensor_record"]

RECORDS_AT_ONCE = 8  # manifests of thousands of operators take megabytes
OTHER_FILES = 512  # that the process may have open

_PARAMS: tuple[Kind, Kind] = ("params", "expert-params")
_MOMENTS: tuple[Kind, Kind] = ("moments", "expert-moments")

_Kept = tuple[str, Piece, str | None]  # key, piece, and name of the slab; None: it is in the small state


@dataclass(frozen=True)
class FileSlab:
    """A file of a checkpoint, with what of it belongs to a rank's part; see `cpsr.checkpoint.assemble.Slab`."""

    file: SlabFile
    rank: int
    pieces: Mapping[str, Piece]

    def read(self, wanted: Sequence[WantedRange]) -> int:
        """See `cpsr.checkpoint.assemble.Slab.read`."""
        return self.file.read(wanted)


@dataclass(frozen=True)
class _MovedSlab:
    """Parameters outside the optimizer whose values are in a rank's small state, which is read when they are wanted."""

    saved: "SavedCheckpoint"
    rank: int
    pieces: Mapping[str, Piece]

    def read(self, wanted: Sequence[WantedRange]) -> int:
        values = self.saved.small_state(self.rank, ["frozen", "moved"])
        for one in wanted:
            name = one.key.removeprefix("frozen/")
            if name not in values:
                path = self.saved.directory / rank_manifest_name(self.rank, self.saved.manifest.save)
                raise DamagedFileError(path, f"its scalars lack the frozen parameter {name}")
            one.target.copy_(values[name].reshape(-1)[one.start : one.start + one.target.numel()])
        return 0


class SavedCheckpoint:
    """A committed checkpoint; manifests of ranks are read when they are asked for.

    Args:
        directory: of the checkpoint.
        manifest: its commit record; read where neither that nor its listing is given.
        records: how many ranks' manifests are kept at a time; None: all.
        listing: of its commit record, which is then read when it is asked for.

    Attributes:
        directory: where it lies.
        listing: of its commit record.

    Raises:
        CheckpointCorruptError: its commit record or its manifest is damaged, and in every method: a rank's manifest.
        UnreadableFileError: the file system refuses to give them now.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest | None = None,
        records: int | None = RECORDS_AT_ONCE,
        listing: Listing | None = None,
    ) -> None:
        self._files: dict[str, SlabFile] = {}
        self._records: dict[int, RankManifest] = {}
        self._limit = records
        self.directory = directory
        self._manifest = read_manifest(directory) if manifest is None and listing is None else manifest
        self.listing = listing or self.manifest.listing

    @property
    def manifest(self) -> Manifest:
        """Its commit record; DamagedFileError where another save has replaced it."""
        if self._manifest is None:
            found = read_manifest(self.directory)
            if found.save != self.listing.save:
                raise DamagedFileError(self.directory / COMMIT, "was replaced by another save")
            self._manifest = found
        return self._manifest

    @property
    def iteration(self) -> int:
        """Iteration of the state."""
        return self.listing.save.iteration

    @property
    def full(self) -> bool:
        """False for thinned checkpoints; training can restart exactly from full ones only."""
        return not self.listing.weights_only

    def for_one_reader(self) -> Self:
        """The same checkpoint: the manifests that are read through it go with it, and do not stay in a list."""
        return type(self)(self.directory, self._manifest, listing=self.listing)

    def record(self, rank: int) -> RankManifest:
        """One rank's manifest."""
        if rank not in self._records:
            while self._limit is not None and len(self._records) >= self._limit:
                del self._records[next(iter(self._records))]
            self._records[rank] = read_rank_manifest(self.directory, self.manifest, rank)
        return self._records[rank]

    def hold(self, names: Collection[str]) -> None:
        """Open these files now: what deletes the checkpoint later does not disturb its reader.

        They are closed with this object and its slabs. The process's limit of open files is raised where it is too low
        for them.

        Raises:
            CheckpointCorruptError, UnreadableFileError: one is missing, or cannot be opened now.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(names) + OTHER_FILES
        if soft < wanted and soft != resource.RLIM_INFINITY:
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        listed = self.manifest.files
        for name in names:
            self._file(name, listed[name]).hold()

    def beginning_with(self, rank: int) -> list[int]:
        """All ranks, this one first."""
        return [rank, *(other for other in range(self.manifest.world_size) if other != rank)]

    def slabs(self, ranks: Iterable[int]) -> Iterator[Slab]:
        """All that belongs to these ranks' parts, in this order, also where another rank has written it.

        A rank's manifest is read when its slabs are asked for.
        """
        for rank in ranks:
            record = self.record(rank)
            files: dict[str, dict[str, Piece]] = {}
            small: dict[str, Piece] = {}
            for key, piece, file in places_of(record):
                (small if file is None else files.setdefault(file, {}))[key] = piece
            for file, pieces in files.items():
                yield FileSlab(self.file(record, file), rank, pieces)
            if small:
                yield _MovedSlab(self, rank, small)

    def load(self, rank: int, into: Shard, frozen: Mapping[str, Piece] | None = None) -> Any:
        """Copy one rank's part into the views of `into`, with the iteration of each operator; return the small state.

        Args:
            rank: whose part.
            into: views to be written.
            frozen: the engine's parameters outside the optimizer, which are only compared.

        Raises:
            RunMismatchError: the operators or buffers differ from those that were saved; `into` is as it was.
            CheckpointCorruptError, UnreadableFileError: see `SlabFile.read`; `into` holds anything.
        """
        record, wanted = self.record(rank), wanted_of(into)
        _require_same(self.directory, record, {key: one.piece for key, one in wanted.items()} | dict(frozen or {}))
        assemble(self.slabs([rank]), wanted, self.directory)
        for name, one in into.operators.items():
            into.operators[name] = replace(one, iteration=record.operators[name].iteration)
        return self.small_state(rank)

    def small_state(self, rank: int, branch: Sequence[str] = ()) -> Any:
        """A rank's small state, or one branch of it, without reading the rest.

        Raises:
            CheckpointError: that rank saved no such branch.
        """
        record, path = self.record(rank), self.directory / rank_manifest_name(rank, self.manifest.save)
        found = record.scalars
        for key in branch:
            if not isinstance(found, dict) or key not in found:
                raise CheckpointError(f"{self.directory}: rank {rank} saved no {'.'.join(branch)}")
            found = found[key]
        tensors = self.file(record, slab_name(rank, "extra", record.save)).tensors(".".join([SCALARS, *branch]))
        try:
            return decode(found, tensors)
        except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise DamagedFileError(path, f"its scalars cannot be decoded: {error!r}") from error

    def file(self, record: RankManifest, name: str) -> SlabFile:
        """A file of a rank's part; where another rank wrote it, perhaps without the hashes of its MiB.

        The commit checked that the rank wrote what it was left, so its manifest, which may be large, is not read.
        """
        writer = writer_of(name)
        for one in (record, self._records.get(writer)):
            if one is not None and name in one.files:
                return self._file(name, one.files[name])
        path = self.directory / rank_manifest_name(record.rank, record.save)
        if writer == record.rank:
            raise DamagedFileError(path, f"lists {sorted(record.files)}, not {name}")
        listed = self.manifest.ranks.get(writer)
        if listed is None or name not in listed.files:
            raise DamagedFileError(path, f"leaves {name} to rank {writer}, of which that is not described")
        return self._file(name, listed.files[name])

    def _file(self, name: str, record: FileRecord) -> SlabFile:
        found = self._files.setdefault(name, SlabFile(slab_path(self.directory, name), record))
        if record.pieces is not None:
            found.record = record
        return found


def places_of(record: RankManifest, prefix: str = "") -> Iterator[_Kept]:
    """All tensors of a rank's part but those of the small state; or weights alone, of the prefix `param/`."""
    for name, one in record.operators.items():
        yield f"param/{name}", _piece(one, one.dtype), _slab_of(record, one, _PARAMS)
    for name, one in record.operators.items() if not prefix else ():
        for moment, described in one.moments.items():
            dtype, _, size = described.partition("[")
            piece = _piece(one, dtype)
            if size:  # the whole parameter's, by row or by block
                piece = Piece((int(size[:-1]),), _dtype(dtype), 0, int(size[:-1]))
            yield f"moment/{moment}/{name}", piece, _slab_of(record, one, _MOMENTS)
    for name, other in record.others.items() if not prefix else ():
        piece = Piece(other.shape, _dtype(other.dtype), 0, prod(other.shape))
        yield f"other/{name}", piece, slab_name(record.rank, "extra", record.save)
    for name, frozen in record.frozen.items() if not prefix else ():
        yield f"frozen/{name}", piece_of(frozen), frozen.file


def _slab_of(record: RankManifest, one: OperatorRecord, kinds: tuple[Kind, Kind]) -> str:
    """The slab with an operator, by its kinds for all and for experts."""
    writer = record.rank if one.saved_by is None else one.saved_by
    save = record.save._replace(iteration=one.iteration) if one.apart else record.save
    return slab_name(writer, kinds[bool(one.apart)], save)


def _piece(one: OperatorRecord, dtype: str) -> Piece:
    return Piece(one.global_shape, _dtype(dtype), one.offset, one.numel, one.block)


def piece_of(frozen: FrozenRecord) -> Piece:
    """The piece that a rank has of a parameter outside the optimizer."""
    return Piece(frozen.whole_shape, _dtype(frozen.dtype), frozen.offset or 0, prod(frozen.shape), frozen.block)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise RunMismatchError(
            f"{name!r}, in which a tensor was saved, is no type of tensors of torch {torch.__version__}: use the torch "
            "that the run had. Nothing was changed"
        )
    return found


def _require_same(directory: Path, record: RankManifest, wanted: Mapping[str, Piece]) -> None:
    saved = {key: piece for key, piece, _ in places_of(record)}
    for key in [*wanted, *saved]:
        if saved.get(key) != wanted.get(key):
            name = key.partition("/")[2]
            changed = {f"{kind}/{name}" for kind in ("param", "frozen")} <= wanted.keys() | saved.keys()
            why = " A weight that begins or ceases to train makes another run." if changed else ""
            raise RunMismatchError(
                f"{directory} is of another model, another optimizer or another split over ranks; the first difference "
                f"is {key}: saved was {saved.get(key, 'nothing of that name')}, this job has "
                f"{wanted.get(key, 'nothing of that name')}.{why} Nothing was changed; use the model and the optimizer "
                "it was saved from, or another run_dir"
            )


def operator_record(operator: OperatorState, xxh3_128: str | None = None, *, apart: bool = False) -> OperatorRecord:
    """An operator's record for the manifest.

    Args:
        operator: as it is written.
        xxh3_128: its hash, where other ranks hold it, too.
        apart: see `OperatorRecord`.
    """
    moments = {}
    for moment, values in operator.moments.items():
        size = "" if values.numel() == operator.parameter.numel else f"[{values.numel()}]"
        moments[moment] = f"{dtype_name(values.dtype)}{size}"
    return OperatorRecord(
        global_shape=operator.parameter.global_shape,
        offset=operator.parameter.offset,
        numel=operator.parameter.numel,
        dtype=dtype_name(operator.parameter.values.dtype),
        iteration=operator.iteration,
        moments=moments,
        xxh3_128=xxh3_128,
        block=operator.parameter.block,
        apart=apart or None,
    )


def fingerprint(operators: Iterable[OperatorState], *, values: bool = False) -> str:
    """Hash of names, types and slices in their order, to be compared; and of the values on the host, if they count."""
    described = [
        (one.name, str(operator_record(replace(one, iteration=0)).described), state_hash(one) if values else None)
        for one in operators
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def tensor_record(tensor: torch.Tensor) -> TensorRecord:
    """A buffer's record for the manifest."""
    return TensorRecord(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
