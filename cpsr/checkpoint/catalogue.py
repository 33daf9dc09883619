"""What is committed in a run's directory, what was set aside there, and what stays.

Which checkpoints stay whole, which keep only their weights for the predictor, and which are deleted. Nothing is removed
before a later checkpoint was committed (and read back when it was written).
"""

import hashlib
import logging
import re
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cpsr.checkpoint.files import (
    exhaust,
    for_each,
    is_temporary,
    names_in,
    read_bytes,
    remove_entry,
    remove_tree,
    sync_directory,
    write_bytes,
)
from cpsr.checkpoint.manifest import (
    COMMIT,
    SLABS,
    FileRecord,
    Listing,
    Manifest,
    RankManifest,
    holds_frozen,
    holds_weights,
    is_rank_manifest,
    rank_manifest_name,
    saved_at,
    slab_path,
    step_iteration,
)
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.verify import (
    CheckpointFileError,
    DamagedFileError,
    UnreadableFileError,
    is_committed,
    persistently,
    stat_of,
)

__all__ = ["Catalogue", "Retention", "RetentionPlan", "SetAside"]
__all__ += ["plan_retention", "remove_unlisted", "retain", "scan", "scan_in_pieces", "set_aside"]
__all__ += ["warn_once"]

# Checkpoints between two yields of a scan: 0.1 ms each, with few ranks.
CHECKPOINTS_AT_ONCE = 8

# Slabs whose names and sizes are kept between two scans: 30 MB.
LISTED_MAX = 1 << 17
# Younger files are read again at the next scan: within one tick of its clock a file may change twice.
SETTLED_SECONDS = 1.0

# A checkpoint that was set aside: why, its step, the newest commit at that time, and a number.
_ASIDE = re.compile(r"(?P<kind>damaged|abandoned)-(?P<step>step-\d+)-(?P<sequence>\d+)-\d+")

_log = logging.getLogger(__name__)
_warned: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class SetAside:
    """A damaged or abandoned checkpoint under its new name.

    Attributes:
        directory: its new name.
        kind: `damaged` or `abandoned`.
        iteration: of its state.
        after_sequence: the newest commit at the time it was moved.
    """

    directory: Path
    kind: str
    iteration: int
    after_sequence: int


@dataclass(frozen=True)
class Catalogue:
    """What lies among the checkpoints of a run.

    Attributes:
        checkpoints: committed ones, ascending in iteration.
        problems: directories with an invalid commit record.
        unreadable: directories whose commit record the file system cannot read now; they may be whole.
        uncommitted: directories of saves that are under way or were cut off, by iteration.
        asides: what was set aside, oldest first.
    """

    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    problems: list[CheckpointFileError] = field(default_factory=list)
    unreadable: list[CheckpointFileError] = field(default_factory=list)
    uncommitted: dict[int, Path] = field(default_factory=dict)
    asides: list[SetAside] = field(default_factory=list)

    @property
    def newest_sequence(self) -> int:
        """Largest commit count, also of what was set aside later; 0: nothing was committed."""
        known = [info.listing.sequence for info in self.checkpoints] + [aside.after_sequence for aside in self.asides]
        return max(known, default=0)


class _KnownCommits:
    """Listings of the commit records that this process has read, while their files are the same on the disk."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Listing]] = {}

    def find(self, directory: Path, file: tuple[int, ...]) -> Listing | None:
        """That of a checkpoint whose record is this file; None where it must be read."""
        known = self._known.get(directory)
        return known[1] if known is not None and known[0] == file else None

    def add(self, directory: Path, file: tuple[int, ...], listing: Listing) -> None:
        """Keep one, if there is room for it."""
        self.forget(directory)
        if sum(len(known.sizes) for _, known in self._known.copy().values()) + len(listing.sizes) <= LISTED_MAX:
            self._known[directory] = file, listing

    def forget(self, directory: Path) -> None:
        """Let the next scan read a checkpoint's record again."""
        self._known.pop(directory, None)

    def keep(self, directories: Collection[Path]) -> None:
        """Forget all but those of these checkpoints, also those of other runs."""
        for other in self._known.copy().keys() - set(directories):
            self.forget(other)


_known_commits = _KnownCommits()


