"""Verified reading of checkpoints: hashes up to the commit record cover every byte."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

from cpsr.checkpoint.direct_file import HASHED_PIECE_BYTES, piece_hash
from cpsr.checkpoint.files import hash_file, hash_in_pieces, open_plain, read_bytes
from cpsr.checkpoint.manifest import (
    COMMIT,
    SLABS,
    FileRecord,
    Manifest,
    RankManifest,
    rank_manifest_name,
    slab_path,
    step_iteration,
)
from cpsr.checkpoint.replicated import missing_among
from cpsr.checkpoint.tensor_file import MappedTensors
from cpsr.errors import CheckpointCorruptError, CheckpointError

__all__ = [
    "CheckpointFileError",
    "DamagedFileError",
    "UnreadableFileError",
    "check_file",
    "check_in_pieces",
    "check_piece",
]
__all__ += ["is_committed", "is_there", "map_tensors", "persistently"]
__all__ += ["read_manifest", "read_rank_manifest", "refused_content", "require_same", "stat_of"]
__all__ += ["verify_checkpoint", "verify_run"]

# Errors where the file is gone or something else is in its place: a retry does not help.
_DAMAGE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)
# Any other error (EIO, EMFILE, EINTR, ESTALE) may be temporary: one more attempt after each of these pauses.
# Together below a second, so that a permanent error is reported before it looks like a hang.
_PAUSES_SECONDS = (0.02, 0.1, 0.5)

_Read = TypeVar("_Read")


class CheckpointFileError(CheckpointError):
    """Something is wrong with a checkpoint on disk.

    Attributes:
        file: the file (or directory) that is damaged, or cannot be read.
        what: what is wrong with it.
        iteration: the checkpoint it belongs to; None for the run as a whole, and where that is not known.
    """

    def __init__(self, file: Path, what: str, advice: str = "") -> None:
        super().__init__(f"{file}: {what}{advice}")
        self.file, self.what = file, what
        self.iteration = step_iteration(file.parent.name)

    def without_frames(self) -> Self:
        """Itself for a list: its traceback, and those of its causes, would keep alive what those frames refer to."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class DamagedFileError(CheckpointFileError, CheckpointCorruptError):
    """A committed checkpoint is damaged in this file."""


class UnreadableFileError(CheckpointFileError):
    """The file system cannot read this file now: it may be undamaged, and nothing is set aside."""

    def __init__(self, file: Path, what: str) -> None:
        known = step_iteration(file.parent.name) is not None
        which = f"the name of {file.parent}" if known else "the name of the checkpoint's directory"
        advice = (
            f". The checkpoint may be whole and was left as it is: start again; where this stays, put 'kept-' before "
            f"{which}, so that an older checkpoint is used and nothing of this one is removed"
        )
        super().__init__(file, what, advice)


def is_committed(directory: Path) -> bool:
    """Whether there is a commit record, valid or not. Links are not followed.

    Raises:
        UnreadableFileError: the file system refuses to say, also when asked again.
    """
    return is_there(directory / COMMIT)


def is_there(path: Path) -> bool:
    """Whether a checkpoint's directory, which is no link, has such a file.

    `Path.exists` raises temporary errors of a network file system, or returns False for them.

    Raises:
        UnreadableFileError: the file system refuses to say, also when asked again.
    """
    return stat_of(path) is not None


def stat_of(path: Path) -> os.stat_result | None:
    """Of a file for which `is_there`, else None; UnreadableFileError as that."""
    try:
        return persistently(_stat, path)
    except DamagedFileError:
        return None


def read_manifest(directory: Path) -> Manifest:
    """The commit record of a checkpoint.

    Raises:
        CheckpointCorruptError: it is missing, torn or altered, or holds impossible values.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    try:
        return Manifest.parse(_read(directory / COMMIT), directory.name)
    except ValueError as error:
        raise DamagedFileError(directory / COMMIT, str(error)) from error


def read_rank_manifest(directory: Path, manifest: Manifest, rank: int) -> RankManifest:
    """One rank's manifest, checked against the whole checkpoint's.

    Raises:
        CheckpointCorruptError: it is missing, torn, altered, or not of this checkpoint.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    path = directory / rank_manifest_name(rank, manifest.save)
    data = _read(path)
    try:
        return RankManifest.parse_listed(data, manifest, rank)
    except ValueError as error:
        raise DamagedFileError(path, str(error)) from error


