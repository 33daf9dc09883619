"""An exclusive right to a file, of one process; its forked children do not inherit it."""

import fcntl
import logging
import os
import struct
import time
from pathlib import Path

__all__ = ["FileInUseError", "FileLock", "lock_name"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
REPORT_SECONDS = 1.0  # a killed process has released its lock by then, unless it was large
COMMAND_CHARACTERS = 120
_FLOCK = struct.Struct("hhqqi4x")  # Linux' `struct flock`: type, whence, start, length, process

_held: dict[Path, tuple[int, int]] = {}  # file -> process, and lock; what a forked child finds here is its parent's


class FileInUseError(OSError):
    """Another process has the lock; the message names it where it is visible from here."""


class FileLock:
    """An exclusive right to a file, until it is released or this process ends; a stopped process keeps it.

    It is a POSIX lock on a file of its own, `.<name>.lock`, which nobody else opens: a process would lose it with any
    descriptor of that file that it closes. A forked child does not have it, and the kernel tells who has it.

    Args:
        path: the file.
        wait_seconds: how long to wait for another process that has it: a killed process takes a while to end.
        create: also where there is no such file.

    Raises:
        FileInUseError: another process still had it after that time, or this process has it.
        OSError: there is no such file, or a link; or it cannot be locked.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0, *, create: bool = False) -> None:
        self.path = path
        self._lock = path.with_name(lock_name(path.name))
        self._descriptor = -1
        began, reported = time.monotonic(), False
        while (process := self._holder()) != 0:
            waited = time.monotonic() - began
            user = f"{_name_of(process)} still uses {path}"
            if process == os.getpid() or waited >= wait_seconds:
                raise FileInUseError(user)
            if waited >= REPORT_SECONDS and not reported:
                reported = True
                logger.warning("waiting up to %.0f s for %s", wait_seconds, user)
            time.sleep(LOOK_SECONDS)
        try:
            if path.is_symlink() or not create:
                os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError:
            self.release()
            raise

    def remove(self) -> None:
        """Remove the file and release the lock; does nothing without it."""
        if self._is_held():
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock; does nothing if it was released before, or in a forked child, which does not have it."""
        if self._is_held():
            if self._has_its_name(self._descriptor):  # another process may have removed it, and a third have a new one
                self._lock.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
            del _held[self.path]

    def _is_held(self) -> bool:
        return self._descriptor >= 0 and _held.get(self.path) == (os.getpid(), id(self))

    def _holder(self) -> int:
        """Try once: 0 if this lock is taken now, else the process that has it; -1 where that is not visible."""
        own = os.getpid(), id(self)
        if _held.setdefault(self.path, own)[0] != own[0]:
            _held[self.path] = own  # a parent's
        if _held[self.path] != own:
            return own[0]
        process = -1
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                process = self._take(descriptor)
            finally:
                if process != 0:
                    os.close(descriptor)
            self._descriptor = descriptor
        finally:
            if process != 0:
                del _held[self.path]
        return process

    def _take(self, descriptor: int) -> int:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            asked = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return int(_FLOCK.unpack(asked)[4]) or -1
        return 0 if self._has_its_name(descriptor) else -1  # the one before has removed it when it released the lock

    def _has_its_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._lock.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False


def lock_name(name: str) -> str:
    """Of a file's name, or of a pattern of names: that of its lock."""
    return f".{name}.lock"


def _name_of(process: int) -> str:
    """A process as text: `process 4242 (python train.py)`."""
    if process <= 0:
        return "a process that cannot be seen from here (in another container)"
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        words = []
    command = " ".join(words)[:COMMAND_CHARACTERS] or "its command cannot be read"
    return f"process {process} ({command})" + (", which is this one," if process == os.getpid() else "")
