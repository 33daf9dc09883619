"""What is committed in a run's directory, what was set aside there, and what stays.

Which checkpoints stay whole, which keep only their weights for the predictor, and which are deleted. Nothing is removed
before a later checkpoint was committed (and read back when it was written).
"""

import datetime
import logging
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cpsr.checkpoint.files import is_temporary, remove_tree, sync_directory, write_bytes
from cpsr.checkpoint.manifest import COMMIT, THINNED, Manifest, holds_weights, step_iteration, thinned_record
from cpsr.checkpoint.verify import (
    DamagedFileError,
    Problem,
    UnreadableFileError,
    is_committed,
    is_thinned,
    read_manifest,
)

__all__ = ["Catalogue", "CheckpointInfo", "Retention", "RetentionPlan", "SetAside", "newest_whole", "plan_retention"]
__all__ += ["remove_uncommitted", "retain", "scan", "scan_in_pieces", "set_aside"]
__all__ += ["set_aside_list", "warn_once"]

# Checkpoints between two yields of a scan: 0.1 ms each, with few ranks.
CHECKPOINTS_AT_ONCE = 8

# A checkpoint that was set aside: why, its step, the newest commit at that time, and a number.
_ASIDE = re.compile(r"(?P<kind>damaged|abandoned)-(?P<step>step-\d+)-(?P<sequence>\d+)-\d+")

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
    """A damaged or abandoned checkpoint under its new name.

    Attributes:
        directory: its new name.
        kind: `damaged` or `abandoned`.
        iteration: of its state.
        after_sequence: the newest commit at the time it was moved.
        bytes: that it takes.
    """

    directory: Path
    kind: str
    iteration: int
    after_sequence: int
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


def set_aside(directory: Path, kind: Literal["damaged", "abandoned"], reason: str, after_sequence: int) -> Path | None:
    """Rename a checkpoint to `<kind>-step-...-<sequence>-<n>`, so that its iteration can be committed again.

    Args:
        directory: of the checkpoint.
        kind: why.
        reason: for the log.
        after_sequence: the newest commit; the checkpoint goes once two later ones exist.

    Returns:
        The new name, None where the checkpoint is no longer there.
    """
    if not directory.is_dir():
        return None
    named = f"{kind}-{directory.name}-{after_sequence}-"
    taken = {path.name for path in directory.parent.iterdir()}
    target = directory.with_name(next(f"{named}{n}" for n in range(len(taken) + 1) if f"{named}{n}" not in taken))
    directory.rename(target)
    sync_directory(directory.parent)
    _log.warning("checkpoint %s is set aside as %s: %s", directory, target.name, reason)
    return target


def set_aside_list(checkpoints: Path) -> list[SetAside]:
    """The directories that were set aside, oldest first; none where there is no such directory."""
    found = []
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        matched = _ASIDE.fullmatch(path.name)
        iteration = step_iteration(matched["step"]) if matched else None
        if matched and iteration is not None and path.is_dir() and not path.is_symlink():
            try:
                size = sum(one.lstat().st_size for one in path.iterdir())
            except FileNotFoundError:
                continue  # retention removes it meanwhile
            found.append(SetAside(path, matched["kind"], iteration, int(matched["sequence"]), size))
    return sorted(found, key=lambda aside: (aside.after_sequence, aside.directory.name))


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


_COMMITS_BEFORE_REMOVAL = 2  # a checkpoint that was set aside is deleted once this many later ones exist