def scan(checkpoints: Path) -> Catalogue:
    """Read the commit records (not the tensors) of a run, but for those that are known."""
    return exhaust(scan_in_pieces(checkpoints))


def scan_in_pieces(checkpoints: Path) -> Generator[None, None, Catalogue]:
    """`scan` that yields after every few checkpoints, and after each unreadable one."""
    found = Catalogue()
    for number, path in enumerate(sorted(checkpoints.iterdir()) if checkpoints.is_dir() else (), start=1):
        iteration = step_iteration(path.name)
        if iteration is None:
            found.asides.extend(_aside(path))
            continue
        try:
            info = _committed(path)
            if info is not None:
                found.checkpoints.append(info)
            elif not path.is_symlink():  # the target of a link is not ours
                found.uncommitted[iteration] = path
        except CheckpointFileError as error:
            kind = found.problems if isinstance(error, DamagedFileError) else found.unreadable
            kind.append(error.without_frames())
            yield  # an unreadable one is retried several times, which takes most of a second or more
        if number % CHECKPOINTS_AT_ONCE == 0:
            yield
    _known_commits.keep([info.directory for info in found.checkpoints])
    found.checkpoints.sort(key=lambda info: info.iteration)
    found.asides.sort(key=lambda aside: (aside.after_sequence, aside.directory.name))
    return found


def _committed(directory: Path) -> SavedCheckpoint | None:
    """The entry of a checkpoint; None where there is no commit record."""
    found = stat_of(directory / COMMIT)
    if found is None:
        return None
    file = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    listing = _known_commits.find(directory, file)
    if listing is not None:
        return SavedCheckpoint(directory, listing=listing)
    try:
        saved = SavedCheckpoint(directory)
    except DamagedFileError:
        if is_committed(directory):
            raise
        return None  # a retention pass is deleting it at this moment
    if abs(time.time() - max(found.st_mtime, found.st_ctime)) > SETTLED_SECONDS:
        _known_commits.add(directory, file, saved.listing)
    return SavedCheckpoint(directory, listing=saved.listing)


def _aside(path: Path) -> list[SetAside]:
    """The entry of what was set aside; none for anything else, and where retention removes it meanwhile."""
    matched = _ASIDE.fullmatch(path.name)
    iteration = step_iteration(matched["step"]) if matched else None
    if matched is None or iteration is None:
        return []
    try:
        if not path.is_dir() or path.is_symlink():
            return []
    except OSError as error:
        warn_once(path.parent, f"{path} cannot be looked at: {error}")
    return [SetAside(path, matched["kind"], iteration, int(matched["sequence"]))]


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
    """Iterations to thin and to delete, each ascending, and the bytes that the run's checkpoints then take."""

    thin: list[int]
    delete: list[int]
    bytes: int


def plan_retention(
    checkpoints: Sequence[SavedCheckpoint],
    rules: Retention,
    others: Mapping[str, int] | None = None,
    stays: Collection[int | None] = (),
) -> RetentionPlan:
    """Decide about committed checkpoints.

    Args:
        checkpoints: ascending in iteration, at least one.
        rules: spans, counts and the cap on the disk.
        others: bytes of slabs that stay whatever is decided, and count against the cap.
        stays: checkpoints that stay whole: the one that is being copied elsewhere, and the newest that is verified.
    """
    newest = checkpoints[-1].iteration
    recent = {info.iteration for info in checkpoints[-rules.history_min_checkpoints :]}
    whole = [info.iteration for info in checkpoints if info.full]
    keep_whole = {*whole[-rules.full_checkpoints :], *(one for one in whole if one in stays)}
    kept = {
        info.iteration: _sizes(info.listing, whole=info.iteration in keep_whole)
        for info in checkpoints
        if info.iteration in keep_whole | recent or newest - info.iteration <= rules.history_span_iterations
    }
    # Over the cap, delete the oldest history first, then older whole ones, never the newest whole one.
    for iteration in [*sorted(kept.keys() - keep_whole), *sorted(keep_whole)[:-1]]:
        if rules.disk_limit_bytes is None or _taken(kept.values(), others) <= rules.disk_limit_bytes:
            break
        del kept[iteration]
    return RetentionPlan(
        thin=sorted((set(whole) - keep_whole) & kept.keys()),
        delete=sorted({info.iteration for info in checkpoints} - kept.keys()),
        bytes=_taken(kept.values(), others),
    )


