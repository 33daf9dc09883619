"""Frozen weights of a state in host memory that is made a checkpoint: linked from a checkpoint that has them."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cpsr.checkpoint.carried import put_verified
from cpsr.checkpoint.catalogue import CheckpointInfo
from cpsr.checkpoint.frozen_files import FrozenFiles, FrozenPart, newest_first
from cpsr.checkpoint.manifest import (
    FileRecord,
    FrozenRecord,
    RankManifest,
    frozen_file_name,
    frozen_word,
    frozen_writer,
    holds_frozen,
)
from cpsr.checkpoint.verify import DamagedFileError, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, SaveError
from cpsr.state.frozen import word_of

__all__ = ["FrozenLinks"]

_log = logging.getLogger(__name__)


class FrozenLinks:
    """The files of one part of a checkpoint that is made of states of the ranks before.

    A snapshot tells names, dtypes, shapes and bytes of its settled parameters by one hash. So what a checkpoint has of
    them is theirs, or it is not used.

    Args:
        own: of this job, for that part; written anew where this job has loaded the same weights, and no checkpoint has.
        checkpoints: the run's directory of them.
        rank: whose state it is, and `ranks`: how many there were.
        part: which part of the new checkpoint, and `parts`: how many it has. All of them, or one where ranks hold the
            same.
    """

    def __init__(self, own: FrozenFiles, checkpoints: Path, rank: tuple[int, int], part: tuple[int, int]) -> None:
        self._own = own
        self._checkpoints = checkpoints
        self._rank, self._ranks = rank
        self._part, self._parts = part

    def write(self, directory: Path, scalars: Any, refuse_abandoned: Callable[[], None]) -> FrozenPart:
        """See `FrozenFiles.write`.

        Raises:
            SaveError: neither a checkpoint nor this job has the parameters of the state, or that is not known.
            OSError: the file system refused.
        """
        state = scalars.get("frozen") or {"word": word_of({}), "moved": {}}
        for info in newest_first(self._checkpoints):
            refuse_abandoned()
            try:
                record = self._record_with(info, state)
                files = None if record is None else self._link(directory, info, record)
            except CheckpointError as error:
                _log.warning("frozen weights are looked for in an older checkpoint: %s", error)
                continue
            if record is not None and files is not None:
                records = {name: self._renamed(one, name in state["moved"]) for name, one in record.frozen.items()}
                return FrozenPart(scalars, records, files)
        if not self._own.has(state):
            raise SaveError(
                f"no checkpoint of the run has the parameters outside the optimizer of rank {self._rank} whole, and "
                "this job has others than they were with the state"
            )
        return self._own.write(directory, scalars, refuse_abandoned)

    def _record_with(self, info: CheckpointInfo, state: Mapping[str, Any]) -> RankManifest | None:
        """The manifest of a rank that had the same parameters; None where there is none."""
        if not info.full:
            return None
        manifest, moved = read_manifest(info.directory), state["moved"]
        record = read_rank_manifest(info.directory, manifest, self._rank % manifest.world_size)
        split = any(one.global_shape is not None for one in record.frozen.values())
        settled = {name: one.xxh3_128 for name, one in record.frozen.items() if name not in moved}
        known = {name: one for name, one in settled.items() if one is not None}
        whole = known.keys() == settled.keys() and moved.keys() <= record.frozen.keys()
        alike = all(record.frozen[name].shape == tuple(values.shape) for name, values in moved.items() if whole)
        if not whole or not alike or word_of(known) != state["word"] or (split and manifest.world_size != self._ranks):
            return None
        return record

    def _link(self, directory: Path, info: CheckpointInfo, record: RankManifest) -> dict[str, FileRecord] | None:
        """Link the files of this part; None, and no new name, where one is not whole."""
        found = self._files(info, record)
        for file, one in found.items():
            if not put_verified(directory / self._name(file), info.directory / file, one):
                for done in found:
                    (directory / self._name(done)).unlink(missing_ok=True)
                return None
        return {self._name(file): one for file, one in found.items()}

    def _files(self, info: CheckpointInfo, record: RankManifest) -> dict[str, FileRecord]:
        """Those of a checkpoint that this part of the new one is to have."""
        manifest, found = read_manifest(info.directory), {}
        for file in sorted({*record.frozen_files(), *filter(holds_frozen, record.files)}):
            if frozen_writer(self._name(file)) == self._part:
                rank = frozen_writer(file)
                writer = record if rank == record.rank else read_rank_manifest(info.directory, manifest, rank)
                if file not in writer.files:
                    raise DamagedFileError(info.directory / file, f"is not described by the manifest of rank {rank}")
                found[file] = writer.files[file]
        return found

    def _name(self, file: str) -> str:
        """A file's name in the new checkpoint."""
        return frozen_file_name(frozen_writer(file) % self._parts, frozen_word(file))

    def _renamed(self, record: FrozenRecord, moved: bool) -> FrozenRecord:
        file = None if moved or record.file is None else self._name(record.file)
        return record.model_copy(update={"file": file, "xxh3_128": None if moved else record.xxh3_128})
