"""Shared memory of runs whose run directory is gone, so that no later life will use it."""

import logging
import os
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.memory_states import BLOCK_BYTES, NAME, SHARED_MEMORY, files_of
from cpsr.checkpoint.owner import OWNER_NAME, Owner, owner_of

__all__ = ["HeldRun", "copied_from", "free_orphans", "free_run", "runs_in_memory"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3.0  # for all run directories together: a network file system that hangs must not block the caller

# `there`: its directory is; `gone`: that is gone; `freed`: that was gone; `in use`: a process has it; `unclear`: it
# this machine cannot know whether the directory is gone; `unknown`: no owner is recorded, as in older versions.
Standing = Literal["there", "gone", "freed", "in use", "unclear", "unknown"]


@dataclass(frozen=True)
class HeldRun:
    """One run's files in this machine's shared memory, of this user.

    Attributes:
        run_id: identity of the run.
        owner: its directory, None where none is recorded.
        bytes: of memory.
        standing: whether it may be freed.
        why: one sentence for the user.
    """

    run_id: str
    owner: Owner | None
    bytes: int
    standing: Standing
    why: str


def runs_in_memory(directory: Path = SHARED_MEMORY) -> list[HeldRun]:
    """All runs with files in this machine's shared memory; changes nothing."""
    files = _files_by_run(directory)
    owners = {run_id: owner_of(run_id, directory) for run_id in files}
    looked = _looked_at([owner for owner in owners.values() if owner is not None])
    found = []
    for run_id, paths in sorted(files.items()):
        owner = owners[run_id]
        standing, why = looked[run_id] if owner is not None else _UNKNOWN
        found.append(HeldRun(run_id, owner, _bytes_of(paths), standing, why))
    return [run if run.standing == "there" else _unless_used(run, files[run.run_id]) for run in found]


def free_orphans(directory: Path = SHARED_MEMORY) -> list[HeldRun]:
    """Free the memory of runs whose directory is gone and that no process uses.

    Returns:
        The runs whose directory is not there, and whether their memory was freed.
    """
    found = [_freed(run, directory) for run in runs_in_memory(directory)]
    return [run for run in found if run.standing != "there"]


def free_run(run_id: str, directory: Path = SHARED_MEMORY) -> int:
    """Free all of a run's shared memory on this machine, and return the bytes.

    Raises:
        FileInUseError: a process uses it; the message names it. Nothing was removed.
    """
    paths = _files_by_run(directory).get(run_id, ())
    size = _bytes_of(paths)
    with ExitStack() as locked:
        _lock(paths, locked)  # no process can begin to use them now
        remove_memory_states(run_id, directory)
    return size


def copied_from(run_id: str, run_dir: Path, directory: Path = SHARED_MEMORY) -> Path | None:
    """The directory to which a run's files in this machine's memory belong, where that is not `run_dir`.

    Both have the identity of the run, as one that was copied. None where there are no such files, or that is unclear.
    """
    owner = owner_of(run_id, directory)
    if owner is None or owner.run_dir == run_dir.resolve() or next(files_of(run_id, directory), None) is None:
        return None
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(owner.is_beside(run_dir)), name="cpsr-copied", daemon=True)
    thread.start()
    thread.join(LOOK_SECONDS)
    return owner.run_dir if any(found) else None


_UNKNOWN: tuple[Standing, str] = "unknown", "an older version of CPSR has left it, which did not say whose it is"


def _files_by_run(directory: Path) -> dict[str, list[Path]]:
    """This user's files, by run."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        matched = NAME.fullmatch(path.name) or OWNER_NAME.fullmatch(path.name)
        if matched is not None and _is_own(path):
            found[matched["run_id"]].append(path)
    return found


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)


def _bytes_of(paths: Iterable[Path]) -> int:
    found = 0
    for path in paths:
        try:
            found += path.lstat().st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            continue  # removed meanwhile
    return found


def _looked_at(owners: list[Owner]) -> dict[str, tuple[Standing, str]]:
    """What each run directory's check returned within the time, by run."""
    found: dict[str, tuple[Standing, str]] = {}

    def look(owner: Owner) -> None:
        found[owner.run_id] = owner.look()

    threads = [threading.Thread(target=look, args=(owner,), name="cpsr-orphans", daemon=True) for owner in owners]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOK_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    hangs = f"did not answer within {LOOK_SECONDS:g} s"
    return {owner.run_id: ("unclear", f"{owner.run_dir} {hangs}") for owner in owners} | dict(found)


def _unless_used(run: HeldRun, paths: Iterable[Path]) -> HeldRun:
    try:
        with ExitStack() as locked:
            _lock(paths, locked)
    except FileInUseError as error:
        return replace(run, standing="in use", why=str(error))
    return run


def _freed(run: HeldRun, directory: Path) -> HeldRun:
    if run.standing != "gone":
        return run
    try:
        with ExitStack() as locked:
            _lock(_files_by_run(directory).get(run.run_id, ()), locked)
            owner = owner_of(run.run_id, directory)  # a job may have started there meanwhile
            if owner is None or owner.look()[0] != "gone":
                return replace(run, standing="there")
            remove_memory_states(run.run_id, directory)
    except FileInUseError as error:
        return replace(run, standing="in use", why=str(error))
    return replace(run, standing="freed")


def _lock(paths: Iterable[Path], locked: ExitStack) -> None:
    """Take the lock of each file; FileInUseError where a process has one of them."""
    for path in paths:
        try:
            locked.callback(FileLock(path).release)
        except FileNotFoundError:
            continue  # removed meanwhile
        except FileInUseError:
            raise
        except OSError as error:
            raise FileInUseError(path, f"it is not known whether a process uses it: {error}") from error
