"""The iteration that each rank completed, readable after a SIGKILL and without a system call on the hot path.

A rank's file is 32 bytes, four little-endian unsigned 64-bit words: two slots of (iteration + 1, batches), the slot
being `iteration % 2`. The first word is 0 while a slot is empty or being rewritten. So at least the previous iteration
is readable, whenever the process dies.
"""

import logging
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsr.checkpoint.files import for_each, read_bytes, write_bytes
from cpsr.ranks.group import Group

__all__ = ["Progress", "ProgressCounter", "mark_life", "newest_life", "progress_path", "read_for_all", "read_progress"]

logger = logging.getLogger(__name__)

_LAYOUT = struct.Struct("<4Q")
_EMPTY = 0
LIFE = "life"


def progress_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's counter lies: apart from the lives, which every save lists."""
    return run_dir / "progress" / "ranks" / f"rank-{rank:05d}"


def mark_life(run_dir: Path, life: int, branch: int = 0, *, holds_states: bool = False) -> None:
    """Record the life of the counters (rank 0): states of earlier lives in memory are then out of date.

    Args:
        run_dir: of the run.
        life: the life that trains.
        branch: how often it has gone back; states of earlier branches are out of date, too.
        holds_states: whether every rank has a state of it in host memory that survives the process.
    """
    path = run_dir / "progress" / LIFE
    path.parent.mkdir(parents=True, exist_ok=True)
    # In place, always with the same size: this works on a full disk.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, f"{life:020d} {branch:020d} {holds_states:d}".encode("ascii"), 0)
        if branch and not holds_states:  # the run has gone back: replicas outlive this machine, and so must this
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_life(run_dir: Path) -> tuple[int, int, bool]:
    """What `mark_life` recorded last: the life, its branch and whether every rank holds a state; -1, 0, False: nothing.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        words = (run_dir / "progress" / LIFE).read_bytes().split(b" ")
        life, branch = map(int, words[:2])
    except (FileNotFoundError, ValueError):
        return -1, 0, False
    return life, branch, words[2:] == [b"1"]


class ProgressCounter:
    """One rank's counter; an earlier life's count stays readable until the first `publish` or `reset`.

    Survives the process, not the machine: the file is never forced to the disk.

    Args:
        path: see `progress_path`; created with its directory where it is absent.

    Raises:
        OSError: the file cannot be created or mapped.
    """

    def __init__(self, path: Path) -> None:
        if sys.byteorder != "little":
            raise OSError("the progress counter needs a little-endian machine")
        path.parent.mkdir(parents=True, exist_ok=True)
        _renew(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, _LAYOUT.size)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")  # each assignment is one aligned 8-byte store

    def publish(self, iteration: int, batches: int) -> None:
        """Publish that the update of `iteration` is complete, and that `batches` batches were used up to it."""
        words = self._words
        slot = (iteration & 1) << 1
        words[slot] = _EMPTY
        words[slot + 1] = batches
        words[slot] = iteration + 1

    def reset(self, iteration: int, batches: int) -> None:
        """Publish an iteration that may lie before the last one (after a roll-back)."""
        self._words[((iteration + 1) & 1) << 1] = _EMPTY
        self.publish(iteration, batches)

    def close(self) -> None:
        """Unmap the file; it keeps its content."""
        self._words.release()
        self._bytes.release()
        self._map.close()


def _renew(path: Path) -> None:
    """Give the counter a new file: a stopped process of an earlier life, which may continue, has the old one mapped."""
    if path.is_symlink() or not path.exists():  # a link is refused when it is opened
        return
    try:
        write_bytes(path, path.read_bytes())
    except OSError as error:  # a full disk: the existing file works, too
        logger.warning("%s cannot be rewritten (%s) and is used as it is", path, error)


@dataclass(frozen=True)
class Progress:
    """How far a run came.

    Attributes:
        ranks: by rank, the newest iterations that it published -> batches used up to each; ranks without a readable
            counter are absent.
        missing: rank -> why its counter cannot be read.
    """

    ranks: dict[int, dict[int, int]]
    missing: dict[int, str]

    @property
    def iteration(self) -> int:
        """The oldest rank's iteration, over the ranks that can be read: every rank has completed it."""
        return min(map(max, self.ranks.values()))


def read_progress(run_dir: Path, world_size: int) -> Progress | None:
    """Read every rank's counter; None where no rank published anything.

    Raises:
        OSError: a file is there and cannot be read.
    """
    ranks: dict[int, dict[int, int]] = {}
    missing: dict[int, str] = {}
    paths = [progress_path(run_dir, rank) for rank in range(world_size)]
    for rank, content in enumerate(for_each(_read, paths)):
        if isinstance(content, str):
            missing[rank] = content
        else:
            ranks[rank] = content
    return Progress(ranks, missing) if ranks else None


def read_for_all(run_dir: Path, world_size: int, group: Group) -> Progress | None:
    """`read_progress` of rank 0 on all ranks, which would read a file of each other otherwise; a collective.

    Raises:
        OSError: as that, on every rank.
    """
    told: dict[str, Any] = {"ranks": [], "missing": []}
    try:
        found = read_progress(run_dir, world_size) if group.rank == 0 else None
        if found is not None:
            counts = [(rank, list(published.items())) for rank, published in found.ranks.items()]
            told = {"ranks": counts, "missing": list(found.missing.items())}
    except OSError as error:
        told = {"problem": str(error)}
    told = group.broadcast(told)
    if "problem" in told:
        raise OSError(told["problem"])
    return (
        Progress({rank: dict(published) for rank, published in told["ranks"]}, dict(told["missing"]))
        if told["ranks"]
        else None
    )


def _read(path: Path) -> dict[int, int] | str:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return "is absent"
    if len(data) != _LAYOUT.size:
        return f"has {len(data)} bytes, not {_LAYOUT.size}"
    first, first_batches, second, second_batches = _LAYOUT.unpack(data)
    slots = {first - 1: first_batches, second - 1: second_batches}
    slots.pop(_EMPTY - 1, None)
    wrong = [iteration for iteration in slots if iteration % 2 != (0 if iteration == first - 1 else 1)]
    if wrong:
        return f"holds iteration {wrong[0]} in the other's slot; it is damaged"
    return slots or "holds nothing yet"
