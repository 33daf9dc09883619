"""Whose a run's files in this machine's shared memory are, how much they take, and freeing them.

One rule protects them: a process has the lock of each file that it fills, and whoever frees a file or fills it anew
takes its lock first. A file without a lock is freed once a process of its own run, or the user, asks for it. If no such
process comes, other runs free it once the run directory is gone::

    cpsr-<run_id>-owner        JSON: the run directory, the machine, and which directories these were

Device and inode numbers of a run directory and of the directories above it on its disk distinguish it from another one
of the same path: a container sees other directories under the same paths, and so does a machine where a disk is not
mounted.
"""

import itertools
import json
import logging
import os
import re
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cpsr.checkpoint.arena import Arena, bytes_of
from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory_states import SHARED_MEMORY

__all__ = ["HeldRun", "Owner", "copied_from", "free_orphans", "free_run", "mark_owner", "owner_of", "owner_path"]
__all__ += ["remove_memory_states", "remove_unused", "runs_in_memory"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3.0  # for all run directories together: a network file system that hangs must not block the caller
IDENTITY = "run.json"
_FILE = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-(owner|rank-\d{5}-[0-9a-z-]+)")

# `there`: its directory is; `gone`: that is gone; `freed`: that was gone; `in use`: a process has it; `unclear`: cannot
# be determined on this machine.
Standing = Literal["there", "gone", "freed", "in use", "unclear"]
Place = tuple[int, int]  # device and inode number
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Owner:
    """The run that owns files in shared memory, as recorded when its newest life began.

    Attributes:
        run_id: identity of the run.
        run_dir: its directory, absolute and without links.
        node: the machine, as the job saw it.
        places: device and inode of that directory and of those above it on the same disk, the nearest first.
    """

    run_id: str
    run_dir: Path
    node: str
    places: tuple[Place, ...]

    def look(self) -> tuple[Standing, str]:
        """Whether the run directory is still there, and why; waits for a file system that hangs.

        It is gone if the nearest directory that exists is the recorded one: the path alone proves nothing.
        """
        try:
            if _run_id_in(self.run_dir) == self.run_id:
                return "there", f"{self.run_dir} holds it"
            for directory, recorded in zip((self.run_dir, *self.run_dir.parents), self.places, strict=False):
                found = _place_of(directory)
                if found == recorded:
                    return "gone", f"{self.run_dir} " + ("holds it no more" if directory == self.run_dir else "is gone")
                # Another directory in its place may be a mounted disk; on the same disk it was made anew.
                if found is not None and (directory != self.run_dir or found[0] != recorded[0]):
                    return "unclear", f"{directory} is another directory than it was: a mounted disk, or a container"
        except OSError as error:
            return "unclear", f"{self.run_dir} cannot be looked at: {error}"
        return "unclear", f"the disk of {self.run_dir} is not here: not mounted now, or in a container"


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


def mark_owner(run_id: str, run_dir: Path, node: str, directory: Path = SHARED_MEMORY) -> None:
    """Record the owner of a run's files, before it has any.

    Args:
        run_id: identity of the run.
        run_dir: its directory, which exists.
        node: name of this machine, for messages.
        directory: where shared memory is mounted.

    Raises:
        OSError: there is no shared memory, or no room in it, or the run directory is gone.
    """
    real = run_dir.resolve(strict=True)
    device = real.stat().st_dev
    found = map(_place_of, (real, *real.parents))
    places = list(itertools.takewhile(lambda at: at is not None and at[0] == device, found))
    data = json.dumps({"run_dir": str(real), "node": node, "places": places}).encode()
    descriptor = os.open(owner_path(run_id, directory), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, data, 0)  # in place and at once: several ranks may write the same
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def owner_of(run_id: str, directory: Path = SHARED_MEMORY) -> Owner | None:
    """The owner of a run's files; None where none is recorded, or the record cannot be read."""
    try:
        descriptor = os.open(owner_path(run_id, directory), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            found = json.loads(file.read())
        places = tuple((int(device), int(inode)) for device, inode in found["places"])
        return Owner(run_id, Path(str(found["run_dir"])), str(found["node"]), places)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def owner_path(run_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """The file that names the owner of a run's files."""
    return directory / f"cpsr-{run_id}-owner"


def runs_in_memory(directory: Path = SHARED_MEMORY, *, free: bool = False) -> list[HeldRun]:
    """All runs with files in this machine's shared memory.

    Args:
        directory: where shared memory is mounted.
        free: free those whose directory is gone and that no process uses.
    """
    files = _files_by_run(directory)
    owners = {run_id: owner for run_id in files if (owner := owner_of(run_id, directory)) is not None}
    looked = _in_time({run_id: owner.look for run_id, owner in owners.items()})
    found = []
    for run_id, paths in sorted(files.items()):
        owner, size = owners.get(run_id), bytes_of(paths)
        standing: Standing = "unclear"
        if owner is None:
            why = "no owner of it is recorded"
        elif run_id not in looked:
            why = f"{owner.run_dir} did not answer within {LOOK_SECONDS:g} s"
        else:
            standing, why = looked[run_id]
        if standing != "there":
            try:
                with _locked(paths):
                    if free and standing == "gone":
                        standing = _freed(run_id, paths, directory)
            except FileInUseError as error:
                standing, why = "in use", str(error)
        found.append(HeldRun(run_id, owner, size, standing, why))
    return found


def _freed(run_id: str, locked: Iterable[Path], directory: Path) -> Standing:
    owner = owner_of(run_id, directory)  # a job may have started there meanwhile
    if owner is None or owner.look()[0] != "gone":
        return "there"
    _remove(locked)
    return "freed"


def free_orphans(directory: Path = SHARED_MEMORY) -> list[HeldRun]:
    """Free the memory of runs whose directory is gone and that no process uses.

    Returns:
        The runs whose directory is not there, and whether their memory was freed.
    """
    return [run for run in runs_in_memory(directory, free=True) if run.standing != "there"]


def free_run(run_id: str, directory: Path = SHARED_MEMORY) -> int:
    """Free all of a run's shared memory on this machine, and return the bytes.

    Raises:
        FileInUseError: a process uses it; the message names it. Nothing was removed.
    """
    paths = _files_by_run(directory)[run_id]
    size = bytes_of(paths)
    with _locked(paths):  # no process can begin to use them now
        _remove(paths)
    return size


def copied_from(run_id: str, run_dir: Path, directory: Path = SHARED_MEMORY) -> Path | None:
    """The directory to which a run's files in this machine's memory belong, where `run_dir` is a copy of that.

    Both have the identity of the run. One directory has the same inode under each path, also where a mount gives it
    another device. None where there are no such files, or that is unclear.
    """
    owner = owner_of(run_id, directory)
    if owner is None or owner.run_dir == run_dir.resolve() or next(Arena(run_id, directory).files(), None) is None:
        return None
    original = owner.run_dir

    def is_another() -> bool:
        try:
            pairs = [(original / name, run_dir / name) for name in (".", IDENTITY)]
            return _run_id_in(original) == run_id and any(a.stat().st_ino != b.stat().st_ino for a, b in pairs)
        except OSError:
            return False

    return original if _in_time({run_id: is_another}).get(run_id) else None


def remove_memory_states(run_id: str, directory: Path = SHARED_MEMORY) -> None:
    """Remove all files of a run in this machine's shared memory, used or not."""
    _remove((*Arena(run_id, directory).files(), owner_path(run_id, directory)))


def remove_unused(run_id: str, directory: Path = SHARED_MEMORY, *, keep: Collection[str] = ()) -> None:
    """Remove a run's states outside the buffers of living processes, and fetched ones.

    Args:
        run_id: identity of the run.
        directory: where shared memory is mounted.
        keep: names of replicas that stay: the process that holds them has no lock on them.
    """
    for path in Arena(run_id, directory).files():
        if path.name in keep:
            continue
        try:
            FileLock(path, named=False).remove()
        except (FileInUseError, FileNotFoundError):  # another rank was faster
            continue
        except OSError as error:
            logger.warning("%s is left as it is, since it cannot be opened: %s", path, error)
    if next(Arena(run_id, directory).files(), None) is None:
        owner_path(run_id, directory).unlink(missing_ok=True)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _place_of(directory: Path) -> Place | None:
    """Device and inode of a directory, None where there is none; another OSError where the file system fails."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _run_id_in(run_dir: Path) -> str | None:
    """Identity of the run in a directory; None where there is no run or no directory."""
    try:
        return str(json.loads((run_dir / IDENTITY).read_bytes())["run_id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"its {IDENTITY} is damaged ({error})") from error


def _files_by_run(directory: Path) -> dict[str, list[Path]]:
    """This user's files, by run."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        matched = _FILE.fullmatch(path.name)
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # removed meanwhile
        if matched is not None and status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
            found[matched["run_id"]].append(path)
    return found


def _in_time(calls: Mapping[str, Callable[[], _Found]]) -> dict[str, _Found]:
    """What these calls returned within the time, by name; a file system that hangs holds nobody up."""
    found: dict[str, _Found] = {}

    def ask(name: str) -> None:
        found[name] = calls[name]()

    threads = [threading.Thread(target=ask, args=(name,), name="cpsr-orphans", daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOK_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


@contextmanager
def _locked(paths: Iterable[Path]) -> Iterator[None]:
    """Have the lock of each file; FileInUseError where a process has one of them."""
    with ExitStack() as locked:
        for path in paths:
            try:
                locked.callback(FileLock(path).release)
            except FileNotFoundError:
                continue  # removed meanwhile
            except FileInUseError:
                raise
            except OSError as error:
                raise FileInUseError(f"it is not known whether a process uses {path}: {error}") from error
        yield