@dataclass(frozen=True)
class Retention:
    """How much of a run's checkpoints is kept.

    Attributes:
        history_span_iterations: weights of checkpoints this far back are kept for the predictor.
        history_min_checkpoints: checkpoints kept for the predictor even where they span more.
        full_checkpoints: newest checkpoints that keep the moments: training can restart there.
        disk_limit_bytes: of all checkpoints of the run together; None: the size of the disk.
    """

    history_span_iterations: int = 400
    history_min_checkpoints: int = 4
    full_checkpoints: int = 2
    disk_limit_bytes: int | None = None

    def history_checkpoints(self, interval_iterations: int) -> int:
        """Number of checkpoints kept for the predictor, with this interval between two of them."""
        return max(self.history_min_checkpoints, self.history_span_iterations // interval_iterations + 1)


@dataclass(frozen=True)
class RetentionPlan:
    """Iterations to thin and to delete, each ascending."""

    thin: list[int]
    delete: list[int]


def plan_retention(
    checkpoints: Sequence[CheckpointInfo],
    rules: Retention,
    thinned_bytes: dict[int, int],
    other_bytes: int = 0,
    pinned: int | None = None,
    copied: int | None = None,
    carried: Mapping[int, Mapping[str, int]] | None = None,
) -> RetentionPlan:
    """Decide about committed checkpoints.

    Args:
        checkpoints: ascending in iteration.
        rules: spans, counts and the cap on the disk.
        thinned_bytes: iteration -> bytes that remain of a checkpoint when it is thinned.
        other_bytes: bytes of the run's checkpoints that are not in the list but count against the cap.
        pinned: a checkpoint that stays whole, with the history that led to it, as if it were the newest.
        copied: a checkpoint that stays whole, because it is being copied elsewhere.
        carried: iteration -> files that others may share, with their bytes; those of one name are one on the disk.
    """
    if not checkpoints:
        return RetentionPlan([], [])
    newest = checkpoints[-1].iteration if pinned is None else min(pinned, checkpoints[-1].iteration)
    until_newest = [info for info in checkpoints if info.iteration <= newest]
    recent = {info.iteration for info in until_newest[-rules.history_min_checkpoints :]}
    whole = {info.iteration for info in checkpoints if info.full}
    keep_whole = set(sorted(whole)[-rules.full_checkpoints :]) | {
        iteration for iteration in whole if iteration in (pinned, copied)
    }
    kept = [
        info
        for info in checkpoints
        if info.iteration in keep_whole | recent or newest - info.iteration <= rules.history_span_iterations
    ]
    sizes = {
        info.iteration: info.bytes if info.iteration in keep_whole else thinned_bytes[info.iteration] for info in kept
    }
    twice = _Shared(carried or {}, keep_whole)
    # Over the cap, delete the oldest history first, then older whole ones, never the newest whole one.
    for iteration in [*sorted(set(sizes) - keep_whole), *sorted(keep_whole)[:-1]]:
        taken = sum(sizes.values()) - twice.bytes(sizes) + other_bytes
        if rules.disk_limit_bytes is None or taken <= rules.disk_limit_bytes:
            break
        del sizes[iteration]
    return RetentionPlan(
        thin=sorted((whole - keep_whole) & sizes.keys()),
        delete=sorted({info.iteration for info in checkpoints} - sizes.keys()),
    )


class _Shared:
    """Bytes that checkpoint sizes count more than once, because later ones carry files of earlier ones."""

    def __init__(self, carried: Mapping[int, Mapping[str, int]], whole: Collection[int]) -> None:
        self._sizes = {
            iteration: {name: size for name, size in files.items() if iteration in whole or holds_weights(name)}
            for iteration, files in carried.items()
        }

    def bytes(self, kept: Collection[int]) -> int:
        """Such bytes among these checkpoints."""
        files = [self._sizes.get(iteration, {}) for iteration in kept]
        distinct = {name: size for one in files for name, size in one.items()}
        return sum(sum(one.values()) for one in files) - sum(distinct.values())


def retain(
    checkpoints: Path,
    rules: Retention,
    *,
    pinned: int | None = None,
    copied: int | None = None,
) -> RetentionPlan:
    """Apply the rules to a run's directory, after a commit; also completes interrupted earlier passes.

    Args:
        checkpoints: the run's `checkpoints` directory.
        rules: spans, counts and the cap on the disk.
        pinned: see `plan_retention`.
        copied: see `plan_retention`.

    Raises:
        OSError: the file system refused; what is still there is still valid.
        CheckpointError: a checkpoint became damaged or unreadable meanwhile; remaining ones are valid.
    """
    catalogue = scan(checkpoints)
    if not catalogue.checkpoints:
        return RetentionPlan([], [])
    asides = _remove_asides(checkpoints, catalogue)
    newest = max(catalogue.checkpoints, key=lambda info: info.sequence)
    remove_uncommitted(checkpoints, before=newest.iteration)
    manifests = {info.iteration: read_manifest(info.directory) for info in catalogue.checkpoints}
    remaining = {iteration: manifest.history_bytes() for iteration, manifest in manifests.items()}
    carried = {iteration: manifest.shared_files() for iteration, manifest in manifests.items()}
    other_bytes = sum(aside.bytes for aside in asides)
    plan = plan_retention(catalogue.checkpoints, rules, remaining, other_bytes, pinned, copied, carried)
    directories = {info.iteration: info.directory for info in catalogue.checkpoints}
    for iteration in plan.thin:
        _thin(directories[iteration])
    for iteration in plan.delete:
        remove_tree(directories[iteration], first=COMMIT)
        _log.debug("checkpoint %s was deleted: outside the history that is kept", directories[iteration])
    for info in catalogue.checkpoints:
        if not info.full and info.iteration not in plan.delete:
            _unlink_thinned(info.directory)
    _warn_over_limit(rules, remaining, catalogue, plan, carried)
    return plan


def remove_uncommitted(checkpoints: Path, *, before: int | None = None, after: int = -1) -> None:
    """Remove saves that never were committed, at iterations from `after` to `before` (exclusive), and temporary files.

    Once a later step was committed, every rank's writer is past the earlier ones, and none writes there.
    """
    for directory in sorted(checkpoints.iterdir()):
        iteration = step_iteration(directory.name)
        if iteration is None or iteration <= after or (before is not None and iteration >= before):
            continue
        if directory.is_symlink():  # the target of a link is not ours
            continue
        try:
            committed = is_committed(directory)
        except UnreadableFileError as error:
            _log.warning("%s stays: whether it was committed cannot be read now (%s)", directory, error)
            continue
        if not committed:
            remove_tree(directory, first=COMMIT)
            _log.warning("%s was removed: it has no commit record (a save or a deletion was cut off)", directory)
            continue
        for path in [path for path in directory.iterdir() if is_temporary(path)]:
            path.unlink(missing_ok=True)
            _log.warning("%s was removed: left by a process that was killed", path)


def _thin(directory: Path) -> None:
    write_bytes(directory / THINNED, thinned_record(read_manifest(directory)))
    _unlink_thinned(directory)
    sync_directory(directory)
    _log.debug("checkpoint %s was thinned to its weights", directory)


def _unlink_thinned(directory: Path) -> None:
    for name in read_manifest(directory).thinned_files():
        (directory / name).unlink(missing_ok=True)


def _remove_asides(checkpoints: Path, catalogue: Catalogue) -> list[SetAside]:
    """Remove what was set aside long enough ago; returns what stays."""
    kept: list[SetAside] = []
    for aside in set_aside_list(checkpoints):
        later = sum(info.sequence > aside.after_sequence for info in catalogue.checkpoints)
        if later < _COMMITS_BEFORE_REMOVAL:
            kept.append(aside)
            continue
        remove_tree(aside.directory, first=COMMIT)
        _log.info("%s was deleted: %d later checkpoints are committed", aside.directory, later)
    return kept


def _warn_over_limit(
    rules: Retention,
    remaining: dict[int, int],
    catalogue: Catalogue,
    plan: RetentionPlan,
    carried: Mapping[int, Mapping[str, int]],
) -> None:
    kept = [info for info in catalogue.checkpoints if info.iteration not in plan.delete]
    whole = {info.iteration for info in kept if info.full} - set(plan.thin)
    total = sum(remaining[info.iteration] if info.iteration in plan.thin else info.bytes for info in kept)
    total -= _Shared(carried, whole).bytes([info.iteration for info in kept])
    if rules.disk_limit_bytes is not None and total > rules.disk_limit_bytes:
        _log.warning(
            "checkpoints take %d bytes, more than disk_limit_bytes=%d: the newest whole one is never deleted",
            total,
            rules.disk_limit_bytes,
        )
