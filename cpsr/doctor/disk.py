"""The disk of the run directory, tried out in a folder that is removed afterwards."""

import fcntl
import mmap
import os
import shutil
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cpsr.checkpoint.direct_file import (
    BLOCK_BYTES,
    DIRECT,
    PIECE_BYTES,
    block_buffer,
    open_direct,
    read_pieces,
    write_piece,
)
from cpsr.checkpoint.files import sync_directory, write_bytes
from cpsr.checkpoint.resources import existing_part
from cpsr.doctor.finding import FULL, Finding, error, ok, size, warning
from cpsr.doctor.needs import Needs
from cpsr.errors import JournalError
from cpsr.journal import Journal

__all__ = ["FOLDER", "check_bandwidth", "check_direct", "check_durable", "check_journal", "check_operations"]
__all__ += ["scratch_folder"]

FOLDER = ".cpsr-doctor-"  # and a name of its own
FILE_BYTES = 4 * PIECE_BYTES
_FIRST_BYTES = 1 << 20
_SECONDS = 5.0  # that a check takes at most on a slow disk, while the other ranks wait
_FREE_SHARE = 8  # at most this part of the free space is written
_DURABLE_WRITES = 20
_SLOW_SECONDS = 0.1  # a commit forces four files and two folders in a row
_JOURNAL_SECONDS = 10.0
_LINKS = "hard links"
_LOCKS = "use a file system with locks and room (NFS: lockd, or NFS 4)"


@contextmanager
def scratch_folder(run_dir: Path, name: str) -> Iterator[Path]:
    """A folder in the run directory, or in the nearest one above it that exists; removed at the end.

    Args:
        run_dir: of the run; is not made.
        name: of this call; ranks that use one folder give the same.

    Raises:
        OSError: it cannot be made.
    """
    folder = existing_part(run_dir) / f"{FOLDER}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_operations(folder: Path) -> Finding:
    """What the files of a run need: appends, renames, links, exclusive folders, mappings, locks.

    Raises:
        OSError: there is no room.
    """
    refused = {}
    for name, attempt in _OPERATIONS.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        try:
            attempt(place)
        except OSError as problem:
            if problem.errno in FULL:
                raise
            refused[name] = f"{name} ({problem.strerror or problem})"
    if set(refused) == {_LINKS}:
        advice = "what a checkpoint could share with an older one is copied; nothing else depends on them"
        return warning("operations", f"it refuses: {refused[_LINKS]}", advice, refused=[_LINKS])
    if refused:
        advice = "use a file system that has them (a disk, NFS, Lustre), and checkpoint.target for an object store"
        return error("operations", f"it refuses: {', '.join(refused.values())}", advice, refused=list(refused))
    return ok("operations", f"{', '.join(_OPERATIONS)} work")


def check_direct(folder: Path) -> Finding:
    """Whether files can be written past the page cache (O_DIRECT)."""
    path, block = folder / "direct", block_buffer(BLOCK_BYTES)
    descriptor = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    try:
        write_piece(descriptor, block, path)
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)
    finally:
        os.close(descriptor)
        path.unlink()
    if direct:
        return ok("direct I/O", "O_DIRECT works", direct=True)
    advice = "files take the page cache, which costs processor time; a local disk or another mount option has it"
    return warning("direct I/O", "the file system refuses O_DIRECT", advice, direct=False)


def check_durable(folder: Path) -> Finding:
    """How long a small file takes until it is on the disk, as the commit record of a checkpoint does."""
    taken: list[float] = []
    for number in range(_DURABLE_WRITES):
        if sum(taken) > _SECONDS:
            break
        began = time.perf_counter()
        write_bytes(folder / f"durable-{number}", b"x" * BLOCK_BYTES, fsync=True)
        taken.append(time.perf_counter() - began)
    median, most = statistics.median(taken), max(taken)
    figures = {"median_seconds": median, "max_seconds": most}
    text = f"a small file is on the disk after {1e3 * median:.3g} ms ({1e3 * min(taken):.3g} to {1e3 * most:.3g})"
    if median > _SLOW_SECONDS:
        advice = "each checkpoint waits for several; a faster disk, or checkpoint less often"
        return warning("fsync", text, advice, **figures)
    return ok("fsync", text, **figures)


