"""Copies of checkpoints at a target: what is committed there, how a copy is made, verified and removed.

::

    <url>/checkpoints/step-0000000100/
        run.json                         whose checkpoint it is, with its own SHA-256, before everything else
        rank-00000.params.safetensors    the files of the checkpoint, byte for byte
        ...
        rank-00000.json
        manifest.json
        COMMIT                           last of all; without it there is no copy
        SET_ASIDE                        only after a roll-back behind it, or if the copy is damaged
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.files import (
    hash_file,
    make_directory,
    open_plain,
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
    Manifest,
    RankManifest,
    commit_record,
    frozen_writer,
    holds_frozen,
    rank_manifest_name,
    step_name,
)
from cpsr.checkpoint.remote.place import CopyDamagedError, CopyStoppedError, Place
from cpsr.checkpoint.replicated import missing_among
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import check_file, persistently, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, RunMismatchError, SaveError, TargetError

__all__ = ["FETCHING", "IDENTITY", "Copies", "Copy", "fetch_rank", "prepare_fetch", "put_in_place", "read_copy"]
__all__ += ["remove_old", "scan", "set_aside", "upload", "verify"]

IDENTITY = "run.json"  # in the run's directory, and in every folder at a target
SET_ASIDE = "SET_ASIDE"
FETCHING = "fetching"  # in the run's directory, where a copy arrives

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """One committed checkpoint at a target.

    Attributes:
        folder: its name there.
        manifest: of the whole checkpoint, checked against the commit record.
        manifest_bytes: the manifest's bytes, as written to a disk.
        identity: `run.json` of the run.
    """

    folder: str
    manifest: Manifest
    manifest_bytes: bytes
    identity: bytes


@dataclass(frozen=True)
class Copies:
    """What lies at a target.

    Attributes:
        usable: committed and not set aside, in the order of their commits.
        damaged: folder -> what is wrong with its commit record or manifest.
        set_aside: folders of copies that no restart may use.
        unfinished: folders without a commit record.
    """

    usable: list[Copy]
    damaged: dict[str, str]
    set_aside: list[str]
    unfinished: list[str]

    @property
    def has_committed(self) -> bool:
        """Whether any copy was ever committed there, restorable or not."""
        return bool(self.usable or self.set_aside or self.damaged)


def scan(place: Place, run_id: str | None = None) -> Copies:
    """Read the commit records and manifests (not the tensors) at a target.

    Args:
        place: the target.
        run_id: whose target it must be; None takes any run's, if there is one only.

    Raises:
        RunMismatchError: another run's copies lie there. Unfinished copies do not count: the first run that commits
            a copy owns the target.
        TargetError: it cannot be read now.
    """
    found = Copies([], {}, [], [])
    for folder in place.folders():
        files = place.files(folder)
        if COMMIT not in files:
            found.unfinished.append(folder)
            continue
        try:
            copy = read_copy(place, folder)
            owner: str | None = copy.manifest.run_id
        except CopyDamagedError as error:
            copy, why, owner = None, str(error), _owner_of(place, folder)
        run_id = run_id or owner
        if owner not in (None, run_id):
            raise RunMismatchError(
                f"the target {place.shown} holds copies of another run: {place.name(folder)} is of the run {owner!r}, "
                f"this is {run_id!r}. Nothing there was changed; give each run a target of its own, or, where that run "
                "is not needed any more, remove its folder"
            )
        if copy is None:
            found.damaged[folder] = why
        elif SET_ASIDE in files:
            found.set_aside.append(folder)
        else:
            found.usable.append(copy)
    found.usable.sort(key=lambda copy: (copy.manifest.sequence, copy.manifest.iteration))
    return found


def read_copy(place: Place, folder: str) -> Copy:
    """Read one copy's commit record, manifest and identity.

    Raises:
        CopyDamagedError: one of them is missing, torn or altered, or they do not belong together.
        TargetError: the target cannot be read now.
    """
    data = place.read(folder, MANIFEST)
    if place.read(folder, COMMIT) != commit_record(data):
        raise CopyDamagedError(f"{place.name(folder, COMMIT)} does not match {MANIFEST}; one is torn or altered")
    try:
        manifest = Manifest.parse_of(data, folder)
    except ValueError as error:
        raise CopyDamagedError(f"{place.name(folder, MANIFEST)} {error}") from error
    identity = _unsealed(place.read(folder, IDENTITY))
    if _run_in(identity) != manifest.run_id:
        raise CopyDamagedError(f"{place.name(folder, IDENTITY)} is damaged, or not of the run of {MANIFEST}")
    return Copy(folder, manifest, data, identity)


def read_rank(place: Place, copy: Copy, rank: int) -> tuple[RankManifest, bytes]:
    """One rank's manifest, checked against that of all ranks, and its bytes; raises as `read_copy`."""
    name = rank_manifest_name(rank)
    data = place.read(copy.folder, name)
    try:
        return RankManifest.parse_listed(data, copy.manifest, rank), data
    except ValueError as error:
        raise CopyDamagedError(f"{place.name(copy.folder, name)} {error}") from error


