"""Files of earlier checkpoints that a later one holds as hard links, with their recorded hashes.

In a *sparse* checkpoint of a mixture every rank writes all but some experts, whose files it carries. Experts have their
own files, named after the iteration at which they were saved::

    rank-00000.params.safetensors                       what every token passes, of this checkpoint
    rank-00000.experts-0000000100.params.safetensors    experts of this checkpoint, 100
    rank-00000.experts-0000000080.params.safetensors    a link to what checkpoint 80 wrote, for those not saved since

A file is carried until every expert in it was saved again. So every sparse checkpoint holds every operator, and can
be verified, loaded and deleted like any other. The manifest gives each operator's iteration, which names its file;
the same operator in an older file is out of date.
"""

import errno
import logging
import os
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cpsr.checkpoint.files import hash_file, sync_file, temporary_name
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import FileRecord, OperatorRecord, RankManifest, expert_files
from cpsr.checkpoint.verify import check_file
from cpsr.errors import CheckpointError, SaveError

__all__ = ["CarriedFiles", "put_files", "put_verified"]

_log = logging.getLogger(__name__)

# How many checkpoints are searched, newest first; retention never removes the newest two.
_REMEMBERED_PLACES = 8
# Errors of `link` on file systems without hard links, or with no more links for this file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class CarriedFiles:
    """The files that this rank wrote in this attempt of this life, and where they lie.

    Nothing is carried from an earlier life, or from a state before a roll-back. Where the newest checkpoint was
    abandoned, the files before it are the newest.
    """

    def __init__(self) -> None:
        self._places: deque[tuple[Path, RankManifest]] = deque(maxlen=_REMEMBERED_PLACES)

    def record(self, directory: Path, manifest: RankManifest) -> None:
        """Record that this rank's part of a checkpoint is durable in this directory."""
        self._places.append((directory, manifest))

    def newest(self, attempt: tuple[int, int]) -> dict[str, OperatorRecord]:
        """The operators of the last part that this rank wrote in this attempt; nothing before."""
        if not self._places or (self._places[-1][1].life, self._places[-1][1].attempt) != attempt:
            return {}
        return self._places[-1][1].operators

    def put_into(
        self, directory: Path, attempt: tuple[int, int], contents: Contents
    ) -> tuple[dict[str, FileRecord], dict[str, OperatorRecord]]:
        """Give the files of carried operators a name in another checkpoint; the caller forces the directory.

        Args:
            directory: of the checkpoint.
            attempt: life and attempt; nothing of any other is carried.
            contents: of this rank's part; operators in files of other ranks are left out.

        Returns:
            The files' records, and those of the operators, at the iterations at which they were taken.

        Raises:
            SaveError: this rank has not written one of them in this attempt, or a copy differs.
            OSError: the file system refused.
        """
        carried = contents.carried_here
        if not carried:
            return {}, {}
        for source, written in reversed(self._places):
            if (written.life, written.attempt) != attempt:
                break
            known = {name: written.operators[name] for name in carried if name in written.operators}
            records = {name: one for name, one in known.items() if one.saved_by is None}  # else it is not here
            if len(records) < len(carried):
                break
            ages = sorted({one.iteration for one in records.values()})
            files = {name: written.files[name] for age in ages for name in expert_files(written.rank, age)}
            if put_files(directory, source, files):
                return files, records
            # It was abandoned, or retention was there.
        raise SaveError(
            f"{directory}: {len(carried)} parameters of experts are not saved now, and were not saved since the run "
            f"went on either (the first is {min(carried)}); the next checkpoint must save all experts"
        )


def put_files(directory: Path, source: Path, files: Mapping[str, FileRecord]) -> bool:
    """Give files of one checkpoint the same names in another one; False, and no new name, where one is not there.

    Args:
        directory: where to; nothing of these names is there.
        source: where they lie.
        files: with what was written.

    Raises:
        SaveError: a copy differs from what was written.
        OSError: the file system refused.
    """
    for name, record in files.items():
        try:
            _link(source / name, directory / name, record)
        except FileNotFoundError:
            for done in files:
                (directory / done).unlink(missing_ok=True)
            return False
    return True


def put_verified(target: Path, source: Path, record: FileRecord) -> bool:
    """As `put_files` for one file, which is read first; False, with the reason in the log, where it is not whole.

    Args:
        target: its further name; nothing is there.
        source: the file.
        record: what it should be.
    """
    try:
        check_file(source, record, direct=True)
        _link(source, target, record)
    except (CheckpointError, OSError) as error:
        _log.warning("%s is not linked, and is looked for elsewhere: %s", source, error)
        return False
    return True


def _link(source: Path, target: Path, record: FileRecord) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(source, target, record)


def _copy(source: Path, target: Path, record: FileRecord) -> None:
    """Copy under a temporary name, verify the copy against the original's record, and rename it."""
    temporary = temporary_name(target)
    try:
        shutil.copyfile(source, temporary, follow_symlinks=False)
        temporary.chmod(target.parent.stat().st_mode & 0o666)
        sync_file(temporary)
        if record.first_difference(hash_file(temporary, direct=True)) is not None:
            raise SaveError(f"{target}: the copy of {source} differs from what was written; check the disk")
        temporary.replace(target)
    except (OSError, SaveError):
        temporary.unlink(missing_ok=True)
        raise
