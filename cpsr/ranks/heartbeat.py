"""The heartbeat of a rank: a small file that the other ranks read.

::

    <run_dir>/progress/life-00003/rank-00001    five little-endian unsigned 64-bit words, written anew at every beat
    <run_dir>/progress/life-00003/job           names the launchers that have begun this life; see `cpsr.ranks.link`

The words are counts and marks, never times. The file is opened and closed for each write and each read instead of being
mapped: on network file systems that is when it reaches the other machines.

Each life has a directory of its own. A process of an earlier life that was stopped and resumes cannot disturb the next
life, and notices that its own file is gone.
"""

import enum
import os
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Heartbeat", "HeartbeatFiles", "Phase", "newest_claim"]

_LAYOUT = struct.Struct("<5Q")
_NONE = (1 << 64) - 1
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
        """The five words."""
        iteration = _NONE if self.iteration is None else self.iteration
        lost_rank = _NONE if self.lost_rank is None else self.lost_rank
        return _LAYOUT.pack(self.beats, iteration, self.signs, self.phase, lost_rank)

    @staticmethod
    def from_bytes(data: bytes) -> "Heartbeat":
        """Read the five words; ValueError where they are no heartbeat (half of one, say)."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"{len(data)} bytes, not {_LAYOUT.size}")
        beats, *optional, signs, phase, lost = _LAYOUT.unpack(data)
        iteration, lost_rank = (None if word == _NONE else word for word in (*optional, lost))
        return Heartbeat(beats, iteration, signs, Phase(phase), lost_rank)


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

    def create(self, rank: int, heartbeat: Heartbeat) -> None:
        """Create this rank's file, in the directory of its life; OSError if the file system refuses."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(rank, heartbeat, os.O_CREAT)

    def write(self, rank: int, heartbeat: Heartbeat) -> None:
        """Write one more beat; OSError if the file system refuses, FileNotFoundError if the file was removed."""
        self._write(rank, heartbeat)

    def read(self, rank: int) -> Heartbeat | None:
        """The newest beat of a rank; None if there is none, or an incomplete one.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return Heartbeat.from_bytes(os.read(descriptor, _LAYOUT.size))
        except ValueError:
            return None
        finally:
            os.close(descriptor)

    def remove_earlier(self) -> None:
        """Remove the heartbeats of earlier lives (rank 0); OSError if the file system refuses."""
        for life, directory in _lives(self._progress):
            if life < self._life:
                shutil.rmtree(directory)

    def newer_life(self) -> int | None:
        """A later life that has begun; None if this is the newest; OSError if the directory cannot be read."""
        newest = max((life for life, _ in _lives(self._progress)), default=self._life)
        return newest if newest > self._life else None

    def _path(self, rank: int) -> str:
        return f"{self._directory}/rank-{rank:05d}"

    def _write(self, rank: int, heartbeat: Heartbeat, flags: int = 0) -> None:
        descriptor = os.open(self._path(rank), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
        try:
            os.pwrite(descriptor, heartbeat.to_bytes(), 0)
        finally:
            os.close(descriptor)


def newest_claim(run_dir: Path) -> int:
    """The newest life whose heartbeats have a directory, -1 where none has; OSError if it cannot be read."""
    try:
        return max((life for life, _ in _lives(run_dir / "progress")), default=-1)
    except FileNotFoundError:
        return -1


def _lives(progress: Path) -> list[tuple[int, Path]]:
    found = [(_LIFE.fullmatch(path.name), path) for path in progress.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