def check_file(path: Path, record: FileRecord) -> FileRecord:
    """Compare a file on the disk, not in the page cache, with its record.

    Returns:
        What was found, with the hashes of its MiB.

    Raises:
        CheckpointCorruptError: it is missing, no plain file, or its size or hash differs.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    found = persistently(hash_file, path)
    require_same(path, found, record)
    return found


def refused_content(path: Path, what: str) -> DamagedFileError:
    """The error of a file whose bytes are verified, and hold something else than is wanted."""
    return DamagedFileError(path, f"is not the safetensors file that its manifest describes: {what}")


def check_in_pieces(path: Path, record: FileRecord) -> Iterator[None]:
    """`check_file`, where every `next` reads 4 MiB at most; only after a read error it reads again as a whole.

    Raises:
        CheckpointCorruptError: as `check_file`.
        UnreadableFileError: as `check_file`.
    """
    try:
        found = yield from hash_in_pieces(path)
    except OSError:
        check_file(path, record)
        return
    require_same(path, found, record)


def require_same(path: Path, found: FileRecord, record: FileRecord) -> None:
    """Raise DamagedFileError where a file differs from its record; its MiB is named where the record has its hash."""
    if found.bytes != record.bytes:
        raise DamagedFileError(path, f"has {found.bytes} bytes, {record.bytes} were committed")
    start = record.first_difference(found)
    if start is not None and record.pieces is not None:
        index = start // HASHED_PIECE_BYTES
        check_piece(path, record, index, piece_hash(found.pieces or "", index))
    if start is not None:
        raise DamagedFileError(path, f"its xxh3-128 is {found.xxh3_128}, committed was {record.xxh3_128}")


def check_piece(path: Path, record: FileRecord, index: int, found: str) -> None:
    """Compare the hash of one piece with the file's record.

    Raises:
        CheckpointCorruptError: it differs.
    """
    committed = piece_hash(record.pieces or "", index)
    if found != committed:
        start = index * HASHED_PIECE_BYTES
        end = min(start + HASHED_PIECE_BYTES, record.bytes)
        raise DamagedFileError(path, f"the xxh3-64 of its bytes {start} to {end} is {found}, committed was {committed}")


def map_tensors(path: Path) -> MappedTensors:
    """A file of tensors whose header was read before, mapped.

    Raises:
        CheckpointCorruptError: it is missing, or no safetensors file.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    return persistently(_map_tensors, path)


def verify_checkpoint(directory: Path) -> list[CheckpointFileError]:
    """Everything that is wrong with one committed checkpoint, over all its ranks; reads all of its bytes.

    An unreadable file is a problem, too: it cannot be verified.
    """
    problems = list(_problems(directory))
    if problems:
        # A running job may have thinned or deleted it meanwhile: real damage shows twice.
        problems = list(_problems(directory)) if (directory / COMMIT).exists() else []
    for problem in problems:
        problem.iteration = step_iteration(directory.name)
    return [problem.without_frames() for problem in problems]


def verify_run(run_dir: Path) -> list[CheckpointFileError]:
    """Everything that is wrong with the committed checkpoints of a run; changes nothing.

    Directories without a commit record (a save under way, or cut off by a kill) are no checkpoints, and no problem.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir():
        return [CheckpointFileError(checkpoints, "no such directory; is this the directory of a run?")]
    problems: list[CheckpointFileError] = []
    if (checkpoints / SLABS).is_symlink():
        problems.append(CheckpointFileError(checkpoints / SLABS, "is a symbolic link, and never followed"))
    for path in sorted(path for path in checkpoints.iterdir() if step_iteration(path.name) is not None):
        if path.is_symlink():
            problems.append(CheckpointFileError(path, "is a symbolic link, and never followed"))
            problems[-1].iteration = step_iteration(path.name)
        elif (path / COMMIT).exists():
            problems += verify_checkpoint(path)
    return problems


def _problems(directory: Path) -> Iterator[CheckpointFileError]:
    """Damaged and unreadable files; with a damaged manifest nothing below it can be verified."""
    try:
        manifest = read_manifest(directory)
    except CheckpointFileError as error:
        yield error
        return
    listed = manifest.files
    records: dict[int, RankManifest] = {}
    for rank in range(manifest.world_size):
        try:
            record = records[rank] = read_rank_manifest(directory, manifest, rank)
        except CheckpointFileError as error:
            yield error
            continue
        for name in sorted(record.files.keys() & listed):
            try:
                check_file(slab_path(directory, name), record.files[name])
            except CheckpointFileError as error:
                yield error
    for rank, what in missing_among(records):
        yield DamagedFileError(directory / rank_manifest_name(rank, manifest.save), what)


def _read(path: Path) -> bytes:
    return persistently(read_bytes, path)


def _stat(path: Path) -> os.stat_result:
    if stat.S_ISLNK(path.parent.lstat().st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path.parent))
    return path.stat()


def persistently(read: Callable[[Path], _Read], path: Path) -> _Read:
    """Read a file; retries after errors that may be temporary.

    Raises:
        CheckpointCorruptError: it is missing, or something else is in its place.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    for pause in _PAUSES_SECONDS:
        try:
            return read(path)
        except OSError as error:
            if error.errno in _DAMAGE:
                break
        time.sleep(pause)
    try:
        return read(path)
    except OSError as error:
        if error.errno in _DAMAGE:
            what = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
            raise DamagedFileError(path, what) from error
        raise UnreadableFileError(path, f"cannot be read now: {error.strerror}") from error


def _map_tensors(path: Path) -> MappedTensors:
    os.close(open_plain(path))  # torch reports errors without errno, and follows links
    try:
        return MappedTensors(path)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # what a header that is none raises
        raise DamagedFileError(path, f"is not a safetensors file: {error}") from error
    except RuntimeError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
