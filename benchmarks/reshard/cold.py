"""A measured load: from a cold page cache, with the memory that it takes."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from cpsr.errors import CPSRError

__all__ = ["forget_files", "measured"]


def measured(steps: Iterator[Any]) -> dict[str, Any]:
    """Time one load.

    Args:
        steps: yields three times: the bytes of this rank's part, and the directory that it reads; after the load the
            bytes that it read; then whether the values are those that were saved.

    Returns:
        `seconds` from the barrier on, `disk_bytes`, the `part_bytes`, and the `peak_bytes` of memory beside them.

    Raises:
        CPSRError: a value is wrong.
    """
    part_bytes, place = next(steps)
    if dist.get_rank() == 0:
        forget_files(place)
    gc.collect()
    dist.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here on
    started = perf_counter()
    disk_bytes = next(steps)
    seconds = perf_counter() - started
    peak = _resident("VmHWM") - before
    if not next(steps):
        raise CPSRError(f"rank {dist.get_rank()} has loaded other values than were saved")
    return {"seconds": seconds, "disk_bytes": disk_bytes, "part_bytes": part_bytes, "peak_bytes": peak}


def forget_files(place: Path) -> None:
    """Take the files out of the page cache: a restart meets a cold one."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