def _sizes(listing: Listing, *, whole: bool) -> Mapping[str, int]:
    """Bytes of each slab that a checkpoint lists; unless whole, of weights alone."""
    if whole or listing.weights_only:
        return listing.sizes
    return {name: size for name, size in listing.sizes.items() if holds_weights(name)}


def _taken(kept: Iterable[Mapping[str, int]], others: Mapping[str, int] | None) -> int:
    """Bytes of all slabs; those that several checkpoints list count once."""
    taken = dict(others or {})
    for sizes in kept:
        taken.update(sizes)
    return sum(taken.values())


def retain(checkpoints: Path, rules: Retention, stays: Collection[int | None] = ()) -> RetentionPlan:
    """Apply the rules to a run's directory, after a commit; also completes interrupted earlier passes.

    Args:
        checkpoints: the run's `checkpoints` directory.
        rules: spans, counts and the cap on the disk.
        stays: see `plan_retention`.

    Raises:
        OSError: the file system refused; what is still there is still valid.
    """
    slabs = _slabs_in(checkpoints)  # before the directories: a save that begins meanwhile has none among these
    found = scan(checkpoints)
    if not found.checkpoints:
        return RetentionPlan([], [], 0)
    _remove_asides(found)
    _remove_uncommitted(found, before=max(found.checkpoints, key=lambda info: info.listing.sequence).iteration)
    others = _listed_elsewhere(checkpoints, found)
    plan = plan_retention(found.checkpoints, rules, others, stays)
    for info in [info for info in found.checkpoints if info.iteration in plan.delete]:
        remove_tree(info.directory)
        found.checkpoints.remove(info)
        _log.debug("checkpoint %s was deleted: outside the history that is kept", info.directory)
    try:
        for place, info in enumerate(found.checkpoints):
            if info.iteration in plan.thin:
                found.checkpoints[place] = _thinned(info)
    finally:  # a full disk has no room for another COMMIT, but gets what was deleted
        _drop_unlisted(checkpoints, slabs, found, others)
    if rules.disk_limit_bytes is not None and plan.bytes > rules.disk_limit_bytes:
        _log.warning(
            "checkpoints take %d bytes, more than disk_limit_bytes=%d: the newest whole one is never deleted",
            plan.bytes,
            rules.disk_limit_bytes,
        )
    return plan


def remove_unlisted(checkpoints: Path, *, after: int = -1) -> None:
    """Remove uncommitted saves after an iteration, and slabs and manifests outside every checkpoint.

    No process may write there meanwhile.
    """
    found = scan(checkpoints)
    _remove_uncommitted(found, after=after)
    with suppress(OSError):  # the log has it: a start does not fail for it
        _drop_unlisted(checkpoints, _slabs_in(checkpoints), found, _listed_elsewhere(checkpoints, found))
    for saved in found.checkpoints:
        save, ranks = saved.listing.save, saved.listing.world_size
        own = {rank_manifest_name(rank, save) for rank in range(ranks)}
        for path in [saved.directory / name for name in names_in(saved.directory) if name not in own]:
            if is_temporary(path) or is_rank_manifest(path.name) or path.suffix == ".skip":
                path.unlink(missing_ok=True)
                _log.warning("%s was removed: left by a save that was cut off, or that another has replaced", path)


def _remove_uncommitted(found: Catalogue, *, before: int | None = None, after: int = -1) -> None:
    """Remove saves that never were committed, at iterations from `after` to `before` (exclusive).

    Once a later step was committed, every rank's writer is past the earlier ones, and none writes there.
    """
    for iteration, directory in list(found.uncommitted.items()):
        if iteration > after and (before is None or iteration < before):
            remove_tree(directory)
            del found.uncommitted[iteration]
            _log.warning("%s was removed: it has no commit record (a save or a deletion was cut off)", directory)


def _slabs_in(checkpoints: Path) -> list[str]:
    """Names of all that lies among the slabs."""
    directory = checkpoints / SLABS
    return names_in(directory) if directory.is_dir() and not directory.is_symlink() else []


