"""Counts and removes a run's states in the shared memory of this machine."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory import shared_memory_left
from cpsr.checkpoint.memory_states import BLOCK_BYTES, NAME, SHARED_MEMORY, files_of, owner_path, size_of
from cpsr.checkpoint.resources import available_host_bytes

__all__ = ["bytes_in_memory", "remove_memory_states", "remove_unused", "room_in_memory"]

logger = logging.getLogger(__name__)


def bytes_in_memory(
    run_id: str, ranks: Iterable[int], directory: Path = SHARED_MEMORY, *, prefix: Literal["", "window-"] = ""
) -> int:
    """Bytes of this machine's memory that buffers, or windows, of these ranks from an earlier life already take."""
    own, found = set(ranks), 0
    for path in files_of(run_id, directory):
        matched = NAME.fullmatch(path.name)
        if matched is None or int(matched["rank"]) not in own or not matched["slot"].startswith(prefix):
            continue
        if matched["slot"].removeprefix(prefix).isdigit():
            found += path.lstat().st_blocks * BLOCK_BYTES
    return found


def room_in_memory(run_id: str, ranks: Iterable[int], *, prefix: Literal["", "window-"] = "") -> int:
    """Bytes that buffers, or windows, of these ranks can take together: what is free, and what such ones have already.

    0 where there is no shared memory.
    """
    try:
        free = min(available_host_bytes(), shared_memory_left())
    except OSError:
        return 0
    return free + bytes_in_memory(run_id, ranks, prefix=prefix)


def remove_memory_states(run_id: str, directory: Path = SHARED_MEMORY) -> int:
    """Remove all files of a run in this machine's shared memory, used or not; return the bytes."""
    freed = sum(_removed(path) for path in files_of(run_id, directory))
    owner_path(run_id, directory).unlink(missing_ok=True)
    return freed


def remove_unused(run_id: str, directory: Path = SHARED_MEMORY, *, replicas: bool = True) -> int:
    """Remove a run's states outside the buffers of living processes, and fetched ones; return the bytes.

    Args:
        run_id: identity of the run.
        directory: where shared memory is mounted.
        replicas: also remove replicas of ranks on other machines: the process that keeps them has no lock on them.
    """
    freed = 0
    for path in files_of(run_id, directory):
        kind = _kind_of(path)
        if kind == "replica":
            freed += _removed(path) if replicas else 0
            continue
        try:
            lock = FileLock(path)
        except (FileInUseError, FileNotFoundError):  # another rank was faster
            continue
        except OSError as error:
            logger.warning("%s is left as it is, since it cannot be opened: %s", path, error)
            continue
        freed += size_of(path)
        lock.remove()
    if next(files_of(run_id, directory), None) is None:
        owner_path(run_id, directory).unlink(missing_ok=True)
    return freed


def _removed(path: Path) -> int:
    """The bytes of a file that is removed; 0 where another rank has removed the same."""
    size = size_of(path)
    path.unlink(missing_ok=True)
    return size


def _kind_of(path: Path) -> str:
    """`replica`, `small` and so on; of a rank's own buffers their number."""
    matched = NAME.fullmatch(path.name)
    return "" if matched is None else matched["slot"].partition("-")[0]
