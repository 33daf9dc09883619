"""Heartbeats: what each rank says once a second, which shows the others whether it is stopped, hangs, or has ended.

Ranks of one machine see it in memory that they share; see `cpsr.ranks.board`. For other machines there is a file::

    <run_dir>/progress/life-00003/machine-00008      heartbeats of a machine's ranks, the first of which is rank 8
    <run_dir>/progress/life-00003/processes-00008    is locked while a process of one of these ranks lives
    <run_dir>/progress/life-00003/job                names the launchers that began this life; see `cpsr.ranks.link`

A heartbeat has counts, marks and durations, never times of day: a watcher checks, by its own clock, whether it still
changes (see `cpsr.ranks.liveness`). Only a lock that was seen before can be found gone: where a file system has no
locks, or keeps them to one machine (NFS with `nolock`), heartbeats decide about a machine whose last process has ended.

A file of heartbeats is opened and closed for each write and each read instead of being mapped: on network file systems
that is when it reaches the other machines. Each life has a directory of its own. A process of an earlier life that was
stopped and resumes cannot disturb the next life, and notices that its machine's file is gone.
"""

import enum
import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cpsr.ranks.board import has_lock, lock
from cpsr.ranks.words import Words

__all__ = ["HEARTBEAT_BYTES", "NONE", "Heartbeat", "HeartbeatFiles", "Phase", "newer_life", "newest_claim"]

NONE = -1
_JOB = "job"
_LIFE = re.compile(r"life-(\d+)")


class Phase(enum.IntEnum):
    """What a rank does, as it reports."""

    TRAINING = 0
    BUSY = 1  # no step will end soon, on purpose
    ENDED = 2  # it will beat no more
    LEAVING = 3  # it has given up the rank in `lost_rank`, or the training as a whole


@dataclass(frozen=True)
class Heartbeat(Words):
    """What a rank says.

    Attributes:
        beats: so far.
        iteration: newest one that its training thread has finished in this life, `NONE` before the first.
        signs: forwards, losses and updates since then.
        phase: what it is doing.
        lost_rank: the rank that it has given up; `NONE`: none, or unknown.
        steps: whose own time was measured in this process; see `cpsr.engines.own_time`.
        compute_microseconds, data_microseconds: that these took in sum.
    """

    beats: int = 0
    iteration: int = NONE
    signs: int = 0
    phase: int = Phase.TRAINING
    lost_rank: int = NONE
    steps: int = 0
    compute_microseconds: int = 0
    data_microseconds: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Progress of its training, ordered."""
        return self.iteration, self.signs


HEARTBEAT_BYTES = len(Heartbeat().to_bytes())


class HeartbeatFiles:
    """What the ranks of one life leave on shared storage to be seen by other machines.

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

    def write(self, machine: int, data: bytes, *, first: bool = False) -> None:
        """Write the heartbeats of a machine's ranks; the first time this makes the file and the directory of the life.

        Raises:
            FileNotFoundError: the file was removed.
            OSError: the file system refuses.
        """
        if first:
            self._directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if first else 0)
        descriptor = os.open(self._path("machine", machine), flags, 0o666)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def read(self, machine: int, size: int) -> bytes:
        """The newest heartbeats of a machine's ranks, possibly torn; empty if there are none.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path("machine", machine), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.read(descriptor, size)
        finally:
            os.close(descriptor)

    def hold(self, machine: int) -> int:
        """Show other machines for the life of this process, or until the descriptor is closed, that it lives.

        Returns:
            The descriptor: no other one of this file may be opened in this process, since closing it would unlock it.

        Raises:
            OSError: the file system refuses, or has no locks.
        """
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path("processes", machine), flags, 0o666)
        try:
            lock(descriptor, fcntl.LOCK_SH)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def is_held(self, machine: int) -> bool:
        """Whether a process of another machine holds its file; OSError where that cannot be known."""
        descriptor = os.open(self._path("processes", machine), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return has_lock(descriptor)
        finally:
            os.close(descriptor)

    def remove_earlier(self) -> None:
        """Remove the heartbeats of earlier lives (rank 0); OSError if the file system refuses."""
        for life, directory in _lives(self._progress):
            if life < self._life:
                shutil.rmtree(directory)

    def _path(self, what: str, machine: int) -> str:
        return f"{self._directory}/{what}-{machine:05d}"


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
