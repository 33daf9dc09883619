"""What is committed at a target.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cpsr.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    Manifest,
    RankManifest,
    commit_record,
    rank_manifest_name,
    step_iteration,
)
from cpsr.checkpoint.remote.place import Place, TargetAbsentError
from cpsr.checkpoint.replicated import missing_among
from cpsr.errors import RunMismatchError, TargetError

__all__ = [
    "IDENTITY",
    "SET_ASIDE",
    "Catalogue",
    "Copy",
    "CopyDamagedError",
    "is_identity_of",
    "owner_of",
    "read_copy",
    "read_rank",
]
__all__ += ["scan", "sealed", "verify"]

IDENTITY = "run.json"  # in the run's directory, and in every folder at a target
SET_ASIDE = "SET_ASIDE"

_Parsed = TypeVar("_Parsed")


class CopyDamagedError(TargetError):
    """A file of a committed copy is torn, missing or altered; the message names it."""


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
class Catalogue:
    """What lies at a target.

    Attributes:
        copies: committed and usable, in the order of their commits.
        damaged: folder -> what is wrong with its commit record or manifest.
        set_aside: folders of copies that no restart may use.
        unfinished: folders without a commit record.
    """

    copies: list[Copy]
    damaged: dict[str, str]
    set_aside: list[str]
    unfinished: list[str]

    @property
    def has_committed(self) -> bool:
        """Whether any copy was ever committed there, restorable or not."""
        return bool(self.copies or self.set_aside or self.damaged)


def scan(place: Place, run_id: str | None = None) -> Catalogue:
    """Read the commit records and manifests (not the tensors) at a target.

    Args:
        place: the target.
        run_id: whose target it must be; None takes any run's, if there is one only.

    Raises:
        RunMismatchError: another run's copies lie there. Unfinished copies do not count: the first run that commits
            a copy owns the target.
        TargetError: it cannot be read now.
    """
    found = Catalogue([], {}, [], [])
    for folder in place.folders():
        files = place.files(folder)
        if COMMIT not in files:
            found.unfinished.append(folder)
            continue
        try:
            copy = read_copy(place, folder)
            owner: str | None = copy.manifest.run_id
        except CopyDamagedError as error:
            copy, why, owner = None, str(error), owner_of(place, folder)
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
            found.copies.append(copy)
    found.copies.sort(key=lambda copy: (copy.manifest.sequence, copy.manifest.iteration))
    return found


def read_copy(place: Place, folder: str) -> Copy:
    """Read one copy's commit record, manifest and identity.

    Raises:
        CopyDamagedError: one of them is missing, torn or altered, or they do not belong together.
        TargetError: the target cannot be read now.
    """
    data = _read(place, folder, MANIFEST)
    if _read(place, folder, COMMIT) != commit_record(data):
        raise CopyDamagedError(f"{place.name(folder, COMMIT)} does not match {MANIFEST}; one is torn or altered")
    manifest = _parsed(place, folder, MANIFEST, lambda: Manifest.parse(data))
    identity = _unsealed(_read(place, folder, IDENTITY))
    if identity is None or not is_identity_of(identity, manifest):
        raise CopyDamagedError(f"{place.name(folder, IDENTITY)} is damaged, or not of the run of {MANIFEST}")
    if manifest.iteration != step_iteration(folder):
        raise CopyDamagedError(f"{place.name(folder, MANIFEST)} is not of its folder's iteration")
    return Copy(folder, manifest, data, identity)


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
    for copy in found.copies:
        records: dict[int, RankManifest] = {}
        for rank in copy.manifest.ranks:
            try:
                records[rank] = read_rank(place, copy, rank)[0]
            except CopyDamagedError as error:
                problems.append(str(error))
        for file, expected in [item for record in records.values() for item in record.files.items()]:
            try:
                same = place.digest(copy.folder, file).xxh3_128 == expected.xxh3_128
            except TargetAbsentError:
                problems.append(f"{place.name(copy.folder, file)} is missing, or no plain file")
                continue
            if not same:
                problems.append(f"{place.name(copy.folder, file)} is not what was committed: its xxh3-128 differs")
        for rank, what in missing_among(records):
            problems.append(f"{place.name(copy.folder, rank_manifest_name(rank))} {what}")
    return problems


def read_rank(place: Place, copy: Copy, rank: int) -> tuple[RankManifest, bytes]:
    """One rank's manifest, checked against that of all ranks, and its bytes."""
    name = rank_manifest_name(rank)
    data = _read(place, copy.folder, name)
    if hashlib.sha256(data).hexdigest() != copy.manifest.ranks[rank].sha256:
        raise CopyDamagedError(f"{place.name(copy.folder, name)}: its SHA-256 is not the one in {MANIFEST}")
    record = _parsed(place, copy.folder, name, lambda: RankManifest.parse(data))
    if {file: one.bytes for file, one in record.files.items()} != copy.manifest.ranks[rank].files:
        raise CopyDamagedError(f"{place.name(copy.folder, name)} lists other files than {MANIFEST}")
    return record, data


def _read(place: Place, folder: str, file: str) -> bytes:
    try:
        return place.read(folder, file)
    except TargetAbsentError as error:
        raise CopyDamagedError(f"{place.name(folder, file)} is missing, or no plain file") from error


def _parsed(place: Place, folder: str, file: str, parse: Callable[[], _Parsed]) -> _Parsed:
    try:
        return parse()
    except (ValueError, RecursionError) as error:
        raise CopyDamagedError(f"{place.name(folder, file)} is refused: {error}") from error


def owner_of(place: Place, folder: str) -> str | None:
    """The run that owns the folder by its `run.json`; None where that is damaged or gone."""
    try:
        return str(json.loads(_unsealed(place.read(folder, IDENTITY)) or b"")["run_id"])
    except (ValueError, RecursionError, KeyError, TypeError, TargetAbsentError):
        return None


def is_identity_of(identity: bytes, manifest: Manifest) -> bool:
    """Whether `run.json` is of the run that wrote a manifest."""
    try:
        known = json.loads(identity)
    except (ValueError, RecursionError):
        return False
    return isinstance(known, dict) and known.get("run_id") == manifest.run_id


def sealed(identity: bytes) -> bytes:
    """`run.json` with its own SHA-256 as the last line."""
    return identity + b"\n" + hashlib.sha256(identity).hexdigest().encode("ascii")


def _unsealed(data: bytes) -> bytes | None:
    """What `sealed` was given; None where it is torn or altered."""
    identity = data.rpartition(b"\n")[0]
    return identity if sealed(identity) == data else None
