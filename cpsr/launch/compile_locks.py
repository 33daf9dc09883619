"""Stale locks of killed processes where torch compiles operators: later starts wait for them silently.

DeepSpeed compiles some of its operators when they are first used. Torch guards that by a file named `lock`, which its
process keeps open until the operator is loaded. A process that is killed meanwhile leaves the file.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from cpsr.journal.database import filesystem_of, is_network

__all__ = ["extensions_directory", "remove_stale_locks"]

LOCK = "lock"
_PROCESSES = Path("/proc")


def extensions_directory() -> Path:
    """Where torch compiles operators of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")


def remove_stale_locks(directory: Path) -> list[Path]:
    """Remove the locks that no process of this machine has open; return them.

    On a network file system a process of another machine may have one open: there nothing is removed.
    """
    found = [*directory.glob(f"*/{LOCK}"), *directory.glob(f"*/*/{LOCK}")]
    if not found or is_network(filesystem_of(directory)):
        return []
    stale = _without_open(found)
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def _without_open(locks: Iterable[Path]) -> list[Path]:
    """Those that no process has open."""
    names = {str(lock.resolve()) for lock in locks}
    for process in _PROCESSES.iterdir():
        if process.name.isdigit():
            names -= set(_opened(process))
    return sorted(Path(name) for name in names)


def _opened(process: Path) -> list[str]:
    try:
        return [str(one.readlink()) for one in (process / "fd").iterdir()]
    except OSError:
        return []  # of another user, or ended meanwhile
