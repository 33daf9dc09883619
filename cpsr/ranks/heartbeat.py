"""Heartbeats: small files of each rank, which show the others whether it is stopped, hangs, or has ended.

::

    <run_dir>/progress/life-00003/rank-00001       its heartbeat as JSON, written anew at every beat
    <run_dir>/progress/life-00003/process-00001    is locked while the process of rank 1 lives
    <run_dir>/progress/life-00003/job              names the launchers that have begun this life; see `cpsr.ranks.link`

It has counts and marks, never times: a watcher checks, by its own clock, whether a heartbeat still changes (see
`cpsr.ranks.liveness`).

The kernel unlocks the file of a process that ends. A process that is only stopped keeps its lock, and a child that it
has forked does not have it. Only a rank whose lock was seen before can be found ended: where a file system has no
locks, or keeps them to one machine (NFS with `nolock`), heartbeats decide.

The file is opened and closed for each write and each read instead of being mapped: on network file systems that is when
it reaches the other machines. Each life has a directory of its own. A process of an earlier life that was stopped and
resumes cannot disturb the next life, and notices that its own file is gone.
"""

import enum
import errno
import fcntl
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Heartbeat", "HeartbeatFiles", "Phase", "newer_life", "newest_claim"]

logger = logging.getLogger(__name__)

_BYTES = 256  # of a heartbeat, padded: one beat overwrites the last
_JOB = "job"
_LIFE = re.compile(r"life-(\d+)")


class Phase(enum.IntEnum):
    """What a rank does, as it reports."""

    TRAINING = 0
    BUSY = 1  # no step will end soon, on purpose
    ENDED = 2  # it will beat no more
    LEAVING = 3  # it has given up the rank in `lost_rank`, or the training as a whole


@dataclass(frozen=True)
class Heartbeat:
    """The content of a rank's file.

    Attributes:
        beats: written so far.
        iteration: newest one that its training thread has finished in this life, None before the first.
        signs: forwards, losses and updates since then.
        phase: what it is doing.
        lost_rank: the rank that it has given up; None: none, or unknown.
    """

    beats: int
    iteration: int | None
    signs: int
    phase: Phase
    lost_rank: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Progress of its training, ordered."""
        return -1 if self.iteration is None else self.iteration, self.signs

    def to_bytes(self) -> bytes:
        """As its file has it."""
        return json.dumps(asdict(self)).ljust(_BYTES).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Heartbeat":
        """Back from `to_bytes`; ValueError where that is no heartbeat (half of one, say)."""
        fields = json.loads(data)
        return Heartbeat(**fields | {"phase": Phase(fields["phase"])})


class HeartbeatFiles:
    """The heartbeats of one life.

    Args:
        run_dir: on storage that every rank shares.
        life: of the run; no two have the same number.
    """

    def __init__(self, run_dir: Path, life: int) -> None:
        self._life = life
        self._progress = run_dir / "progress"
        self._directory = self._progress / f"life-{life:05d}"

    def claim(self, job: str = "") -> None:
        """Make the directory of this life: one process alone can.

        Args:
            job: whose life it is; empty: unknown.

        Raises:
            FileExistsError: another has made it.
            OSError: the file system refuses.
        """
        self._progress.mkdir(parents=True, exist_ok=True)
        self._directory.mkdir()
        if job:
            (self._directory / _JOB).write_text(job, encoding="ascii")

    def job(self) -> str:
        """Whose life it is; empty: unknown."""
        try:
            return (self._directory / _JOB).read_text(encoding="ascii")
        except OSError:
            return ""

    def write(self, rank: int, heartbeat: Heartbeat, *, first: bool = False) -> None:
        """Write one more beat, or the first one, which makes the file and the directory of the life.

        Raises:
            FileNotFoundError: the file was removed.
            OSError: the file system refuses.
        """
        if first:
            self._directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if first else 0)
        descriptor = os.open(self._path("rank", rank), flags, 0o666)
        try:
            os.pwrite(descriptor, heartbeat.to_bytes(), 0)
        finally:
            os.close(descriptor)

    def read(self, rank: int) -> Heartbeat | None:
        """The newest beat of a rank; None if there is none, or an incomplete one.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path("rank", rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return Heartbeat.from_bytes(os.read(descriptor, _BYTES))
        except ValueError:
            return None
        finally:
            os.close(descriptor)

    def hold(self, rank: int) -> int:
        """Show for the life of this process, or until the descriptor is closed, that the rank lives.

        Returns:
            The descriptor: no other one of this file may be opened in this process, since closing it would unlock it.

        Raises:
            OSError: the file system refuses, or has no locks.
        """
        path = self._path("process", rank)
        descriptor = os.open(f"{path}.tmp", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(f"{path}.tmp").rename(path)  # nobody sees it without its lock
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def is_locked(self, rank: int) -> bool | None:
        """Whether the process of a rank holds its file; None where that cannot be known."""
        try:
            descriptor = os.open(self._path("process", rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
        finally:
            os.close(descriptor)
        return False

    def remove_earlier(self) -> None:
        """Remove the heartbeats of earlier lives (rank 0); OSError if the file system refuses."""
        for life, directory in _lives(self._progress):
            if life < self._life:
                shutil.rmtree(directory)

    def _path(self, what: str, rank: int) -> str:
        return f"{self._directory}/{what}-{rank:05d}"


def newest_claim(run_dir: Path) -> int:
    """The newest life whose heartbeats have a directory, -1 where none has; OSError if it cannot be read."""
    try:
        return max((life for life, _ in _lives(run_dir / "progress")), default=-1)
    except FileNotFoundError:
        return -1


def newer_life(run_dir: Path, life: int) -> int | None:
    """The newer life that has begun; None while this one is the newest; OSError as `newest_claim`."""
    newest = newest_claim(run_dir)
    return newest if newest > life else None


def _lives(progress: Path) -> list[tuple[int, Path]]:
    found = [(_LIFE.fullmatch(path.name), path) for path in progress.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
