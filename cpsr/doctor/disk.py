"""The disk of the run directory, tried out in a folder that is removed afterwards, and shared among the ranks."""

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpsr.checkpoint.files import write_bytes
from cpsr.checkpoint.resources import existing_part
from cpsr.checkpoint.run_directory import checkpoint_bytes
from cpsr.doctor.machine import Finding, size
from cpsr.ranks.group import Group

__all__ = ["check_durable", "check_shared", "check_space", "scratch_folder"]

_DURABLE_WRITES, _DURABLE_BYTES = 10, 4096
_SLOW_SECONDS = 0.1  # a commit forces four files and two folders in a row
_LOOK_SECONDS = 10.0  # a network file system may show another machine's file late
_PAUSE_SECONDS = 0.05


@contextmanager
def scratch_folder(run_dir: Path, name: str) -> Iterator[Path]:
    """A folder in the run directory, or in the nearest one above it that exists; removed at the end.

    Args:
        run_dir: of the run; is not made.
        name: the same on all ranks, and no other call's.

    Raises:
        OSError: it cannot be made.
    """
    folder = existing_part(run_dir) / f".cpsr-doctor-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_durable(folder: Path) -> Finding:
    """How long a small file takes until it is on the disk, as the commit record of a checkpoint does.

    Raises:
        OSError: the file system failed, or is full.
    """
    taken: list[float] = []
    for number in range(_DURABLE_WRITES):
        began = time.perf_counter()
        write_bytes(folder / f"durable-{number}", b"x" * _DURABLE_BYTES)
        taken.append(time.perf_counter() - began)
    median = statistics.median(taken)
    text = f"a small file is on the disk after {1e3 * median:.3g} ms (at most {1e3 * max(taken):.3g})"
    if median > _SLOW_SECONDS:
        advice = "each checkpoint waits for several; a faster disk, or checkpoint less often"
        return Finding("warning", "fsync", text, advice)
    return Finding("ok", "fsync", text)


def check_space(run_dir: Path, needed_bytes: int | None) -> Finding:
    """Free space against the most that the run's checkpoints take. Quotas are not seen."""
    found = os.statvfs(existing_part(run_dir))
    free, own = found.f_bavail * found.f_frsize, checkpoint_bytes(run_dir)
    text = f"{size(free)} are free" + (f", and {size(own)} hold the run's checkpoints" if own else "")
    if needed_bytes is None:
        return Finding("ok", "disk space", f"{text}; not compared with a job")
    text += f"; checkpoints take up to {size(needed_bytes)}"
    if needed_bytes > free + own:
        advice = (
            "the job refuses to start, unless its ranks hold the same; make room, choose another run_dir, "
            "checkpoint less often, or set checkpoint.disk_limit_bytes"
        )
        return Finding("warning", "disk space", text, advice)
    return Finding("ok", "disk space", text)


def check_shared(group: Group, folder: Path | None, run_dir: Path) -> Finding:
    """Whether every rank sees what every rank writes in the run directory; a collective.

    Args:
        group: the ranks.
        folder: of the same name on all ranks, in the run directory; None: this rank could not make it.
        run_dir: as this rank was given it.
    """
    if folder is not None:
        with suppress(OSError):  # then no rank sees it
            (folder / f"token-{group.rank}").write_text(str(group.rank), encoding="ascii")
    below = None  # the part that is not made yet, below the scratch folder's; None: this rank cannot look
    with suppress(OSError):
        below = str(run_dir.absolute().relative_to(existing_part(run_dir)))
    given = group.gather([str(run_dir.absolute()), below])  # every rank has written by then
    until = time.monotonic() + _LOOK_SECONDS
    while (seen := _tokens(folder, group.size)) < group.size and folder and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    counts = group.gather(seen)
    blind = [rank for rank, count in enumerate(counts) if count < group.size]
    blind = blind or [rank for rank, (_, below) in enumerate(given) if below != given[0][1]]
    if not blind:
        return Finding("ok", "shared directory", f"all {group.size} ranks see each other's files in {run_dir}")
    paths = sorted({path for path, _ in given})
    text = f"ranks {', '.join(map(str, blind))} do not see the files of all ranks in {' and '.join(paths)}"
    advice = "run_dir must be one directory, on storage that all machines mount"
    return Finding("error", "shared directory", text, advice)


def _tokens(folder: Path | None, ranks: int) -> int:
    return 0 if folder is None else sum((folder / f"token-{rank}").exists() for rank in range(ranks))