def verify(place: Place) -> list[str]:
    """Everything that is wrong with the committed copies at a target; reads all of their bytes.

    Raises:
        TargetError: it cannot be read now.
        RunMismatchError: copies of several runs lie there, or nothing was ever committed there.
    """
    found = scan(place)
    if not found.has_committed:
        raise RunMismatchError(f"nothing is committed at {place.shown}; name what a run has as checkpoint.target")
    problems = list(found.damaged.values())
    for copy in found.usable:
        records: dict[int, RankManifest] = {}
        for rank in copy.manifest.ranks:
            try:
                records[rank] = read_rank(place, copy, rank)[0]
            except CopyDamagedError as error:
                problems.append(str(error))
        for file, expected in [item for record in records.values() for item in record.files.items()]:
            try:
                if not place.holds(copy.folder, file, expected):
                    problems.append(f"{place.name(copy.folder, file)} is not what was committed: size or hash differ")
            except CopyDamagedError as error:
                problems.append(str(error))
        for rank, what in missing_among(records):
            problems.append(f"{place.name(copy.folder, rank_manifest_name(rank))} {what}")
    return problems


def upload(place: Place, directory: Path, earlier: Sequence[Copy] = ()) -> tuple[int, float]:
    """Copy a committed checkpoint of all ranks; it exists at the target once this returns.

    Every file is read back from the target and compared with its record. The manifests come after all files, and the
    commit record last. Files of an earlier upload in the folder are removed first. A file of frozen weights that an
    earlier copy has is not sent again: the target copies it.

    Args:
        place: the target.
        directory: the checkpoint, in its run's directory; it must stay whole meanwhile.
        earlier: copies of the run at the target, in the order of their commits.

    Returns:
        Tensor bytes of the copy, and its seconds, reading back included.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, gone, or cannot be read now.
        CopyStoppedError: `place.stopped` answered yes.
        TargetError: the target failed, or returned other bytes.
        RunMismatchError: another run has begun to write into this folder.
    """
    started, folder = time.perf_counter(), directory.name
    manifest, identity = read_manifest(directory), persistently(read_bytes, directory.parents[1] / IDENTITY)
    if _run_in(identity) != manifest.run_id:
        raise CheckpointError(f"the {IDENTITY} beside {directory.parent} is damaged, or of another run")
    sealed, manifest_bytes = _sealed(identity), persistently(read_bytes, directory / MANIFEST)
    place.remove(folder, first=COMMIT)
    place.make(folder)
    place.write(folder, IDENTITY, sealed)
    records = [read_rank_manifest(directory, manifest, rank) for rank in sorted(manifest.ranks)]
    for name, expected in [(name, record.files[name]) for record in records for name in sorted(record.files)]:
        if not (holds_frozen(name) and _duplicate(place, folder, name, expected, earlier)):
            _send(place, folder, directory / name, expected)
    for name in [rank_manifest_name(record.rank) for record in records]:
        place.write(folder, name, persistently(read_bytes, directory / name))
    place.write(folder, MANIFEST, manifest_bytes)
    if place.read(folder, IDENTITY) != sealed:  # two runs have found the target empty at the same time
        raise RunMismatchError(
            f"another run has written into {place.name(folder)} while this one did: two runs have the same target "
            f"{place.shown}. Its copies were not committed by this run; give each run a target of its own"
        )
    place.write(folder, COMMIT, commit_record(manifest_bytes))
    return sum(manifest.files().values()), time.perf_counter() - started


def set_aside(place: Place, folder: str, reason: str) -> None:
    """Mark a copy that no restart may use; it is removed once a later one is committed.

    Raises:
        TargetError: the target refused.
    """
    place.write(folder, SET_ASIDE, reason.encode())
    _log.warning("%s is set aside: %s", place.name(folder), reason)


def remove_old(place: Place, run_id: str, keep: int) -> None:
    """Remove all but the newest copies, and what was set aside, damaged or interrupted; after a commit.

    Args:
        place: the target.
        run_id: whose target it is; unfinished copies of other runs are removed, too.
        keep: how many stay.

    Raises:
        TargetError: the target refused; what is still committed there is valid.
        RunMismatchError: another run has begun to copy there.
    """
    found = scan(place, run_id)
    damaged = [folder for folder in found.damaged if _owner_of(place, folder) == run_id]
    for folder in [*(copy.folder for copy in found.usable[:-keep]), *damaged, *found.set_aside, *found.unfinished]:
        place.remove(folder, first=COMMIT)
        _log.debug("%s was removed: later copies are there", place.name(folder))


def _send(place: Place, folder: str, path: Path, record: FileRecord) -> None:
    """Send a file and read it back; a difference tells which side is damaged."""
    persistently(lambda plain: os.close(open_plain(plain)), path)  # what a link leads to is not sent
    place.send(folder, path)
    if not place.holds(folder, path.name, record):
        check_file(path, record, direct=True)
        raise TargetError(f"{place.name(folder, path.name)}: what was read back differs from what was written")


