"""What is committed in a run's directory, and what was set aside there."""

import datetime
import json
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cpsr.checkpoint.files import sync_directory, write_bytes
from cpsr.checkpoint.manifest import Manifest, step_iteration
from cpsr.checkpoint.verify import (
    DamagedFileError,
    Problem,
    UnreadableFileError,
    is_committed,
    is_thinned,
    read_manifest,
)

__all__ = ["Catalogue", "CheckpointInfo", "SetAside", "newest_whole", "scan", "scan_in_pieces", "set_aside"]
__all__ += ["record_set_aside", "set_aside_list", "warn_once"]

# Checkpoints between two yields of a scan: 0.1 ms each, with few ranks.
CHECKPOINTS_AT_ONCE = 8

_RECORD = "SET_ASIDE"
_KINDS = ("damaged", "abandoned")

_log = logging.getLogger(__name__)
_warned: set[tuple[Path, str]] = set()

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        iteration: iteration of the state.
        directory: where it lies.
        full: False for thinned checkpoints; training can restart exactly from full ones only.
        bytes: tensor bytes on disk, all ranks together.
        world_size: ranks that wrote it.
        label: what the state came from (`scalars["origin"]`), None where that is not recorded.
        created: time of the commit (UTC).
        sequence: counts the commits of the run.
    """

    iteration: int
    directory: Path
    full: bool
    bytes: int
    world_size: int
    label: str | None
    created: datetime.datetime
    sequence: int


@dataclass(frozen=True)
class Catalogue:
    """What is committed in a run.

    Attributes:
        checkpoints: ascending in iteration.
        problems: directories with an invalid commit record.
        unreadable: directories whose commit record the file system cannot read now; they may be whole.
    """

    checkpoints: list[CheckpointInfo]
    problems: list[Problem]
    unreadable: list[Problem]


@dataclass(frozen=True)
class SetAside:
    """A damaged or abandoned checkpoint under its new name, and the newest commit at the time it was moved."""

    directory: Path
    after_sequence: int | None
    bytes: int


def scan(checkpoints: Path) -> Catalogue:
    """Read the commit records and manifests (not the tensors) of a run."""
    pieces = scan_in_pieces(checkpoints)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: Catalogue = end.value
            return found


def scan_in_pieces(checkpoints: Path) -> Generator[None, None, Catalogue]:
    """`scan` that yields after every few checkpoints, and after each unreadable one."""
    found = Catalogue([], [], [])
    for number, (iteration, directory) in enumerate(_steps(checkpoints), start=1):
        # An unreadable one is retried several times, which takes most of a second or more.
        if not _add(found, iteration, directory) or number % CHECKPOINTS_AT_ONCE == 0:
            yield
    found.checkpoints.sort(key=lambda info: info.iteration)
    return found


def newest_whole(checkpoints: Path, since: int = 0) -> tuple[Path, Manifest] | None:
    """The newest full checkpoint, found without reading all the others.

    Damaged ones are skipped, and logged once.

    Args:
        checkpoints: the run's directory of them.
        since: older ones do not count.

    Raises:
        CheckpointError: the file system cannot read a manifest on the way now.
        OSError: the directory cannot be read.
    """
    for iteration, directory in sorted(_steps(checkpoints), reverse=True):
        if iteration < since:
            break
        try:
            manifest = _of_committed(directory, read_manifest)
        except DamagedFileError as error:
            warn_once(checkpoints, f"checkpoint is skipped: {error}")
            continue
        if manifest is not None:
            return directory, manifest
    return None


def _steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """Directories by the name of a checkpoint, committed or not."""
    directories = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    named = ((step_iteration(directory.name), directory) for directory in directories)
    return [(iteration, directory) for iteration, directory in named if iteration is not None]


def _add(catalogue: Catalogue, iteration: int, directory: Path) -> bool:
    """Add a checkpoint to the catalogue; False where it cannot be read."""
    try:
        info = _of_committed(directory, _info)
    except DamagedFileError as error:
        catalogue.problems.append(Problem(error.file, error.what, iteration))
        return False
    except UnreadableFileError as error:
        catalogue.unreadable.append(Problem(error.file, error.what, iteration))
        return False
    if info is not None:
        catalogue.checkpoints.append(info)
    return True


def _of_committed(directory: Path, read: Callable[[Path], _Found]) -> _Found | None:
    """The entry of a checkpoint; None where there is no commit record."""
    if not is_committed(directory):
        return None
    try:
        return read(directory)
    except DamagedFileError:
        if is_committed(directory):
            raise
        return None  # a retention pass is deleting it at this moment


def warn_once(checkpoints: Path, message: str) -> None:
    """Log a message once: every checkpoint scans the directory again."""
    if (checkpoints, message) not in _warned:
        _warned.add((checkpoints, message))
        _log.warning("%s", message)


def set_aside(directory: Path, kind: str, reason: str, after_sequence: int) -> Path | None:
    """Rename a checkpoint to `<kind>-step-...-<n>`, so that its iteration can be committed again.

    Returns:
        The new name, None where the checkpoint is no longer there.
    """
    if not directory.is_dir():
        return None
    try:
        _write_record(directory, reason, after_sequence)
    except OSError as error:
        # The record only states when the directory may be deleted; the next retention pass rewrites it.
        _log.warning("%s: cannot record why it is set aside: %s", directory, error)
    taken = {path.name for path in directory.parent.iterdir()}
    number = next(n for n in range(len(taken) + 1) if f"{kind}-{directory.name}-{n}" not in taken)
    target = directory.with_name(f"{kind}-{directory.name}-{number}")
    directory.rename(target)
    sync_directory(directory.parent)
    _log.warning("checkpoint %s is set aside as %s: %s", directory, target.name, reason)
    return target


def set_aside_list(checkpoints: Path) -> list[SetAside]:
    """The directories that were set aside, oldest first."""
    found = [_read_aside(path) for path in checkpoints.iterdir() if _is_set_aside(path)]
    return sorted(found, key=lambda aside: (aside.after_sequence or 0, aside.directory.name))


def record_set_aside(directory: Path, after_sequence: int) -> None:
    """Write the record of a directory that was set aside, where it is missing or torn."""
    _write_record(directory, "not recorded", after_sequence)


def _is_set_aside(path: Path) -> bool:
    kind, _, step = path.name.partition("-")
    if path.is_symlink() or not path.is_dir():
        return False
    return kind in _KINDS and step_iteration(step.rpartition("-")[0]) is not None


def _read_aside(directory: Path) -> SetAside:
    try:
        after = int(json.loads((directory / _RECORD).read_bytes())["after_sequence"])
    except (OSError, ValueError, KeyError, TypeError):
        after = None  # unknown; the next retention pass writes it again
    return SetAside(directory, after, sum(path.lstat().st_size for path in directory.iterdir()))


def _write_record(directory: Path, reason: str, after_sequence: int) -> None:
    content = {"reason": reason, "after_sequence": after_sequence}
    write_bytes(directory / _RECORD, json.dumps(content).encode("ascii"))


def _info(directory: Path) -> CheckpointInfo:
    manifest = read_manifest(directory)
    thinned = is_thinned(directory, manifest)
    return CheckpointInfo(
        iteration=manifest.iteration,
        directory=directory,
        full=not thinned,
        bytes=manifest.history_bytes() if thinned else manifest.state_bytes(),
        world_size=manifest.world_size,
        label=manifest.label,
        created=datetime.datetime.fromtimestamp(manifest.created_unix_seconds, datetime.UTC),
        sequence=manifest.sequence,
    )