def _listed_elsewhere(checkpoints: Path, found: Catalogue) -> dict[str, int] | None:
    """Bytes of the slabs that damaged checkpoints list, those set aside, and those that a user has renamed.

    None while the file system cannot tell.
    """
    known = {info.directory for info in found.checkpoints} | set(found.uncommitted.values())
    listed: dict[str, int] = {}
    for path in checkpoints.iterdir():
        try:
            if path not in known and path.name != SLABS and path.is_dir() and not path.is_symlink():
                listed |= _listed_in(path)
        except (OSError, UnreadableFileError) as error:
            if not re.search(r"step-\d{10,}", path.name):
                continue  # a directory of somebody else, as lost+found
            what = f"what {path} lists cannot be read: no slab is removed while it is there; remove it once it is not"
            warn_once(checkpoints, f"{what} needed ({error})")
            return None
    return listed


def _listed_in(directory: Path) -> dict[str, int]:
    """Bytes of the slabs that a checkpoint lists; where its commit record is damaged or another's, by all it has."""
    found: dict[str, FileRecord] = {}
    with suppress(DamagedFileError, ValueError):
        manifest = Manifest.parse(persistently(read_bytes, directory / COMMIT))
        found = manifest.files
        first = persistently(read_bytes, directory / rank_manifest_name(0, manifest.save))
        if hashlib.sha256(first).hexdigest() == manifest.ranks[0].sha256:
            return dict(manifest.listing.sizes)
    for path in sorted(directory.glob("rank-*.json")):
        with suppress(DamagedFileError, ValueError):
            found |= RankManifest.parse(persistently(read_bytes, path)).files
    return {name: file.bytes for name, file in found.items() if slab_path(directory, name).exists()}


def _drop_unlisted(checkpoints: Path, slabs: Iterable[str], found: Catalogue, others: Mapping[str, int] | None) -> None:
    """Remove the slabs among these that no checkpoint lists and no running save writes.

    None is removed while a checkpoint cannot be read. What cannot be removed keeps nothing else.

    Raises:
        OSError: a slab cannot be removed.
    """
    if found.unreadable or others is None:
        return
    unlisted = set(slabs).difference(others, *(info.listing.sizes for info in found.checkpoints))
    running = found.uncommitted
    old = [name for name in sorted(unlisted) if not (running if (at := saved_at(name)) is None else at in running)]

    def drop(name: str) -> OSError | None:
        path = checkpoints / SLABS / name
        try:
            remove_entry(path)
        except OSError as error:
            warn_once(checkpoints, f"{path}, which no checkpoint lists, cannot be removed: {error}")
            return error
        _log.debug("%s was removed: no checkpoint lists it", path)
        return None

    errors = dict(zip(old, for_each(drop, old), strict=True))
    if None in errors.values():
        sync_directory(checkpoints / SLABS)
    for name, error in errors.items():
        if error is not None and (saved_at(name) is not None or holds_frozen(name)):
            raise error


def _thinned(info: SavedCheckpoint) -> SavedCheckpoint:
    """The checkpoint, whose record lists its weights alone from now on; as it is where that cannot be read any more."""
    try:
        thinned = info.manifest.model_copy(update={"weights_only": True})
    except CheckpointFileError as error:
        _known_commits.forget(info.directory)  # the next scan finds what is wrong with it
        _log.warning("checkpoint %s is not thinned: %s", info.directory, error)
        return info
    write_bytes(info.directory / COMMIT, thinned.to_bytes())
    _log.debug("checkpoint %s is thinned to its weights", info.directory)
    return SavedCheckpoint(info.directory, thinned)


def _remove_asides(found: Catalogue) -> None:
    """Remove what was set aside long enough ago."""
    for aside in found.asides:
        later = sum(info.listing.sequence > aside.after_sequence for info in found.checkpoints)
        if later < _COMMITS_BEFORE_REMOVAL:
            continue
        try:
            remove_tree(aside.directory)
            _log.info("%s was deleted: %d later checkpoints are committed", aside.directory, later)
        except OSError as error:  # the others are not kept for it
            warn_once(aside.directory.parent, f"{aside.directory} cannot be removed: {error}")
