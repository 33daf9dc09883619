"""An exclusive right to a file, of one process; its forked children do not inherit it."""

import fcntl
import logging
import os
import threading
import time
from pathlib import Path

import psutil

__all__ = ["FileInUseError", "FileLock"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
REPORT_SECONDS = 1.0  # a killed process has released its lock by then, unless it was large
COMMAND_CHARACTERS = 120
LOCKS = Path("/proc/locks")


class FileInUseError(OSError):
    """Another process has the lock; the message names it where it is visible from here."""


class FileLock:
    """An exclusive right to a file, until it is released or this process ends; a stopped process keeps it.

    It is the kernel's `flock` on a descriptor of its own, which is not mapped: a mapping would keep the lock.

    Args:
        path: the file.
        wait_seconds: how long to wait for another process that has it: a killed process takes a while to end.
        create: make the file where there is none.
        named: find out which process has it, for which the system lists all locks of the machine.

    Raises:
        FileInUseError: another process still had it after that time, or this process has it.
        OSError: there is no such file, or a link; or it cannot be locked.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0, *, create: bool = False, named: bool = True) -> None:
        self.path, self._named = path, named
        self._flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        self._descriptor = -1
        began, reported = time.monotonic(), False
        while (process := self._holder()) is not None:
            waited = time.monotonic() - began
            user = f"{_name_of(process)} still uses {path}"
            if process == os.getpid() or waited >= wait_seconds:
                raise FileInUseError(user)
            if waited >= REPORT_SECONDS and not reported:
                reported = True
                logger.warning("waiting up to %.0f s for %s", wait_seconds, user)
            time.sleep(LOOK_SECONDS)

    def remove(self) -> None:
        """Remove the file and release the lock; does nothing without it."""
        if self._has_its_name():
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock; does nothing if it was released before, or in a forked child, which does not have it."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            _held.discard(self)
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _holder(self) -> int | None:
        """Try once: None if this lock is taken now, else the process that has it; 0 where that is not visible."""
        while not self._has_its_name():  # whoever had the lock may have removed the file, and another made a new one
            self.release()
            with _forking:
                self._descriptor = os.open(self.path, self._flags, 0o600)
                _held.add(self)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                process = _locker_of(self._descriptor) if self._named else 0
                self.release()
                if isinstance(error, BlockingIOError):
                    return process
                raise
        return None

    def _has_its_name(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False


_held: set[FileLock] = set()
_forking = threading.RLock()  # no child is forked between the opening of a file and its place in `_held`


def _leave_to_parent() -> None:
    """In a forked child: a lock stays until the last process has closed the descriptor."""
    while _held:
        _held.pop()._close()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_leave_to_parent)


def _locker_of(descriptor: int) -> int:
    """The process that has a file's lock; 0 where it cannot be seen."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        for line in LOCKS.read_text(encoding="ascii").splitlines():
            _, kind, _, _, process, locked, *_ = line.replace("-> ", "").split()
            if (kind, locked) == ("FLOCK", file):
                return int(process)
    except (OSError, ValueError):
        pass  # hidden from this container
    return 0


def _name_of(process: int) -> str:
    """A process as text: `process 4242 (python train.py)`."""
    if process <= 0:
        return "a process that cannot be seen from here (in another container, or a child of one that has ended)"
    try:
        words = " ".join(psutil.Process(process).cmdline()).split()
    except psutil.NoSuchProcess:
        return f"process {process}, which has ended, or a child that it forked"
    except psutil.Error:
        words = []
    command = " ".join(words)[:COMMAND_CHARACTERS] or "its command cannot be read"
    return f"process {process} ({command})" + (", which is this one," if process == os.getpid() else "")
