"""Durable files: written under a temporary name, forced to the disk, read back, renamed."""

import errno
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy
import torch
from numpy.typing import NDArray

from cpsr.checkpoint.direct_file import (
    HASHED_PIECE_BYTES,
    PIECE_DIGITS,
    PieceHashes,
    aligned_pieces,
    block_buffer,
    hash_pieces,
    open_direct,
    read_at,
    write_piece,
)
from cpsr.checkpoint.manifest import COMMIT, FileRecord
from cpsr.checkpoint.tensor_file import image_of
from cpsr.errors import SaveError

__all__ = ["exhaust", "for_each", "hash_file", "hash_in_pieces", "is_temporary", "make_directory"]
__all__ += ["names_in", "open_plain", "read_bytes"]
__all__ += ["remove_entry", "remove_tree", "sync_directory", "sync_file", "temporary_name", "write_bytes"]
__all__ += ["write_tensors"]

_log = logging.getLogger(__name__)

_CHECK = "check the disk and the memory"
_CHUNK_BYTES = 4 << 20  # large enough for the disk's bandwidth, small in memory

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Where a call on a file takes so long, so many threads call at a time, each for so many files.
WAIT_SECONDS = 3e-4
THREADS, ITEMS_EACH = 8, 8


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file atomically: temporary name, fsync, read back, rename, fsync of the directory.

    Raises:
        OSError: the file system failed, or returned other bytes than were written (EIO); the temporary file is
            removed, an older file of that name is unchanged.
    """
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
            _drop_from_memory(descriptor)
            os.lseek(descriptor, 0, os.SEEK_SET)
            if _read_all(descriptor, len(data) + 1) != data:
                raise OSError(errno.EIO, f"what was read back differs from what was written; {_CHECK}", str(path))
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_tensors(
    path: Path,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    hashed: Mapping[int, tuple[int, bytes]] | None = None,
) -> FileRecord:
    """Write a safetensors file, read it back from the disk, compare it with the tensors and put it in place.

    The directory is not forced to the disk here: the caller does that once for all of its files.

    Args:
        path: final name; its directory exists.
        tensors: contiguous tensors on the CPU that do not change meanwhile.
        metadata: of the file, in its header.
        hashed: address of the first byte of some memory -> its length, and the hashes of its MiB, where they are known
            already: where the tensors lie there as in the file, they are not hashed again.

    Returns:
        The record of the bytes that were read back and verified.

    Raises:
        SaveError: what was read back differs, or no file can hold these tensors.
        OSError: the file system failed. In every case no file of that name was left or changed.
    """
    temporary = temporary_name(path)
    try:
        written = _write_image(temporary, image_of(tensors, metadata), hashed or {})
        if (start := written.first_difference(hash_file(temporary))) is not None:
            raise SaveError(f"{path}: what was read back differs from what was written from byte {start} on; {_CHECK}")
        temporary.replace(path)
    except (OSError, SaveError) as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # calls on descriptors do not name the file
            error.filename = str(path)
        raise
    return written


def open_plain(path: Path, *, direct: bool = False) -> int:
    """Descriptor of a plain file, to read from.

    Args:
        path: its name.
        direct: read from the disk and not from the page cache, where the file system permits that.

    Raises:
        OSError: the file is absent or not readable, or something else is in its place: a symbolic link (ELOOP), a
            directory (EISDIR), a pipe, a socket or a device (ENXIO). A checkpoint holds none of them.
    """
    return _open_plain(path, direct=direct)[0]


def _open_plain(path: Path, *, direct: bool = False) -> tuple[int, int]:
    """`open_plain`, with the bytes of the file."""
    # Non-blocking: opening a pipe would otherwise wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = open_direct(path, flags) if direct else os.open(path, flags)
    found = os.fstat(descriptor)
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return descriptor, found.st_size
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "not a plain file", str(path))


def read_bytes(path: Path) -> bytes:
    """Content of a small file.

    Raises:
        OSError: see `open_plain`.
    """
    descriptor, size = _open_plain(path)
    try:
        return _read_all(descriptor, size)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> FileRecord:
    """Size and hashes of a file on the disk.

    Raises:
        OSError: see `open_plain`.
    """
    return exhaust(hash_in_pieces(path, direct=True))


def for_each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Results of a call on each of many files, in their order; where calls wait for a file server, some at a time.

    The threads do not keep the process from ending while a file system hangs.

    Raises:
        Exception: of one of the calls; others may not have been made.
    """
    threads, start = 1, 0
    while start < len(items):
        some, began = items[start : start + ITEMS_EACH * threads], time.monotonic()
        results = _at_once(work, some, min(threads, len(some)))
        seconds = (time.monotonic() - began) * threads / len(some)
        threads = THREADS if seconds > WAIT_SECONDS else 1
        start += len(some)
        yield from results


