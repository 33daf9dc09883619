"""Slabs of the parameters outside the optimizer, which one checkpoint writes and the later ones list.

::

    rank-00000.frozen-<hash of names and content>.safetensors

A slab has its name by its content. So a checkpoint, also the first one of another life, lists what an earlier one has
under that name, and writes what none has. Ranks with the same parameters share them out: the manifest of each names
the slab of any rank that has a parameter. What the loop writes into is in no slab (see
`cpsr.state.frozen_parameters`).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from cpsr.checkpoint.assemble import Wanted, assemble
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.files import write_tensors
from cpsr.checkpoint.manifest import (
    FileRecord,
    FrozenRecord,
    RankManifest,
    dtype_name,
    frozen_slab_name,
    slab_path,
    writer_of,
)
from cpsr.checkpoint.saved import SavedCheckpoint, piece_of
from cpsr.checkpoint.verify import check_file
from cpsr.errors import CheckpointError, SaveError
from cpsr.experts.sharding import adaptive_sharding
from cpsr.ranks.group import Group
from cpsr.state.frozen_parameters import FrozenPlace, FrozenWeights, hash_of, word_of

__all__ = ["FrozenFiles", "FrozenPart"]

_log = logging.getLogger(__name__)

# Of one file, unless a parameter is larger: so much of a GPU's parameters is on the host at a time, and a parameter
# that changes has so much written again.
FILE_BYTES = 1 << 30

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class FrozenPart:
    """What a checkpoint holds of a rank's parameters outside the optimizer.

    Attributes:
        scalars: the small state for the disk.
        records: parameter -> its record for the manifest.
        files: slabs that this rank lists, with what is in them.
        written_bytes: of those that are new.
    """

    scalars: Any
    records: dict[str, FrozenRecord] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    written_bytes: int = 0


class FrozenFiles:
    """The files of one rank, of this life and of earlier ones.

    `agree` belongs to the training thread, `write` to the writer's; loading happens while nothing is written.

    Args:
        weights: of the engine.
        rank: this one.
        checkpoints: the run's directory of them.
        places: of those that are split over ranks.

    Attributes:
        weights, places: as given.
    """

    def __init__(
        self,
        weights: FrozenWeights,
        rank: int,
        checkpoints: Path,
        places: Mapping[str, FrozenPlace] | None = None,
    ) -> None:
        self.weights = weights
        self.places = places or {}
        self._rank = rank
        self._checkpoints = checkpoints
        self._held: dict[str, tuple[str, str]] = {}  # parameter -> slab, and the hash that it has there
        self._agreed: dict[str, dict[str, str]] = {}  # own slabs that other ranks may name -> parameters and hashes
        self._durable: dict[str, FileRecord] = {}  # own slabs that are on the disk

    def agree(self, group: Group) -> None:
        """Share the parameters out among the ranks that hold the same, unless that holds already; a collective.

        Args:
            group: all ranks.
        """
        if group.all(self._is_agreed()):
            return
        moved = set(self.weights.moved())
        hashes = {name: one for name, one in self.weights.hashes.items() if name not in moved}
        words = group.gather(word_of(hashes) if hashes else None)
        alike = [rank for rank, word in enumerate(words) if word is not None and word == words[self._rank]]
        sizes = {name: self.weights.tensors[name].nbytes for name in sorted(hashes)}
        ranks = alike or [self._rank]
        held: dict[str, tuple[str, str]] = {}
        agreed: dict[str, dict[str, str]] = {}
        for rank, part in zip(ranks, adaptive_sharding(sizes, [0] * len(ranks)), strict=True):
            for names in self._in_files(part):
                content = {name: hashes[name] for name in names}
                file = frozen_slab_name(rank, word_of(content))
                held |= {name: (file, one) for name, one in content.items()}
                if rank == self._rank:
                    agreed[file] = content
        self._held, self._agreed = held, agreed

    def _is_agreed(self) -> bool:
        """Whether every parameter has a file, or moves, and every file that is not written yet can be."""
        moved, hashes = set(self.weights.moved()), self.weights.hashes
        unwritten = {name for file, content in self._agreed.items() if file not in self._durable for name in content}
        there = all(name in moved or self._held.get(name, ("", ""))[1] == hashes[name] for name in self.weights.tensors)
        return there and not unwritten & moved

    def _in_files(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The parameters for each file, in the engine's order."""
        wanted, size = set(names), 0
        found: list[str] = []
        for name, tensor in self.weights.tensors.items():
            if name not in wanted:
                continue
            if found and size + tensor.nbytes > FILE_BYTES:
                yield found
                found, size = [], 0
            found, size = [*found, name], size + tensor.nbytes
        if found:
            yield found

    def write(self, attempt: Attempt, scalars: Any) -> FrozenPart:
        """Write the slabs of a snapshot's parameters that no checkpoint has; the caller forces the directory.

        Args:
            attempt: of the save.
            scalars: of the snapshot.

        Raises:
            SaveError: a parameter was changed unseen, or rank 0 has abandoned the save; or as `write_tensors`.
            OSError: the file system refused.
        """
        state = scalars.get("frozen") if isinstance(scalars, dict) else None
        if not state:
            return FrozenPart(scalars)
        moved, tensors = state["moved"], self.weights.tensors
        self._refuse_altered([name for name in tensors if name not in moved])
        hashes = {name: one for name, one in self.weights.hashes.items() if name not in moved}
        rested = {name: hash_of(tensors[name]) for name in self.weights.resting(moved)}
        hashes |= {name: rested[name] for name in self.weights.resting(rested)}  # those are of the snapshot
        if lacking := sorted(tensors.keys() - moved.keys() - hashes.keys()):
            raise SaveError(f"the values that {lacking[0]!r}, outside the optimizer, had at the snapshot are not known")
        there = self._there(attempt.directory)
        held = {name: self._held[name][0] for name, one in hashes.items() if there.get(name) == one}
        own: dict[str, tuple[str, str]] = {}
        for names in self._in_files(hashes.keys() - held.keys()):
            file = frozen_slab_name(self._rank, word_of({name: hashes[name] for name in names}))
            own |= {name: (file, hashes[name]) for name in names}
        held |= {name: file for name, (file, _) in own.items()}
        files, written = self._put_files(attempt, held, hashes)
        self._held = self._held | own
        self.weights.settle_rested({name: one for name, one in rested.items() if name in hashes})
        left = {name: values for name, values in moved.items() if name not in hashes}
        records = {
            name: self.described(name).model_copy(update={"file": held.get(name), "xxh3_128": hashes.get(name)})
            for name in tensors
        }
        return FrozenPart({**scalars, "frozen": {"word": word_of(hashes), "moved": left}}, records, files, written)

    def described(self, name: str) -> FrozenRecord:
        """A parameter's record, without its values and where they are."""
        tensor, place = self.weights.tensors[name], self.places.get(name)
        where = {} if place is None else place._asdict()
        return FrozenRecord(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), **where)

    def _refuse_altered(self, names: list[str]) -> None:
        altered = self.weights.altered(names)
        if altered:
            raise SaveError(
                f"{len(altered)} parameters outside the optimizer (the first is {altered[0]!r}) were changed where "
                "torch does not count it, through .data: when, is not known, so that this checkpoint is not saved, and "
                "snapshots since the last one have their old values. From now on they are saved as they are; change "
                "them inside torch.no_grad() instead"
            )

    def _there(self, directory: Path) -> dict[str, str]:
        """Hashes of the parameters in slabs that ranks agreed on, and in own ones that retention has left."""
        own = {file for file, _ in self._held.values() if writer_of(file) == self._rank} - self._agreed.keys()
        gone = {file for file in own if not slab_path(directory, file).exists()}
        return {name: one for name, (file, one) in self._held.items() if file not in gone}

    def _put_files(
        self, attempt: Attempt, held: Mapping[str, str], hashes: Mapping[str, str]
    ) -> tuple[dict[str, FileRecord], int]:
        """List or write this rank's slabs; returns their records, and the bytes that were written."""
        wanted = {file: dict(content) for file, content in self._agreed.items()}
        for name, file in held.items():
            if writer_of(file) == self._rank:
                wanted.setdefault(file, {})[name] = hashes[name]
        earlier = _newest_first(self._checkpoints) if wanted.keys() - self._durable.keys() else []
        files, written = {}, 0
        for file, content in wanted.items():
            attempt.refuse_ended(self._rank)
            path = slab_path(attempt.directory, file)
            if not path.exists():  # retention was there
                self._durable.pop(file, None)
            record = self._durable.get(file) or _listed(earlier, path)
            if record is None:
                record = self._write(path, content)
                written += record.bytes
            files[file] = self._durable[file] = record
        return files, written

    def _write(self, path: Path, content: Mapping[str, str]) -> FileRecord:
        if path.name != frozen_slab_name(self._rank, word_of(content)):
            raise SaveError(
                f"{path} was there when this save began and is gone, and some of its parameters were written to since; "
                "the next checkpoint writes the others anew"
            )
        tensors = {}
        for name, xxh3_128 in content.items():
            tensors[f"frozen/{name}"] = self.weights.tensors[name].detach().contiguous().cpu()
            self._refuse_changed(path, name, tensors[f"frozen/{name}"], xxh3_128)
        record = write_tensors(path, tensors)
        for name, xxh3_128 in content.items():  # of the host these are no copies
            if not self.weights.tensors[name].is_cuda:
                self._refuse_changed(path, name, tensors[f"frozen/{name}"], xxh3_128)
        return record

    def _refuse_changed(self, path: Path, name: str, values: torch.Tensor, xxh3_128: str) -> None:
        """Raise SaveError where a parameter has other values than the file is to have; the file is then gone."""
        if hash_of(values) != xxh3_128:
            path.unlink(missing_ok=True)
            self.weights.forget([name])
            raise SaveError(
                f"{path}: the parameter {name!r} outside the optimizer was written to before its values were on "
                "the disk; from the next checkpoint on its values are saved as they are then"
            )

    # Loading

    def load(self, saved: SavedCheckpoint, saved_by: int | None = None, only: Collection[str] | None = None) -> None:
        """Bring the engine's settled parameters to those of a checkpoint; reads only what differs.

        Args:
            saved: the checkpoint.
            saved_by: the rank whose part is taken; None: this one's.
            only: parameters that are taken; None: all.

        Raises:
            CheckpointCorruptError: a file is damaged; the engine's parameters that are in it hold anything.
            UnreadableFileError: the file system refuses to give it now; likewise.
        """
        rank = self._rank if saved_by is None else saved_by
        wanted = {name: one for name, one in _settled_in(saved.record(rank)).items() if only is None or name in only}
        present = self.weights.present(wanted)
        stale = {name: one for name, one in wanted.items() if present[name] != one}
        self.weights.forget(stale)
        assemble(saved.slabs([rank]), self.wanted(stale), saved.directory)
        self.weights.settle_as(stale)

    def wanted(self, names: Iterable[str]) -> dict[str, Wanted]:
        """The engine's parameters, to be filled; by key."""
        return {f"frozen/{name}": Wanted(piece_of(self.described(name)), self.weights.tensors[name]) for name in names}

    def _has(self, state: Mapping[str, Any]) -> bool:
        """Whether the engine has the settled parameters of a snapshot."""
        settled = [name for name in self.weights.tensors if name not in state["moved"]]
        return word_of(self.weights.present(settled)) == str(state["word"])

    def bring(self, state: Mapping[str, Any]) -> None:
        """Make the engine's parameters those of a snapshot; where they differ, read them from a checkpoint.

        Args:
            state: what `FrozenWeights.state` returned for it; empty: the engine keeps its own.

        Raises:
            CheckpointError: neither the engine nor a checkpoint of this run has them, or that is not known.
        """
        if not state:
            return
        if not self._has(state) and not self._newest_with(state, self._rank, self._loaded):
            names = [name for name in self.weights.tensors if name not in state["moved"]]
            raise CheckpointError(
                f"{len(names)} parameters outside the optimizer (the first is {min(names, default='')!r}) have other "
                "values in this job than they had with the saved state, and no checkpoint of the run has those. The "
                "script must load the same base weights as before"
            )
        moved = state["moved"]
        with torch.no_grad():
            for name, values in moved.items():
                self.weights.tensors[name].copy_(values)
        self.weights.forget(moved)

    def _loaded(self, saved: SavedCheckpoint) -> bool:
        self.load(saved)
        return True

    def rescued(self, scalars: Any, rank: int, ranks: int, checked: set[Path]) -> FrozenPart | None:
        """What a checkpoint lists that has a rank's parameters as they were with its snapshot; each slab is read.

        A snapshot tells names, dtypes, shapes and bytes of its settled parameters by one hash. So what a checkpoint has
        of them is theirs, or it is not used.

        Args:
            scalars: of the snapshot, which a rank of an earlier life has left.
            rank: that one.
            ranks: how many there were.
            checked: slabs that were read and are whole, shared with other parts.

        Returns:
            None where no checkpoint has them, and this job has loaded the same weights, which `write` writes.

        Raises:
            SaveError: neither has them, or that is not known.
        """
        state = scalars.get("frozen") or {"word": word_of({}), "moved": {}}
        listed = partial(self._listed_in, scalars, state["moved"], rank, ranks, checked)
        found = self._newest_with(state, rank, listed)
        whole = not self.places and state["moved"].keys() <= self.weights.tensors.keys()
        if found is None and not (whole and self._has(state)):
            raise SaveError(
                f"no checkpoint of the run has the parameters outside the optimizer of rank {rank} whole, and this job "
                "has others than they were with the state"
            )
        return found

    def _listed_in(
        self,
        scalars: Any,
        moved: Mapping[str, torch.Tensor],
        rank: int,
        ranks: int,
        checked: set[Path],
        saved: SavedCheckpoint,
    ) -> FrozenPart | None:
        """See `rescued`."""
        record = saved.record(rank % saved.listing.world_size)
        split = any(one.global_shape is not None for one in record.frozen.values())
        alike = all(record.frozen[name].shape == tuple(values.shape) for name, values in moved.items())
        if not alike or (split and saved.listing.world_size != ranks):
            return None
        files = {}
        for file in record.frozen_files():
            writer = saved.record(writer_of(file)) if file not in record.files else record
            slab = saved.file(writer, file)
            if slab.path not in checked:
                check_file(slab.path, slab.record)
                checked.add(slab.path)
            files[file] = slab.record
        records = {name: one.described if name in moved else one for name, one in record.frozen.items()}
        return FrozenPart(scalars, records, files)

    def _newest_with(
        self, state: Mapping[str, Any], rank: int, use: Callable[[SavedCheckpoint], _Found | None]
    ) -> _Found | None:
        """What `use` makes of the newest whole checkpoint in which a rank had the settled parameters of a snapshot.

        None where there is none. Damaged ones, and those of which it makes None, are passed over.
        """
        for listed in _newest_first(self._checkpoints):
            saved = listed.for_one_reader()
            try:
                record = saved.record(rank % saved.listing.world_size)
                settled = {name: one for name, one in _settled_in(record).items() if name not in state["moved"]}
                known = settled.keys() | state["moved"].keys() == record.frozen.keys()
                if saved.full and known and word_of(settled) == state["word"] and (found := use(saved)):
                    return found
            except CheckpointError as error:
                _log.warning("frozen weights are looked for in an older checkpoint: %s", error)
        return None


def _listed(earlier: Sequence[SavedCheckpoint], path: Path) -> FileRecord | None:
    """The record of a slab that one of these checkpoints lists, read from the disk; None where none is whole."""
    for saved in earlier:
        if path.name not in saved.listing.sizes:
            continue
        try:
            listed = saved.manifest.files[path.name]
        except (CheckpointError, KeyError):  # retention was there meanwhile
            continue
        try:
            return check_file(path, listed)
        except CheckpointError as error:
            _log.warning("%s is not used, and is written anew: %s", path, error)
            return None
    return None


def _newest_first(checkpoints: Path) -> list[SavedCheckpoint]:
    """Committed checkpoints, the one that was committed last first."""
    return sorted(scan(checkpoints).checkpoints, key=lambda saved: -saved.listing.sequence)


def _settled_in(record: RankManifest) -> dict[str, str]:
    """Hashes of the parameters that are in files."""
    return {name: one.xxh3_128 for name, one in record.frozen.items() if one.xxh3_128 is not None}
