"""What is committed at a target.

::

    <url>/checkpoints/step-0000000100/
        run.json                         whose checkpoint it is, before everything else
        rank-00000.params.safetensors    the files of the checkpoint, byte for byte
        ...
        rank-00000.json
        manifest.json
        COMMIT                           last of all; without it there is no copy
        SET_ASIDE                        only after a roll-back behind it, or if the copy is damaged
"""

import hashlib
from dataclasses import dataclass

from cpsr.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    Manifest,
    RankManifest,
    commit_record,
    rank_manifest_name,
    step_iteration,
)
from cpsr.checkpoint.remote.identity import IDENTITY, Identity
from cpsr.checkpoint.remote.place import Place, TargetAbsentError, digest_of
from cpsr.checkpoint.replicated import missing_among
from cpsr.errors import RunMismatchError, TargetError

__all__ = ["SET_ASIDE", "Catalogue", "Copy", "CopyDamagedError", "owner_of", "read_copy", "read_rank", "scan", "verify"]

SET_ASIDE = "SET_ASIDE"


class CopyDamagedError(TargetError):
    """A file of a committed copy is torn, missing or altered; the message names it."""


@dataclass(frozen=True)
class Copy:
    """One committed checkpoint at a target.

    Attributes:
        folder: its name there.
        manifest: of the whole checkpoint, checked against the commit record.
        manifest_bytes: the manifest's bytes, as written to a disk.
        identity: of the run.
    """

    folder: str
    manifest: Manifest
    manifest_bytes: bytes
    identity: Identity


@dataclass(frozen=True)
class Catalogue:
    """What lies at a target.

    Attributes:
        copies: committed and not set aside, in the order of their commits.
        set_aside: folders of the run that were set aside.
        unfinished: folder without a commit record -> the run that began it, None where that is not known.
        damaged: folder -> what is wrong with its commit record, manifest or identity.
    """

    copies: list[Copy]
    set_aside: list[str]
    unfinished: dict[str, str | None]
    damaged: dict[str, str]

    @property
    def has_committed(self) -> bool:
        """Whether any copy was ever committed there, restorable or not."""
        return bool(self.copies or self.set_aside or self.damaged)


def scan(place: Place, run_id: str | None = None) -> Catalogue:
    """Read the commit records, manifests and identities (not the tensors) at a target.

    Args:
        place: the target.
        run_id: whose target it must be; None takes any run's, if there is one only.

    Raises:
        RunMismatchError: another run's copies lie there. Unfinished copies do not count: the first run that commits
            a copy owns the target.
        TargetError: it cannot be read now.
    """
    found = Catalogue([], [], {}, {})
    for folder in place.folders():
        files = place.files(folder)
        owner = owner_of(place, folder) if IDENTITY in files else None
        if COMMIT not in files:
            found.unfinished[folder] = owner
            continue
        if owner is not None:
            run_id = run_id or owner
            _refuse_other(place, folder, owner, run_id)
        if SET_ASIDE in files and owner is not None:
            found.set_aside.append(folder)
        else:
            try:
                found.copies.append(read_copy(place, folder))
            except CopyDamagedError as error:
                found.damaged[folder] = str(error)
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
    try:
        manifest = Manifest.parse(data)
    except (ValueError, RecursionError) as error:
        raise CopyDamagedError(f"{place.name(folder, MANIFEST)} is refused: {error}") from error
    try:
        identity = Identity.parse(_read(place, folder, IDENTITY))
    except (ValueError, RecursionError) as error:
        raise CopyDamagedError(f"{place.name(folder, IDENTITY)} is refused: {error}") from error
    described = (manifest.run_id, manifest.world_size, manifest.iteration)
    if described != (identity.run_id, identity.world_size, step_iteration(folder)):
        raise CopyDamagedError(f"{place.name(folder, MANIFEST)} is not of its folder's run, world size and iteration")
    return Copy(folder, manifest, data, identity)


def read_rank(place: Place, copy: Copy, rank: int) -> tuple[RankManifest, bytes]:
    """One rank's manifest, and its bytes, as written to a disk.

    Raises:
        CopyDamagedError: it is missing, torn, altered, or not of this copy.
        TargetError: the target cannot be read now.
    """
    name = rank_manifest_name(rank)
    data = _read(place, copy.folder, name)
    if hashlib.sha256(data).hexdigest() != copy.manifest.ranks[rank].sha256:
        raise CopyDamagedError(f"{place.name(copy.folder, name)}: its SHA-256 is not the one in {MANIFEST}")
    try:
        record = RankManifest.parse(data)
    except (ValueError, RecursionError) as error:
        raise CopyDamagedError(f"{place.name(copy.folder, name)} is refused: {error}") from error
    if {file: one.bytes for file, one in record.files.items()} != copy.manifest.ranks[rank].files:
        raise CopyDamagedError(f"{place.name(copy.folder, name)} lists other files than {MANIFEST}")
    return record, data


def owner_of(place: Place, folder: str) -> str | None:
    """The run that owns the folder; None where its identity is damaged, or was just removed.

    Raises:
        TargetError: the target cannot be read now.
    """
    try:
        return Identity.parse(place.read(folder, IDENTITY)).run_id
    except (ValueError, RecursionError, TargetAbsentError):
        return None


def verify(place: Place) -> list[str]:
    """Everything that is wrong with the committed copies at a target; reads all of their bytes.

    Raises:
        TargetError: it cannot be read now.
        RunMismatchError: copies of several runs lie there.
    """
    found = scan(place)
    problems = list(found.damaged.values())
    for copy in found.copies:
        records: dict[int, RankManifest] = {}
        for rank in copy.manifest.ranks:
            try:
                record, _ = read_rank(place, copy, rank)
                records[rank] = record
            except CopyDamagedError as error:
                problems.append(str(error))
                continue
            for file, expected in record.files.items():
                try:
                    same = digest_of(place.chunks(copy.folder, file)).xxh3_128 == expected.xxh3_128
                except TargetAbsentError:
                    problems.append(f"{place.name(copy.folder, file)} is missing, or no plain file")
                    continue
                if not same:
                    problems.append(f"{place.name(copy.folder, file)} is not what was committed: its xxh3-128 differs")
        for rank, what in missing_among(records):
            problems.append(f"{place.name(copy.folder, rank_manifest_name(rank))} {what}")
    return problems


def _refuse_other(place: Place, folder: str, owner: str, run_id: str) -> None:
    if owner != run_id:
        raise RunMismatchError(
            f"the target {place.shown} holds copies of another run: {place.name(folder)} is of the run {owner!r}, this "
            f"is {run_id!r}. Nothing there was changed; give each run a target of its own, or, where that run is not "
            "needed any more, remove its folder"
        )


def _read(place: Place, folder: str, file: str) -> bytes:
    try:
        return place.read(folder, file)
    except TargetAbsentError as error:
        raise CopyDamagedError(f"{place.name(folder, file)} is missing, or no plain file") from error
