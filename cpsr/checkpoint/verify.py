"""Reading what was committed without trusting it: every byte is covered by a hash up to the commit record."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    THINNED,
    FileRecord,
    Manifest,
    RankManifest,
    commit_record,
    rank_manifest_name,
    step_iteration,
    thinned_record,
)
from cpsr.errors import CheckpointCorruptError

__all__ = ["DamagedFileError", "Problem", "check_file", "is_thinned", "read_manifest", "read_rank_manifest"]
__all__ += ["verify_checkpoint", "verify_run"]

_Record = TypeVar("_Record", Manifest, RankManifest)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint on disk.

    Attributes:
        file: the file (or directory) that is damaged.
        what: what is wrong with it.
        iteration: the checkpoint it belongs to, None for the run as a whole.
    """

    file: Path
    what: str
    iteration: int | None


class DamagedFileError(CheckpointCorruptError):
    """A committed checkpoint is damaged in this file."""

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(f"{file}: {what}")
        self.file = file
        self.what = what


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointCorruptError: COMMIT or the manifest is missing, torn or altered, or says something impossible.
    """
    data = _read(directory / MANIFEST)
    if _read(directory / COMMIT) != commit_record(data):
        raise DamagedFileError(directory / COMMIT, f"does not match {MANIFEST}; one of the two is torn or altered")
    manifest = _parse(Manifest.parse, directory / MANIFEST, data)
    if manifest.iteration != step_iteration(directory.name):
        raise DamagedFileError(directory / MANIFEST, f"is of iteration {manifest.iteration}, not of its directory's")
    return manifest


def read_rank_manifest(directory: Path, manifest: Manifest, rank: int) -> RankManifest:
    """One rank's manifest, checked against the whole checkpoint's.

    Raises:
        CheckpointCorruptError: it is missing, torn, altered, or not of this checkpoint.
    """
    path = directory / rank_manifest_name(rank)
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != manifest.ranks[rank].sha256:
        raise DamagedFileError(path, f"its SHA-256 is not the one in {MANIFEST}; it is torn or altered")
    record = _parse(RankManifest.parse, path, data)
    whole = (manifest.run_id, manifest.life, manifest.attempt, manifest.iteration, manifest.world_size, rank)
    if (record.run_id, record.life, record.attempt, record.iteration, record.world_size, record.rank) != whole:
        raise DamagedFileError(path, f"is not of the checkpoint that {MANIFEST} describes")
    if {name: file.bytes for name, file in record.files.items()} != manifest.ranks[rank].files:
        raise DamagedFileError(path, f"lists other files than {MANIFEST}")
    return record


def is_thinned(directory: Path, manifest: Manifest) -> bool:
    """Whether only the weights are kept; the marker must say exactly what thinning removes.

    Raises:
        CheckpointCorruptError: the marker is torn or altered.
    """
    path = directory / THINNED
    if not path.exists():
        return False
    if _read(path) != thinned_record(manifest):
        raise DamagedFileError(path, "does not list the files that thinning removes; it is torn or altered")
    return True


def check_file(path: Path, record: FileRecord) -> None:
    """Compare a file with its record.

    Raises:
        CheckpointCorruptError: it is missing, not readable, or its size or hash differs.
    """
    try:
        found = hash_file(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if found.bytes != record.bytes:
        raise DamagedFileError(path, f"has {found.bytes} bytes, {record.bytes} were committed")
    if found.xxh3_128 != record.xxh3_128:
        raise DamagedFileError(path, f"its xxh3-128 is {found.xxh3_128}, committed was {record.xxh3_128}")


def verify_checkpoint(directory: Path) -> list[Problem]:
    """Everything that is wrong with one committed checkpoint, over all its ranks; reads all of its bytes."""
    damages = list(_damages(directory))
    if damages:
        # A running job may have thinned or deleted it meanwhile: what is damaged is damaged twice.
        damages = list(_damages(directory)) if (directory / COMMIT).exists() else []
    return [Problem(error.file, error.what, step_iteration(directory.name)) for error in damages]


def verify_run(run_dir: Path) -> list[Problem]:
    """Everything that is wrong with the committed checkpoints of a run; changes nothing.

    Directories without a commit record (a save under way, or cut off by a kill) are no checkpoints, and no problem.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir():
        return [Problem(checkpoints, "no such directory; is this the directory of a run?", None)]
    problems: list[Problem] = []
    for path in sorted(checkpoints.iterdir()):
        if step_iteration(path.name) is not None and path.is_symlink():
            problems.append(Problem(path, "is a symbolic link, and never followed", step_iteration(path.name)))
        elif _is_committed(path):
            problems += verify_checkpoint(path)
    return problems


def _is_committed(path: Path) -> bool:
    return step_iteration(path.name) is not None and (path / COMMIT).exists()


def _damages(directory: Path) -> Iterator[DamagedFileError]:
    """What is damaged; where the manifest is, nothing below it can be judged."""
    try:
        manifest = read_manifest(directory)
        removed = manifest.thinned_files() if is_thinned(directory, manifest) else []
    except DamagedFileError as error:
        yield error
        return
    for rank in range(manifest.world_size):
        try:
            record = read_rank_manifest(directory, manifest, rank)
        except DamagedFileError as error:
            yield error
            continue
        for name in sorted(record.files.keys() - set(removed)):
            try:
                check_file(directory / name, record.files[name])
            except DamagedFileError as error:
                yield error


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse(parse: Callable[[bytes], _Record], path: Path, data: bytes) -> _Record:
    try:
        return parse(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"is refused: {error}") from error


def _unreadable(path: Path, error: OSError) -> DamagedFileError:
    what = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
    return DamagedFileError(path, what)
