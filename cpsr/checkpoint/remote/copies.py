"""Copies of checkpoints at a target: what is committed there, and how a copy is made, fetched, verified and removed.

::

    <url>/checkpoints/step-0000000100.<run>.<hash>/
        rank-00000.params-0000000100-0.0.safetensors    the slabs that the checkpoint lists, byte for byte
        ...
        rank-00000-0.0.json
        run.json                                        of the run's directory
        COMMIT                                          last of all; without it there is no copy

The hash in the name is of `COMMIT` and `run.json`: two jobs never write different bytes into one folder.

A copy that is fetched is no checkpoint while its directory is `fetching-step-...`: its manifests come first, so that no
slab is removed that they list, and then the slabs that the run does not have whole. One rename makes it one when every
file was read back from the disk. Names there are made of numbers: no text from a target becomes a path.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.files import (
    hash_file,
    make_directory,
    open_plain,
    read_bytes,
    remove_entry,
    sync_directory,
    sync_file,
    temporary_name,
    write_bytes,
)
from cpsr.checkpoint.manifest import (
    COMMIT,
    FileRecord,
    Manifest,
    RankManifest,
    rank_manifest_name,
    slab_path,
    step_name,
)
from cpsr.checkpoint.remote.place import CopyDamagedError, Place
from cpsr.checkpoint.replicated import missing_among
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import check_file, persistently, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError, RunMismatchError, SaveError, TargetError

__all__ = ["Copies", "fetch_parts", "prepare_fetch", "put_in_place", "read_copy", "scan", "upload", "verify"]

_FETCHING = "fetching-"  # what the name of a checkpoint's directory begins with, while it is fetched

_NAME = re.compile(r"step-\d{10,}\.(?P<run>[0-9A-Za-z_-]{1,64})\.[0-9a-f]{32}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copies:
    """What lies at a target.

    Attributes:
        usable: folder -> manifest of a committed copy, in the order of their commits.
        damaged: folder -> what is wrong with its commit record.
        unfinished: folders without a commit record.
    """

    usable: dict[str, Manifest]
    damaged: dict[str, str]
    unfinished: list[str]

    @property
    def folders(self) -> list[str]:
        """Of all of them."""
        return [*self.usable, *self.damaged, *self.unfinished]


def scan(place: Place, run_id: str | None = None) -> Copies:
    """Read the commit records at a target.

    Args:
        place: the target.
        run_id: whose target it must be; None takes any run's, if there is one only.

    Raises:
        RunMismatchError: another run's copies lie there. Unfinished copies do not count: the first run that commits
            a copy owns the target.
        TargetError: it cannot be read now.
    """
    usable, found = list[tuple[Manifest, str]](), Copies({}, {}, [])
    for named in filter(None, map(_NAME.fullmatch, place.list())):
        folder = named[0]
        if COMMIT not in place.list(folder):
            found.unfinished.append(folder)
            continue
        run_id = run_id or named["run"]
        if named["run"] != run_id:
            raise RunMismatchError(
                f"the target {place.shown} holds copies of another run: {place.name(folder)} is of the run "
                f"{named['run']!r}, this is {run_id!r}. No copy was changed; give each run a target of its own, "
                "or, where that run is not needed any more, remove its folder"
            )
        try:
            usable.append((read_copy(place, folder), folder))
        except CopyDamagedError as error:
            found.damaged[folder] = str(error)
    usable.sort(key=lambda item: (item[0].sequence, item[0].iteration))
    found.usable.update((folder, manifest) for manifest, folder in usable)
    return found


def read_copy(place: Place, folder: str) -> Manifest:
    """Read one copy's commit record, checked against its name.

    Raises:
        CopyDamagedError: one of them is missing, torn or altered, or they do not belong together.
        TargetError: the target cannot be read now.
    """
    data = place.read(folder, COMMIT)
    try:
        manifest = Manifest.parse(data)
    except ValueError as error:
        raise CopyDamagedError(f"{place.name(folder, COMMIT)} {error}") from error
    if folder != _folder_of(manifest, data, place.read(folder, IDENTITY)):
        raise CopyDamagedError(f"{place.name(folder)} is not named after its {COMMIT} and {IDENTITY}; one is altered")
    return manifest


def _read_rank(place: Place, folder: str, manifest: Manifest, rank: int) -> tuple[RankManifest, bytes]:
    """One rank's manifest, checked against that of all ranks, and its bytes; raises as `read_copy`."""
    name = rank_manifest_name(rank, manifest.save)
    data = place.read(folder, name)
    try:
        return RankManifest.parse_listed(data, manifest, rank), data
    except ValueError as error:
        raise CopyDamagedError(f"{place.name(folder, name)} {error}") from error


