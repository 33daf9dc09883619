"""One copy at a target, fetched into a run directory under the commit protocol.

Files arrive in `<run_dir>/fetching/step-...`, where they form no checkpoint. One rename puts them in place when every
file was read back from the disk. A later fetch reuses files of an interrupted one if their hashes match.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

from cpsr.checkpoint.carried import put_verified
from cpsr.checkpoint.files import (
    hash_file,
    make_directory,
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
    holds_frozen,
    rank_manifest_name,
    step_name,
)
from cpsr.checkpoint.remote.catalogue import Copy, CopyDamagedError, read_rank
from cpsr.checkpoint.remote.place import Place, TargetAbsentError
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import check_file, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, SaveError

__all__ = ["discard_fetch", "fetch_ranks", "prepare_fetch", "put_in_place"]

_log = logging.getLogger(__name__)

_FOLDER = "fetching"


def prepare_fetch(run_dir: Path, copy: Copy) -> None:
    """Create the folder to fetch into, and remove files of other fetches (rank 0, before the others).

    Raises:
        OSError: the file system refused.
    """
    directory = _directory(run_dir, copy)
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
    if os.path.lexists(run_dir / _FOLDER):
        _remove(run_dir / _FOLDER)


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
    directory, fetched = _directory(run_dir, copy), 0
    for rank in ranks:
        record, data = read_rank(place, copy, rank)
        for name, expected in record.files.items():
            if not _is_there(directory / name, expected) and not _linked(run_dir, directory / name, expected):
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
    directory = _directory(run_dir, copy)
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
    shutil.rmtree(
        directory.parent, ignore_errors=True
    )  # only unneeded files are left in it; the next fetch removes them, too


def _linked(run_dir: Path, path: Path, expected: FileRecord) -> bool:
    """Link a file of frozen weights that a checkpoint in the run directory has; False where none has it whole."""
    if not holds_frozen(path.name):
        return False
    for source in sorted((run_dir / "checkpoints").glob(f"step-*/{path.name}"), reverse=True):
        if put_verified(path, source, expected, fsync=True, direct=False):
            return True
    return False


def _fetch(place: Place, copy: Copy, path: Path, expected: FileRecord) -> None:
    """Fetch one file under a temporary name, verify it against the commit, and rename it."""
    temporary = temporary_name(path)
    try:
        _receive(place, copy, path.name, temporary, expected)
        sync_file(temporary)
        found = hash_file(temporary)
        if (found.bytes, found.xxh3_128) != (expected.bytes, expected.xxh3_128):
            raise SaveError(f"{path}: what was read back differs from what was fetched; check the disk")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _receive(place: Place, copy: Copy, name: str, temporary: Path, expected: FileRecord) -> None:
    state, size = xxhash.xxh3_128(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o666), "wb", buffering=0) as opened:
        try:
            for chunk in place.chunks(copy.folder, name):
                size += len(chunk)
                if size > expected.bytes:
                    break  # not read to its end, which may be endless
                state.update(chunk)
                left = memoryview(chunk)
                while left:
                    left = left[os.write(opened.fileno(), left) :]
        except TargetAbsentError as error:
            raise CopyDamagedError(f"{place.name(copy.folder, name)} is missing, or no plain file") from error
    if (size, state.hexdigest()) != (expected.bytes, expected.xxh3_128):
        raise CopyDamagedError(
            f"{place.name(copy.folder, name)} is not what was committed: its size or xxh3-128 differs"
        )


def _is_there(path: Path, expected: FileRecord) -> bool:
    try:
        check_file(path, expected)
    except CheckpointError:
        return False
    return True


def _directory(run_dir: Path, copy: Copy) -> Path:
    # The name is made of a number: no text from a target becomes a path.
    return run_dir / _FOLDER / step_name(copy.manifest.iteration)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    _log.info("%s was removed: an interrupted fetch left it", path)