def _duplicate(place: Place, folder: str, name: str, record: FileRecord, earlier: Sequence[Copy]) -> bool:
    """Let the target copy a file from the newest copy that has it; False where none has it whole."""
    having = [one for one in earlier if one.folder != folder and _lists(one.manifest, name)]
    try:
        if having:
            place.duplicate(having[-1].folder, name, folder)
            return place.holds(folder, name, record)
    except CopyStoppedError:
        raise
    except TargetError as error:
        _log.info("%s is sent again: %s", place.name(folder, name), error)
    return False


def _lists(manifest: Manifest, name: str) -> bool:
    """Whether a copy has this file of frozen weights; its writer may be a rank that the run did not have then."""
    writer = manifest.ranks.get(frozen_writer(name))
    return writer is not None and name in writer.files


def _owner_of(place: Place, folder: str) -> str | None:
    """The run that owns the folder by its `run.json`; None where that is damaged or gone."""
    try:
        return _run_in(_unsealed(place.read(folder, IDENTITY)))
    except CopyDamagedError:
        return None


def _run_in(identity: bytes) -> str | None:
    """The run of a `run.json`; None where it is damaged."""
    try:
        return str(json.loads(identity)["run_id"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _sealed(identity: bytes) -> bytes:
    """`run.json` with its own SHA-256 as the last line."""
    return identity + b"\n" + hashlib.sha256(identity).hexdigest().encode("ascii")


def _unsealed(data: bytes) -> bytes:
    """What `_sealed` was given; nothing where it is torn or altered."""
    identity = data.rpartition(b"\n")[0]
    return identity if _sealed(identity) == data else b""


# Into the run directory. Names there are made of numbers: no text from a target becomes a path.


def prepare_fetch(run_dir: Path, copy: Copy) -> None:
    """Create the folder to fetch into, and remove files of other fetches (rank 0, before the others)."""
    directory = _fetching(run_dir, copy)
    for path in (directory.parent, directory):
        if path.is_symlink():  # nothing is written through it
            path.unlink()
    make_directory(directory)
    (directory / COMMIT).unlink(missing_ok=True)  # of another commit of this iteration, perhaps
    for other in directory.parent.iterdir():
        if other.name != directory.name:
            _remove(other)


def fetch_rank(place: Place, copy: Copy, rank: int, run_dir: Path) -> None:
    """Fetch the files of one rank that are not whole yet, and then its manifest.

    Raises:
        CopyDamagedError: a file of the copy is missing or is not what was committed.
        TargetError: the target cannot be read now.
        SaveError: what was read back from the disk differs.
        OSError: the file system failed. The next fetch uses the files that are whole.
    """
    directory = _fetching(run_dir, copy)
    record, data = read_rank(place, copy, rank)
    for name, expected in record.files.items():
        if not _is_there(directory / name, expected):
            _fetch_file(place, copy, directory / name, expected)
    sync_directory(directory)
    write_bytes(directory / rank_manifest_name(rank), data)


def _fetch_file(place: Place, copy: Copy, path: Path, expected: FileRecord) -> None:
    """Fetch one file under a temporary name, read it back and rename it; a difference tells which side is damaged."""
    temporary = temporary_name(path)
    try:
        place.receive(copy.folder, path.name, expected, temporary)
        sync_file(temporary)
        if expected.first_difference(hash_file(temporary, direct=True)) is None:
            temporary.replace(path)
            return
    finally:
        temporary.unlink(missing_ok=True)
    if place.holds(copy.folder, path.name, expected):
        raise SaveError(f"{path}: what was read back differs from what was fetched; check the disk")
    raise CopyDamagedError(f"{place.name(copy.folder, path.name)} is not what was committed: its hash differs")


def put_in_place(copy: Copy, run_dir: Path, store: CheckpointStore, reason: str) -> None:
    """Commit what all ranks have fetched, and move it to the run's checkpoints (rank 0, after them).

    Raises:
        CheckpointError: the manifests do not fit together, or cannot be read back.
        OSError: the file system refused.
    """
    directory = _fetching(run_dir, copy)
    listed = {rank_manifest_name(rank) for rank in copy.manifest.ranks}
    listed |= {name for record in copy.manifest.ranks.values() for name in record.files}
    for path in [path for path in directory.iterdir() if path.name not in listed]:
        _remove(path)
    write_bytes(directory / MANIFEST, copy.manifest_bytes)
    write_bytes(directory / COMMIT, commit_record(copy.manifest_bytes))
    manifest = read_manifest(directory)
    for rank in manifest.ranks:
        read_rank_manifest(directory, manifest, rank)
    make_directory(store.directory)
    store.quarantine(manifest.iteration, reason)
    directory.rename(store.directory / directory.name)
    sync_directory(store.directory)
    shutil.rmtree(directory.parent, ignore_errors=True)  # else the next fetch removes it


def _is_there(path: Path, expected: FileRecord) -> bool:
    try:
        check_file(path, expected)
    except CheckpointError:
        return False
    return True


def _fetching(run_dir: Path, copy: Copy) -> Path:
    return run_dir / FETCHING / step_name(copy.manifest.iteration)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
