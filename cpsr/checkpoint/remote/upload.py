"""Copies one committed checkpoint to a target under the commit protocol, and removes old copies."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cpsr.checkpoint.direct_file import read_pieces
from cpsr.checkpoint.file_hash import Digest
from cpsr.checkpoint.files import hash_file, open_plain, read_bytes
from cpsr.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    commit_record,
    frozen_writer,
    holds_frozen,
    rank_manifest_name,
)
from cpsr.checkpoint.remote.catalogue import SET_ASIDE, Copy, owner_of, read_rank, scan
from cpsr.checkpoint.remote.identity import IDENTITY, Identity
from cpsr.checkpoint.remote.place import Place, TargetAbsentError, digest_of
from cpsr.checkpoint.verify import DamagedFileError, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, RunMismatchError, TargetError

__all__ = ["CopyStoppedError", "Uploaded", "retain", "set_aside", "upload"]

_CHUNK_BYTES = 4 << 20
_DAMAGED = "is not what was committed, and is not copied: its size or xxh3-128 differs"

_log = logging.getLogger(__name__)


class CopyStoppedError(TargetError):
    """Copying was asked to stop; what is at the target is not committed."""


@dataclass(frozen=True)
class Uploaded:
    """Tensor bytes of a copy, and its seconds, reading back included."""

    bytes: int
    seconds: float


def upload(
    place: Place,
    directory: Path,
    identity: Identity,
    stopped: Callable[[], bool],
    earlier: Sequence[Copy] = (),
    known: set[str] | None = None,
) -> Uploaded:
    """Copy a committed checkpoint of all ranks; it exists at the target once this returns.

    Every file is read back from the target and compared with its record. The manifests come after all files, and the
    commit record last. Files of an earlier upload in the folder are removed first. Where the target permits it, several
    parts and files are sent at a time, and one is read back meanwhile.

    A file of frozen weights that an earlier copy of the run has is not sent: the target copies it.

    Args:
        place: the target.
        directory: the checkpoint; it must stay whole meanwhile.
        identity: of the run.
        stopped: checked between pieces.
        earlier: copies of the run at the target, in the order of their commits.
        known: hashes of files that this process has read back from the target; grows. Others are read back once more.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, gone, or cannot be read now.
        TargetError: the target failed, or returned other bytes; or `stopped`.
        RunMismatchError: another run has begun to write into this folder.
    """
    started = time.perf_counter()
    folder = directory.name
    manifest = read_manifest(directory)
    manifest_bytes = _read_local(directory / MANIFEST)
    place.remove(folder, first=COMMIT)
    place.make(folder)
    place.write(folder, IDENTITY, identity.to_bytes())
    records = {rank: read_rank_manifest(directory, manifest, rank) for rank in sorted(manifest.ranks)}
    every = [(directory / name, record.files[name]) for record in records.values() for name in sorted(record.files)]
    known = set() if known is None else known
    there = _duplicated(place, folder, [file for file in every if holds_frozen(file[0].name)], earlier, known, stopped)
    files = [(path, record) for path, record in every if path.name not in there]
    if place.sends:
        _copy_beside(place, folder, files, stopped)
    else:
        for path, record in files:
            place.send(folder, path.name, _checked(path, record, stopped))
            found = digest_of(_until(place.chunks(folder, path.name), stopped))
            _refuse_other_bytes(place, folder, path, record, found)
    known |= {record.xxh3_128 for path, record in files if holds_frozen(path.name)}
    for rank in records:
        place.write(folder, rank_manifest_name(rank), _read_local(directory / rank_manifest_name(rank)))
    place.write(folder, MANIFEST, manifest_bytes)
    _refuse_other_writer(place, folder, identity)
    place.write(folder, COMMIT, commit_record(manifest_bytes))
    return Uploaded(manifest.state_bytes(), time.perf_counter() - started)


def set_aside(place: Place, folder: str, reason: str) -> None:
    """Mark a copy that no restart may use; it is removed once a later one is committed.

    Raises:
        TargetError: the target refused.
    """
    place.write(folder, SET_ASIDE, reason.encode())
    _log.warning("%s is set aside: %s", place.name(folder), reason)


def retain(place: Place, run_id: str, keep: int, before_removal: Callable[[str], None] = lambda _: None) -> list[str]:
    """Remove all but the newest copies; after one was committed and read back.

    Args:
        place: the target.
        run_id: whose target it is; unfinished copies of other runs are removed, too.
        keep: how many stay.
        before_removal: called with each folder first: an interrupted removal may leave an unusable copy.

    Returns:
        The folders that were removed.

    Raises:
        TargetError: the target refused; what is still committed there is valid.
        RunMismatchError: another run has begun to copy there.
    """
    found = scan(place, run_id)
    removed = [copy.folder for copy in found.copies[:-keep]] + found.set_aside + [*found.unfinished]
    removed += [folder for folder in found.damaged if owner_of(place, folder) == run_id]
    for folder in removed:
        before_removal(folder)
        place.remove(folder, first=COMMIT)
        _log.debug("%s was removed: newer copies are committed", place.name(folder))
    return removed


def _copy_beside(
    place: Place, folder: str, files: Iterable[tuple[Path, FileRecord]], stopped: Callable[[], bool]
) -> None:
    """Send several files at a time; each one is read back when it is written, while the others are under way."""
    left, failed = iter(files), threading.Event()
    under_way: dict[Future[Digest], tuple[Path, FileRecord]] = {}

    def check() -> None:
        _refuse_stop(lambda: failed.is_set() or stopped())

    try:
        while True:
            while len(under_way) < place.sends and (file := next(left, None)) is not None:
                check()
                path, record = file
                opened = _open_sized(path, record)
                under_way[place.begin(folder, path.name, opened, record.bytes, check)] = file
            if not under_way:
                return
            done = next(iter(wait(under_way, return_when=FIRST_COMPLETED).done))
            path, record = under_way.pop(done)
            _refuse_other_bytes(place, folder, path, record, place.finish(folder, path.name, done))
    finally:
        failed.set()
        wait(under_way)  # nothing of this attempt may reach a name during the next one


def _duplicated(
    place: Place,
    folder: str,
    files: Sequence[tuple[Path, FileRecord]],
    earlier: Sequence[Copy],
    known: set[str],
    stopped: Callable[[], bool],
) -> set[str]:
    """Names of those of these files that the target has copied from an earlier copy of the run."""
    done: set[str] = set()
    for copy in reversed(earlier):
        for path, record in files:
            name = path.name
            if name in done or copy.folder == folder or name not in copy.manifest.ranks[frozen_writer(name)].files:
                continue
            try:
                if _is_held(place, copy, name, record, known, stopped) and place.duplicate(
                    copy.folder, name, folder, record.bytes
                ):
                    done.add(name)
            except CopyStoppedError:
                raise
            except TargetError as error:
                _log.info("%s is sent again: %s", path, error)
    return done


def _is_held(
    place: Place, copy: Copy, name: str, record: FileRecord, known: set[str], stopped: Callable[[], bool]
) -> bool:
    """Whether a copy has this file; read back once by each process."""
    if not _same(read_rank(place, copy, frozen_writer(name))[0].files[name], record):
        return False
    if record.xxh3_128 not in known:
        if not _same(digest_of(_until(place.chunks(copy.folder, name), stopped)), record):
            return False
        known.add(record.xxh3_128)
    return True


def _refuse_other_bytes(place: Place, folder: str, path: Path, record: FileRecord, found: Digest) -> None:
    """Raise where what was read back is not what was committed; the local file then shows which side is damaged."""
    if _same(found, record):
        return
    try:
        here = hash_file(path, direct=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not _same(here, record):
        raise DamagedFileError(path, _DAMAGED)
    raise TargetError(f"{place.name(folder, path.name)}: what was read back differs from what was written")


def _same(found: Digest | FileRecord, record: FileRecord) -> bool:
    return (found.bytes, found.xxh3_128) == (record.bytes, record.xxh3_128)


def _checked(path: Path, record: FileRecord, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """The pieces of a local file; raises after the last one if they are not what was committed."""
    state, size = xxhash.xxh3_128(), 0
    for chunk in _until(_local_chunks(path), stopped):
        state.update(chunk)
        size += len(chunk)
        yield chunk
    if not _same(Digest(size, state.hexdigest()), record):
        raise DamagedFileError(path, _DAMAGED)


def _local_chunks(path: Path) -> Iterator[bytes]:
    descriptor = _open_local(path, direct=True)
    try:
        for piece in read_pieces(descriptor, _CHUNK_BYTES):
            yield bytes(piece)  # the file system may keep it
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _open_local(path: Path, *, direct: bool = False) -> int:
    try:
        return open_plain(path, direct=direct)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _open_sized(path: Path, record: FileRecord) -> int:
    descriptor = _open_local(path)
    if os.fstat(descriptor).st_size != record.bytes:
        os.close(descriptor)
        raise DamagedFileError(path, _DAMAGED)
    return descriptor


def _until(chunks: Iterator[bytes], stopped: Callable[[], bool]) -> Iterator[bytes]:
    for chunk in chunks:
        _refuse_stop(stopped)
        yield chunk


def _refuse_stop(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise CopyStoppedError("copying was stopped, because the run ends")


def _read_local(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _refuse_other_writer(place: Place, folder: str, identity: Identity) -> None:
    """Detect two runs that found the target empty at the same time: the last one to write its identity continues."""
    try:
        ours = identity.to_bytes()
        same = place.read(folder, IDENTITY, len(ours)) == ours
    except TargetAbsentError:
        same = False
    if not same:
        raise RunMismatchError(
            f"another run has written into {place.name(folder)} while this one did: two runs have the same target "
            f"{place.shown}. Its copies were not committed by this run; give each run a target of its own"
        )