def verify(place: Place) -> list[str]:
    """Everything that is wrong with the committed copies at a target; reads all of their bytes.

    Raises:
        TargetError: it cannot be read now.
        RunMismatchError: copies of several runs lie there, or nothing was ever committed there.
    """
    found = scan(place)
    if not found.usable and not found.damaged:
        raise RunMismatchError(f"nothing is committed at {place.shown}; name what a run has as checkpoint.target")
    problems = list(found.damaged.values())
    for folder, manifest in found.usable.items():
        records: dict[int, RankManifest] = {}
        for rank in manifest.ranks:
            try:
                records[rank] = _read_rank(place, folder, manifest, rank)[0]
            except CopyDamagedError as error:
                problems.append(str(error))
        for file, expected in [item for record in records.values() for item in record.files.items()]:
            try:
                place.check(folder, file, expected)
            except CopyDamagedError as error:
                problems.append(str(error))
        for rank, what in missing_among(records):
            problems.append(f"{place.name(folder, rank_manifest_name(rank, manifest.save))} {what}")
    return problems


def upload(place: Place, directory: Path, earlier: Mapping[str, Manifest] | None = None) -> Manifest:
    """Copy a committed checkpoint of all ranks; it exists at the target once this returns.

    Every file is read back from the target and compared with its record. The manifests come after all slabs, and the
    commit record last.

    Args:
        place: the target.
        directory: the checkpoint, in its run's directory; it must stay whole meanwhile.
        earlier: usable copies at the target, from which it takes slabs that they list, too.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, gone, or cannot be read now.
        TargetError: the target failed, returned other bytes, or lost files of the copy meanwhile.
        RunMismatchError: another run has committed a copy there meanwhile.
    """
    manifest = read_manifest(directory)
    if manifest.weights_only:
        raise CheckpointError(f"{directory} was thinned to its weights meanwhile; a newer one is copied next")
    data = manifest.to_bytes()
    identity = persistently(read_bytes, directory.parents[1] / IDENTITY)
    if _run_in(identity) != manifest.run_id:
        raise CheckpointError(f"the {IDENTITY} beside {directory.parent} is damaged, or of another run")
    folder = _folder_of(manifest, data, identity)
    place.drop(folder)
    place.make(folder)
    records = [read_rank_manifest(directory, manifest, rank) for rank in sorted(manifest.ranks)]
    files = {name: record.files[name] for record in records for name in sorted(record.files)}
    for name, expected in files.items():
        if not _repeat(place, folder, name, expected, earlier or {}):
            _put(place, folder, slab_path(directory, name), expected)
    parts = {name: persistently(read_bytes, directory / name) for name in manifest.parts}
    small = parts | {IDENTITY: identity}
    for name, content in small.items():
        place.write(folder, name, content)
    scan(place, manifest.run_id)  # two runs may have found the target empty at the same time
    if lost := (files.keys() | small.keys()) - set(place.list(folder)):
        raise TargetError(f"{place.name(folder, min(lost))} is gone: another job removes files at this target")
    place.write(folder, COMMIT, data)
    return manifest


def prepare_fetch(store: CheckpointStore, iteration: int | None) -> None:
    """Create the directory to fetch into, and end other fetches (rank 0, before the others); None ends them all.

    Raises:
        SaveError: a symbolic link is in the place of the slabs.
        OSError: the file system failed.
    """
    wanted = None if iteration is None else _fetched_to(store, iteration)
    for path in list(store.directory.glob(f"{_FETCHING}*")):
        if path.is_symlink():  # nothing is written through it
            path.unlink()
        elif path != wanted:
            shutil.rmtree(path, ignore_errors=True)
    if wanted is not None:
        make_directory(wanted)
        make_directory(slab_path(wanted, ""))


