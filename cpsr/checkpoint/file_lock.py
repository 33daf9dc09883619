"""An exclusive file lock of one process; its forked children do not inherit it."""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FileInUseError", "FileLock", "users_of"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
REPORT_SECONDS = 1.0  # a killed process has released its lock by then, unless it was large
COMMAND_CHARACTERS = 120
_PROCESSES = Path("/proc")

_forking = threading.RLock()  # guards the names below, across forks too: a child knows every lock that was being taken
_locks: set["FileLock"] = set()


class FileInUseError(OSError):
    """Another process has the lock; the message names it where it is visible from here.

    Args:
        path: the file.
        why: the message; by default the processes are searched for when the text is needed, which takes a while.
    """

    def __init__(self, path: Path, why: str | None = None) -> None:
        super().__init__(path, why)
        self._path, self._why = path, why

    def __str__(self) -> str:
        if self._why is None:
            self._why = f"{users_of(self._path)} still uses {self._path}"
        return self._why


class FileLock:
    """An exclusive lock on a file, until it is released or this process ends; a stopped process keeps it.

    The kernel keeps a lock (`flock`) while any process has the open file description: forked children and mappings
    have it, too. So the lock uses a description of its own, which each child closes as soon as it is forked.

    Args:
        path: the file; a link is not followed.
        wait_seconds: how long to wait for another process that has it: a killed process takes a while to end.
        create: make the file where there is none, for its user alone.

    Raises:
        FileInUseError: another process still had it after that time, or this process has it.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0, *, create: bool = False) -> None:
        self.path = path
        self._flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._descriptor = -1
        with _forking:
            is_own = any(lock.path == path for lock in _locks)
        began, reported = time.monotonic(), False
        while not self._is_taken():
            waited = time.monotonic() - began
            if is_own or waited >= wait_seconds:
                raise FileInUseError(path)
            if waited >= REPORT_SECONDS and not reported:
                reported = True
                logger.warning("waiting up to %.0f s for %s, which still uses %s", wait_seconds, users_of(path), path)
            time.sleep(LOOK_SECONDS)

    def open_again(self) -> int:
        """A descriptor to read, write and map the file; on failure the lock is released.

        Raises:
            OSError: it cannot be opened, or was just removed.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            self.release()
            raise
        if os.path.sameopenfile(self._descriptor, descriptor):
            return descriptor
        os.close(descriptor)
        self.release()
        raise OSError(f"{self.path} was replaced while it was opened")

    def remove(self) -> None:
        """Remove the file and release the lock; a newer file of another process under this name stays."""
        if self._descriptor >= 0 and self._has_its_name():
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock; does nothing if it was released before, or in a forked child, which does not have it."""
        with _forking:
            _locks.discard(self)
            if self._descriptor >= 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for a child that was forked outside Python as well
                os.close(self._descriptor)
                self._descriptor = -1

    def _is_taken(self) -> bool:
        """Try once; opens the file again each time, since the last owner may have removed it."""
        with _forking:
            self._descriptor = os.open(self.path, self._flags, 0o600)
            _locks.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._has_its_name():
                return True
        except BlockingIOError:
            pass  # another has it
        except BaseException:
            self.release()
            raise
        self.release()
        return False

    def _has_its_name(self) -> bool:
        """Whether the opened file still has its name: the last owner may have removed it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _forget(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def users_of(path: Path) -> str:
    """The processes with a lock on a file, as text: `process 4242 (python train.py)`.

    Processes of other users and containers are not visible.
    """
    found = []
    for process in _PROCESSES.iterdir():
        if process.name.isdigit() and any(_is_lock_on(path, opened) for opened in _openings(process)):
            own = ", which is this one," if int(process.name) == os.getpid() else ""
            found.append(f"process {process.name} ({_command_of(process)}){own}")
    return " and ".join(found) or "a process that cannot be seen from here (of another user, or in another container)"


def _openings(process: Path) -> Iterator[Path]:
    try:
        yield from (process / "fd").iterdir()
    except OSError:
        return  # of another user, or ended meanwhile


def _is_lock_on(path: Path, opened: Path) -> bool:
    try:
        if opened.readlink().name != path.name:  # a file that was removed has another name
            return False
        return "FLOCK" in (opened.parents[1] / "fdinfo" / opened.name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return False  # closed meanwhile


def _command_of(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
        return " ".join(words)[:COMMAND_CHARACTERS] or "its command cannot be read"
    except OSError:
        return "its command cannot be read"


def _forget_in_child() -> None:
    """A forked child is not the process that took the locks."""
    for lock in _locks:
        lock._forget()
    _locks.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget_in_child)