def _at_once(work: Callable[[_Item], _Result], items: Sequence[_Item], count: int) -> list[_Result]:
    parts: dict[int, list[_Result]] = {}
    errors: list[Exception] = []

    def call(first: int) -> None:
        try:
            parts[first] = [work(item) for item in items[first::count]]
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [threading.Thread(target=call, args=(first,), daemon=True) for first in range(1, count)]
    for thread in threads:
        thread.start()
    call(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [parts[place % count][place // count] for place in range(len(items))]


def exhaust(steps: Generator[None, None, _Result]) -> _Result:
    """The result of a generator, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result


def hash_in_pieces(path: Path, *, direct: bool = False) -> Generator[None, None, FileRecord]:
    """Size and hashes of a file: every `next` reads 4 MiB.

    Args:
        path: its name.
        direct: see `open_plain`.

    Raises:
        OSError: see `open_plain`.
    """
    found = PieceHashes()
    descriptor, size = _open_plain(path, direct=direct)
    try:
        buffer = block_buffer(min(_CHUNK_BYTES, size))
        while count := read_at(descriptor, buffer, found.bytes, len(buffer)):
            found.take(buffer[:count])
            yield
    finally:
        os.close(descriptor)
    return FileRecord.of(found)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents; each new name is forced to the disk."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def names_in(directory: Path) -> list[str]:
    """Names of all that lies there: a directory may hold many thousands.

    Raises:
        OSError: it cannot be listed.
    """
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def remove_entry(path: Path) -> None:
    """Remove a file, a link (not its target), or a foreign directory with its contents.

    Raises:
        OSError: the file system refused.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if path.is_symlink() or not path.is_dir():
            raise
        shutil.rmtree(path)
        _log.warning("%s was removed: no checkpoint has a directory in it", path)


def remove_tree(directory: Path) -> None:
    """Remove a checkpoint's directory, its commit record before everything else.

    A subdirectory that cannot be removed stays, with the checkpoint's directory and a log line.

    Raises:
        OSError: the file system refused to remove a file, or the directory that is empty now.
    """
    remove_entry(directory / COMMIT)
    sync_directory(directory)
    if all(list(for_each(_is_removed, list(directory.iterdir())))):
        directory.rmdir()
        sync_directory(directory.parent)


def _is_removed(path: Path) -> bool:
    try:
        remove_entry(path)
    except OSError as error:
        if path.is_symlink() or not path.is_dir():
            raise
        _log.warning("%s belongs to no checkpoint and cannot be removed (%s): remove it by hand", path, error)
        return False
    return True


def is_temporary(path: Path) -> bool:
    """Whether the name is one of a file under construction (ours, or of the safetensors library)."""
    return path.name.startswith(".") and (path.name.endswith(".tmp") or path.name.startswith(".tmp"))


def temporary_name(path: Path) -> Path:
    """Name of a file under construction, which `is_temporary` knows."""
    # A late process of an earlier life does not write into this file; in another container it may have the same number.
    return path.with_name(f".{path.name}.{os.getpid()}-{_token(os.getpid())}.tmp")


@cache
def _token(process: int) -> str:
    """One for each process: a fork has a number of its own, and so a token."""
    return secrets.token_hex(4)


def sync_file(path: Path) -> None:
    """Force a file to the disk, and drop its cached pages, so that the next read comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        _drop_from_memory(descriptor)
    finally:
        os.close(descriptor)


def _drop_from_memory(descriptor: int) -> None:
    """Drop a file's clean pages, so that reading it back reads the disk. Not every platform has the call."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(descriptor: int, size: int) -> bytes:
    """So many bytes of a file, or fewer where it has fewer; an error after some of them is raised."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.read(descriptor, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write_image(path: Path, image: list[NDArray[numpy.uint8]], hashed: Mapping[int, tuple[int, bytes]]) -> FileRecord:
    """Write a new file with these bytes; returns the record of what was to be written."""
    known = _known_hashes(image, hashed)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = open_direct(path, flags)
    written = PieceHashes()
    try:
        for piece in aligned_pieces(image):
            if known is None:
                written.take(piece)
            write_piece(descriptor, piece, path)
        os.fsync(descriptor)
        _drop_from_memory(descriptor)
    finally:
        os.close(descriptor)
    # Access to the directory decides who may read its files.
    path.chmod(path.parent.stat().st_mode & 0o666)
    digests = written.digests() if known is None else known
    return FileRecord.of_pieces(sum(run.nbytes for run in image), digests.hex())


def _known_hashes(image: list[NDArray[numpy.uint8]], hashed: Mapping[int, tuple[int, bytes]]) -> bytes | None:
    """The hashes of a file's MiB, where those of its data are known and its header has whole MiB; else None."""
    header, *runs = image
    if len(runs) != 1 or header.nbytes % HASHED_PIECE_BYTES or runs[0].ctypes.data not in hashed:
        return None
    whole = runs[0].nbytes // HASHED_PIECE_BYTES  # the last MiB may go on in memory, with padding
    length, known = hashed[runs[0].ctypes.data]
    if runs[0].nbytes > length:
        return None
    return (
        hash_pieces(header.data)
        + known[: whole * PIECE_DIGITS // 2]
        + hash_pieces(runs[0][whole * HASHED_PIECE_BYTES :].data)
    )