def _fetched_to(store: CheckpointStore, iteration: int) -> Path:
    directory = store.directory_of(iteration)
    return directory.with_name(f"{_FETCHING}{directory.name}")


def fetch_parts(place: Place, folder: str, store: CheckpointStore, first: int, step: int) -> None:
    """Fetch the parts of every `step`-th rank of a copy: the manifest, and the slabs that are not whole here.

    Raises:
        CopyDamagedError: a file of the copy is missing or is not what was committed.
        TargetError: the target cannot be read now.
        SaveError: what was read back from the disk differs.
        OSError: the file system failed. The next fetch uses the files that are whole.
    """
    manifest = read_copy(place, folder)
    directory = _fetched_to(store, manifest.iteration)
    for rank in range(first, manifest.world_size, step):
        record, data = _read_rank(place, folder, manifest, rank)
        write_bytes(directory / rank_manifest_name(rank, manifest.save), data)
        for name, expected in record.files.items():
            _fetch_file(place, folder, slab_path(directory, name), expected)
    sync_directory(slab_path(directory, ""))


def put_in_place(place: Place, folder: str, store: CheckpointStore) -> int:
    """Commit what all ranks have fetched (rank 0, after them).

    Returns:
        Its iteration.

    Raises:
        CheckpointError: the manifests do not fit together, or cannot be read back.
        OSError: the file system refused.
    """
    manifest = read_copy(place, folder)
    directory = _fetched_to(store, manifest.iteration)
    own = set(manifest.parts)
    for path in [path for path in directory.iterdir() if path.name not in own]:
        remove_entry(path)
    for rank in manifest.ranks:
        read_rank_manifest(directory, manifest, rank)
    write_bytes(directory / COMMIT, manifest.to_bytes())
    store.quarantine(manifest.iteration, f"a whole copy was fetched from {place.shown}")
    directory.rename(store.directory_of(manifest.iteration))
    sync_directory(store.directory)
    return manifest.iteration


def _folder_of(manifest: Manifest, data: bytes, identity: bytes) -> str:
    """Folder of a copy, by its commit record, that one's bytes, and `run.json`."""
    digest = hashlib.sha256(data + identity).hexdigest()[:32]
    return f"{step_name(manifest.iteration)}.{manifest.run_id}.{digest}"


def _run_in(identity: bytes) -> object:
    """The run of a `run.json`; None where it is damaged."""
    try:
        return json.loads(identity)["run_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _put(place: Place, folder: str, path: Path, record: FileRecord) -> None:
    """Send a file; a difference in what is read back tells which side is damaged."""
    persistently(lambda plain: os.close(open_plain(plain)), path)  # what a link leads to is not sent
    try:
        place.put(folder, path, record)
    except CopyDamagedError as error:
        check_file(path, record)
        raise TargetError(f"what was read back differs from what was written: {error}") from error


def _repeat(place: Place, folder: str, name: str, record: FileRecord, earlier: Mapping[str, Manifest]) -> bool:
    """Let the target copy a slab from the newest copy that lists it; False where none has it whole."""
    having = [one for one, manifest in earlier.items() if manifest.files.get(name) == record.listed]
    try:
        if having:
            place.repeat(folder, name, having[-1], record)
        return bool(having)
    except TargetError as error:
        _log.info("%s is sent again: %s", place.name(folder, name), error)
        return False


def _fetch_file(place: Place, folder: str, path: Path, expected: FileRecord) -> None:
    """Fetch a file that is not there whole under a temporary name, read it back and rename it."""
    with contextlib.suppress(CheckpointError):
        check_file(path, expected)
        return
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            for piece in place.open(folder, path.name, expected):
                file.write(piece)
        sync_file(temporary)
        if expected.first_difference(hash_file(temporary)) is not None:
            raise SaveError(f"{path}: what was read back differs from what was fetched; check the disk")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
