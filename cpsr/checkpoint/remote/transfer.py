"""Copies of checkpoints sent to a target and fetched from it, both under the commit protocol.

A fetched copy arrives in `<run_dir>/fetching/step-...`, where it is no checkpoint. One rename puts it in place when
every file was read back from the disk. A later fetch reuses the whole files of an interrupted one.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cpsr.checkpoint.file_hash import Digest
from cpsr.checkpoint.files import (
    hash_file,
    make_directory,
    read_bytes,
    sync_directory,
    sync_file,
    temporary_name,
    write_bytes,
)
from cpsr.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    commit_record,
    frozen_writer,
    holds_frozen,
    rank_manifest_name,
    step_name,
)
from cpsr.checkpoint.remote.catalogue import (
    IDENTITY,
    SET_ASIDE,
    Copy,
    CopyDamagedError,
    is_identity_of,
    owner_of,
    read_rank,
    scan,
    sealed,
)
from cpsr.checkpoint.remote.place import Place, TargetAbsentError
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import DamagedFileError, check_file, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, RunMismatchError, SaveError, TargetError

__all__ = ["CopyStoppedError", "discard_fetch", "fetch_ranks", "prepare_fetch", "put_in_place", "remove_old"]
__all__ += ["set_aside", "upload"]

_FETCHING = "fetching"

_log = logging.getLogger(__name__)


class CopyStoppedError(TargetError):
    """Copying was asked to stop; what is at the target is not committed."""


# Copying there


def upload(
    place: Place, directory: Path, identity: bytes, stopped: Callable[[], bool], earlier: Sequence[Copy] = ()
) -> tuple[int, float]:
    """Copy a committed checkpoint of all ranks; it exists at the target once this returns.

    Every file is read back from the target and compared with its record. The manifests come after all files, and the
    commit record last. Files of an earlier upload in the folder are removed first. A file of frozen weights that an
    earlier copy has is not sent again: the target copies it.

    Args:
        place: the target.
        directory: the checkpoint; it must stay whole meanwhile.
        identity: `run.json` of the run.
        stopped: checked between pieces.
        earlier: copies of the run at the target, in the order of their commits.

    Returns:
        Tensor bytes of the copy, and its seconds, reading back included.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, gone, or cannot be read now.
        TargetError: the target failed, or returned other bytes; or `stopped`.
        RunMismatchError: another run has begun to write into this folder.
    """
    started, folder = time.perf_counter(), directory.name
    manifest = read_manifest(directory)
    manifest_bytes = _read_local(directory / MANIFEST)
    if not is_identity_of(identity, manifest):
        raise CheckpointError(f"the {IDENTITY} beside {directory.parent} is damaged, or of another run")
    place.remove(folder, first=COMMIT)
    place.make(folder)
    written = sealed(identity)
    place.write(folder, IDENTITY, written)
    records = [read_rank_manifest(directory, manifest, rank) for rank in sorted(manifest.ranks)]
    for name, expected in [(name, record.files[name]) for record in records for name in sorted(record.files)]:
        _refuse_stop(stopped)
        if not (holds_frozen(name) and _duplicate(place, folder, name, expected, earlier, stopped)):
            _send(place, folder, directory / name, expected, stopped)
    for record in records:
        name = rank_manifest_name(record.rank)
        place.write(folder, name, _read_local(directory / name))
    place.write(folder, MANIFEST, manifest_bytes)
    if place.read(folder, IDENTITY) != written:  # two runs have found the target empty at the same time
        raise RunMismatchError(
            f"another run has written into {place.name(folder)} while this one did: two runs have the same target "
            f"{place.shown}. Its copies were not committed by this run; give each run a target of its own"
        )
    place.write(folder, COMMIT, commit_record(manifest_bytes))
    return manifest.state_bytes(), time.perf_counter() - started


def set_aside(place: Place, folder: str, reason: str) -> None:
    """Mark a copy that no restart may use; it is removed once a later one is committed.

    Raises:
        TargetError: the target refused.
    """
    place.write(folder, SET_ASIDE, reason.encode())
    _log.warning("%s is set aside: %s", place.name(folder), reason)


def remove_old(place: Place, run_id: str, keep: int, before_removal: Callable[[str], None] = lambda _: None) -> None:
    """Remove all but the newest copies, and what was set aside, damaged or interrupted; after a commit.

    Args:
        place: the target.
        run_id: whose target it is; unfinished copies of other runs are removed, too.
        keep: how many stay.
        before_removal: called with each folder first: an interrupted removal may leave an unusable copy.

    Raises:
        TargetError: the target refused; what is still committed there is valid.
        RunMismatchError: another run has begun to copy there.
    """
    found = scan(place, run_id)
    damaged = [folder for folder in found.damaged if owner_of(place, folder) == run_id]
    old = [copy.folder for copy in found.copies[:-keep]]
    for folder in [*old, *damaged, *found.set_aside, *found.unfinished]:
        before_removal(folder)
        place.remove(folder, first=COMMIT)


def _send(place: Place, folder: str, path: Path, record: FileRecord, stopped: Callable[[], bool]) -> None:
    """Send a file and read it back; a difference tells which side is damaged."""
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if path.is_symlink() or found.st_size != record.bytes:
        raise DamagedFileError(path, "is not what was committed, and is not copied")
    place.send(folder, path, lambda: _refuse_stop(stopped))
    if _is_same(place.digest(folder, path.name, lambda: _refuse_stop(stopped)), record):
        return
    try:
        here = hash_file(path, direct=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if (here.bytes, here.xxh3_128) != (record.bytes, record.xxh3_128):
        raise DamagedFileError(path, "is not what was committed, and is not copied: its size or xxh3-128 differs")
    raise TargetError(f"{place.name(folder, path.name)}: what was read back differs from what was written")


def _duplicate(
    place: Place, folder: str, name: str, record: FileRecord, earlier: Sequence[Copy], stopped: Callable[[], bool]
) -> bool:
    """Let the target copy a file from the newest copy that has it; False where none has it whole."""
    having = [one for one in earlier if one.folder != folder and name in one.manifest.ranks[frozen_writer(name)].files]
    if not having:
        return False
    try:
        place.duplicate(having[-1].folder, name, folder)
        return _is_same(place.digest(folder, name, lambda: _refuse_stop(stopped)), record)
    except CopyStoppedError:
        raise
    except TargetError as error:
        _log.info("%s is sent again: %s", place.name(folder, name), error)
        return False


# Fetching


def prepare_fetch(run_dir: Path, copy: Copy) -> None:
    """Create the folder to fetch into, and remove files of other fetches (rank 0, before the others).

    Raises:
        OSError: the file system refused.
    """
    directory = _fetching(run_dir, copy)
    for path in (directory.parent, directory):
        if path.is_symlink():
            _remove(path)
    if (directory / COMMIT).exists():  # of another commit of this iteration, perhaps
        _remove(directory / COMMIT)
    make_directory(directory, fsync=True)
    for other in directory.parent.iterdir():
        if other.name != directory.name:
            _remove(other)


def discard_fetch(run_dir: Path) -> None:
    """Remove files of an interrupted fetch, when nothing more will be fetched (rank 0).

    Raises:
        OSError: the file system refused.
    """
    if os.path.lexists(run_dir / _FETCHING):
        _remove(run_dir / _FETCHING)


def fetch_ranks(place: Place, copy: Copy, ranks: Iterable[int], run_dir: Path) -> int:
    """Fetch the files of some ranks, each rank's manifest after its files.

    Returns:
        Bytes that were fetched.

    Raises:
        CopyDamagedError: a file of the copy is missing or is not what was committed.
        TargetError: the target cannot be read now.
        SaveError: what was read back from the disk differs.
        OSError: the file system failed. The next fetch uses the files that are whole.
    """
    directory, fetched = _fetching(run_dir, copy), 0
    for rank in ranks:
        record, data = read_rank(place, copy, rank)
        for name, expected in record.files.items():
            if not _is_there(directory / name, expected):
                _fetch(place, copy, directory / name, expected)
                fetched += expected.bytes
        sync_directory(directory)
        write_bytes(directory / rank_manifest_name(rank), data, fsync=True)
    return fetched


def put_in_place(copy: Copy, run_dir: Path, store: CheckpointStore, reason: str) -> None:
    """Commit what all ranks have fetched, and move it to the run's checkpoints (rank 0, after them).

    Args:
        copy: what was fetched.
        run_dir: the run's directory.
        store: its checkpoints.
        reason: why an existing checkpoint in that place is set aside as damaged.

    Raises:
        CheckpointError: the manifests do not fit together, or cannot be read back.
        OSError: the file system refused.
    """
    directory = _fetching(run_dir, copy)
    listed = {rank_manifest_name(rank) for rank in copy.manifest.ranks}
    listed |= {name for record in copy.manifest.ranks.values() for name in record.files}
    for path in directory.iterdir():
        if path.name not in listed:
            _remove(path)
    write_bytes(directory / MANIFEST, copy.manifest_bytes, fsync=True)
    write_bytes(directory / COMMIT, commit_record(copy.manifest_bytes), fsync=True)
    manifest = read_manifest(directory)
    for rank in manifest.ranks:
        read_rank_manifest(directory, manifest, rank)
    make_directory(store.directory, fsync=True)
    store.quarantine(manifest.iteration, reason)
    directory.rename(store.directory / directory.name)
    sync_directory(store.directory)
    shutil.rmtree(directory.parent, ignore_errors=True)  # else the next fetch removes it


def _fetch(place: Place, copy: Copy, path: Path, expected: FileRecord) -> None:
    """Fetch one file under a temporary name, verify it against the commit, and rename it."""
    temporary, shown = temporary_name(path), place.name(copy.folder, path.name)
    try:
        size = place.size(copy.folder, path.name)
    except TargetAbsentError as error:
        raise CopyDamagedError(f"{shown} is missing, or no plain file") from error
    if size != expected.bytes:
        raise CopyDamagedError(f"{shown} is not what was committed: it has {size} bytes, not {expected.bytes}")
    try:
        place.receive(copy.folder, path.name, temporary)
        received = hash_file(temporary)
        if not _is_same(received, expected):
            raise CopyDamagedError(f"{shown} is not what was committed: its xxh3-128 differs")
        sync_file(temporary)
        if not _is_same(hash_file(temporary, direct=True), expected):
            raise SaveError(f"{path}: what was read back differs from what was fetched; check the disk")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_there(path: Path, expected: FileRecord) -> bool:
    try:
        check_file(path, expected)
    except CheckpointError:
        return False
    return True


def _fetching(run_dir: Path, copy: Copy) -> Path:
    # The name is made of a number: no text from a target becomes a path.
    return run_dir / _FETCHING / step_name(copy.manifest.iteration)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    _log.info("%s was removed: an interrupted fetch left it", path)


def _refuse_stop(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise CopyStoppedError("copying was stopped, because the run ends")


def _is_same(found: Digest, record: FileRecord) -> bool:
    return (found.bytes, found.xxh3_128) == (record.bytes, record.xxh3_128)


def _read_local(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