def check_bandwidth(folder: Path, needs: Needs) -> Finding:
    """Bytes a second of one process, and what they mean for a checkpoint of this machine's ranks.

    Its figure `commit_seconds` is None where the job's size is not given.

    Raises:
        OSError: the file system failed, or is full.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize // _FREE_SHARE
    slowest = min(_rates(folder / "bandwidth", _blocks(min(_FIRST_BYTES, room))))
    count = _blocks(int(min(FILE_BYTES, room, max(_FIRST_BYTES, _SECONDS * slowest))))
    write, read = _rates(folder / "bandwidth", count)
    seconds = needs.commit_seconds(write, read)
    figures = {
        "write_bytes_per_second": write,
        "read_bytes_per_second": read,
        "measured_bytes": count,
        "commit_seconds": seconds,
    }
    text = f"{size(write)}/s written and forced to the disk, {size(read)}/s read back ({size(count)})"
    if seconds is None:
        return ok("bandwidth", text, **figures)
    text += f"; a checkpoint of this machine's ranks takes about {seconds:.3g} s"
    limit = needs.config.checkpoint.save_timeout_seconds
    if seconds > limit:
        advice = f"checkpoint.save_timeout_seconds is {limit:g}: raise it, or take a faster disk"
        return warning("bandwidth", text, advice, **figures)
    return ok("bandwidth", text, **figures)


def check_journal(folder: Path) -> Finding:
    """Whether the journal (SQLite) can be made and written there, in the mode that its file system permits."""
    began, path = time.perf_counter(), folder / "journal.db"
    try:
        journal = Journal.open(path)
    except JournalError as problem:
        return error("journal", f"SQLite cannot be used there ({problem})", _LOCKS)
    try:
        journal.start_life("exact")
        written = journal.flush(_JOURNAL_SECONDS)
        failures = journal.failures()
    finally:
        journal.close(_JOURNAL_SECONDS)
    seconds = time.perf_counter() - began
    if failures or not written:
        why = "; ".join(failures) or f"nothing was written in {_JOURNAL_SECONDS:g} s"
        return error("journal", f"SQLite cannot write there ({why})", _LOCKS)
    with closing(sqlite3.connect(path)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    return ok("journal", f"SQLite writes there in mode {mode}, opened in {1e3 * seconds:.3g} ms", mode=mode)


def _blocks(count: int) -> int:
    """Bytes of whole blocks, one at least."""
    return max(1, count // BLOCK_BYTES) * BLOCK_BYTES


def _rates(path: Path, count: int) -> tuple[float, float]:
    """Bytes a second, written and forced to the disk, and read back; past the page cache where that is permitted.

    The file has no name while it is used, so that nothing is left however this ends.
    """
    piece = block_buffer(min(count, PIECE_BYTES))
    piece[:] = os.urandom(len(piece))  # no file system can make less of it
    descriptor = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        path.unlink()
        began, left = time.perf_counter(), count
        while left:
            write_piece(descriptor, piece[: min(left, len(piece))], path)
            left -= min(left, len(piece))
        os.fsync(descriptor)
        written = time.perf_counter()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # where it went through the page cache
        os.lseek(descriptor, 0, os.SEEK_SET)
        for _ in read_pieces(descriptor):
            pass
        ended = time.perf_counter()
    finally:
        os.close(descriptor)
    return count / (written - began), count / (ended - written)


def _append(place: Path) -> None:
    for _ in range(2):
        with (place / "file").open("ab") as file:
            file.write(b"line\n")
    if (place / "file").read_bytes() != b"line\nline\n":
        raise OSError("an append did not go to the end")


def _rename(place: Path) -> None:
    (place / "old").write_bytes(b"old")
    (place / "new").write_bytes(b"new")
    (place / "new").replace(place / "old")
    sync_directory(place)
    if (place / "old").read_bytes() != b"new":
        raise OSError("the older file is still there")


def _link(place: Path) -> None:
    (place / "file").write_bytes(b"file")
    os.link(place / "file", place / "other")


def _claim(place: Path) -> None:
    (place / "claim").mkdir()
    try:
        (place / "claim").mkdir()
    except FileExistsError:
        return
    raise OSError("a folder was made twice")


def _map(place: Path) -> None:
    with (place / "file").open("w+b") as file:
        file.write(bytes(BLOCK_BYTES))
        file.flush()
        with mmap.mmap(file.fileno(), BLOCK_BYTES) as mapped:
            mapped[0] = 1
            mapped.flush()
    if (place / "file").read_bytes()[0] != 1:
        raise OSError("a mapped byte is not in the file")


def _lock(place: Path) -> None:
    with (place / "file").open("w+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_OPERATIONS: dict[str, Callable[[Path], None]] = {
    "appends": _append,
    "renames": _rename,
    _LINKS: _link,
    "exclusive folders": _claim,
    "shared mappings": _map,
    "locks": _lock,
}
