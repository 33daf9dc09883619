"""Partial checkpoints: between two whole ones, some ranks write new weights and the others carry theirs along.

A partial checkpoint is committed as a whole one is, and holds a rank's files of weights, no moments and no buffers: the
history of a predictor, and no place to restart at. What a rank carries are the files that it wrote last, under one more
name (a hard link), with the hash of then; the operators in its manifest say at which iteration they were taken.
"""

import errno
import os
import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cpsr.checkpoint.files import hash_file, sync_file, temporary_name
from cpsr.checkpoint.manifest import FileRecord, OperatorRecord, RankManifest, holds_weights
from cpsr.errors import SaveError
from cpsr.state import Shard

__all__ = ["CarriedWeights", "put_into", "weights_of"]

# Checkpoints looked in for weights to carry, newest first; retention never removes the newest two.
_REMEMBERED_PLACES = 8
# What `link` answers on file systems that have no hard links, or no more of them for this file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def weights_of(shard: Shard) -> Shard:
    """The shard without moments and buffers; views of the same memory."""
    return Shard({name: replace(operator, moments={}) for name, operator in shard.operators.items()})


class CarriedWeights:
    """The weights that this rank wrote last, and where they lie.

    Only what was written in this attempt of this life is carried: nothing of a state that was given up since. Where
    the newest were abandoned with their checkpoint, those before them are the newest.
    """

    def __init__(self) -> None:
        self._places: deque[tuple[Path, RankManifest]] = deque(maxlen=_REMEMBERED_PLACES)

    def note(self, directory: Path, manifest: RankManifest) -> None:
        """This rank's part of a checkpoint is durable there: new weights, or carried ones under one more name."""
        self._places.append((directory, manifest))

    def put_into(
        self, directory: Path, attempt: tuple[int, int], *, fsync: bool
    ) -> tuple[dict[str, FileRecord], dict[str, OperatorRecord]]:
        """Give the weights a name in another checkpoint; the caller forces the directory to the disk.

        Args:
            directory: of the checkpoint.
            attempt: life and attempt; weights of any other are not carried.
            fsync: force a copy to the disk, where there can be no link.

        Returns:
            The files' records, and the operators without moments, at the iteration at which they were taken.

        Raises:
            SaveError: there are no such weights any more, or a copy differs from what was written.
            OSError: the file system refused.
        """
        for source, written in reversed(self._places):
            if (written.life, written.attempt) != attempt:
                break
            files = {name: record for name, record in written.files.items() if holds_weights(name)}
            if not put_into(directory, source, files, fsync=fsync):
                continue  # retention, or with an abandoned checkpoint
            return files, {key: one.model_copy(update={"moments": {}}) for key, one in written.operators.items()}
        raise SaveError(f"{directory}: there are no weights that this rank has written since the run went on, to carry")


def put_into(directory: Path, source: Path, files: Mapping[str, FileRecord], *, fsync: bool) -> bool:
    """Give files of one checkpoint the same names in another one; False, and no new name, where one is not there.

    Args:
        directory: where to; nothing of these names is there.
        source: where they lie.
        files: with what was written.
        fsync: force a copy to the disk, where there can be no link.

    Raises:
        SaveError: a copy differs from what was written.
        OSError: the file system refused.
    """
    for name, record in files.items():
        try:
            _link(source / name, directory / name, record, fsync=fsync)
        except FileNotFoundError:
            for done in files:
                (directory / done).unlink(missing_ok=True)
            return False
    return True


def _link(source: Path, target: Path, record: FileRecord, *, fsync: bool) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(source, target, record, fsync=fsync)


def _copy(source: Path, target: Path, record: FileRecord, *, fsync: bool) -> None:
    """Copy under a temporary name, and put it in place once what was read back is what was written first."""
    temporary = temporary_name(target)
    try:
        shutil.copyfile(source, temporary, follow_symlinks=False)
        temporary.chmod(target.parent.stat().st_mode & 0o666)
        if fsync:
            sync_file(temporary)
        found = hash_file(temporary)
        if (found.bytes, found.xxh3_128) != (record.bytes, record.xxh3_128):
            raise SaveError(f"{target}: the copy of {source} differs from what was written; check the disk")
        temporary.replace(target)
    except (OSError, SaveError):
        temporary.unlink(missing_ok=True)
        raise
