"""Durable files: written under a temporary name, forced to the disk, read back, renamed."""

import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from cpsr.errors import SaveError

__all__ = ["Digest", "hash_file", "hash_in_pieces", "is_temporary", "make_directory", "open_plain", "read_bytes"]
__all__ += ["remove_entry", "remove_tree", "sync_directory", "sync_file", "temporary_name", "write_bytes"]
__all__ += ["write_tensors"]

_log = logging.getLogger(__name__)

_CHECK = "check the disk and the memory"
_LENGTH_BYTES = 8  # a safetensors file starts with its header's length, little-endian
_CHUNK_BYTES = 4 << 20  # large enough for the disk's bandwidth, small in memory


@dataclass(frozen=True)
class Digest:
    """Size in bytes and xxh3-128 (hexadecimal) of one file."""

    bytes: int
    xxh3_128: str


def write_bytes(path: Path, data: bytes, *, fsync: bool) -> None:
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
            if fsync:
                os.fsync(descriptor)
                _drop_from_memory(descriptor)
            os.lseek(descriptor, 0, os.SEEK_SET)
            if _read_all(descriptor) != data:
                raise OSError(errno.EIO, f"what was read back differs from what was written; {_CHECK}", str(path))
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:
        sync_directory(path.parent)


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], *, fsync: bool, metadata: dict[str, str] | None = None
) -> Digest:
    """Write a safetensors file, read it back from the disk, compare it with the tensors and put it in place.

    The directory is not forced to the disk here: the caller does that once for all of its files.

    Args:
        path: final name; its directory exists.
        tensors: contiguous tensors on the CPU that do not change meanwhile.
        fsync: force the file to the disk, and read it back from there and not from the page cache.
        metadata: of the file, in its header.

    Returns:
        Size and hash of the bytes that were read back and verified.

    Raises:
        SaveError: what was read back differs, or the file system refused; no file of that name was left or changed.
        OSError: the same, from a step after the writing itself.
    """
    temporary = temporary_name(path)
    try:
        save_file(tensors, temporary, metadata)
        # The library creates files for the owner alone; access to the directory decides who may read them.
        temporary.chmod(path.parent.stat().st_mode & 0o666)
        if fsync:
            sync_file(temporary)
        digest = hash_file(temporary)
        if digest != _expected_digest(temporary, tensors):
            raise SaveError(f"{path}: what was read back differs from what was written; {_CHECK}")
        temporary.replace(path)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise SaveError(f"{path}: {error}") from error
    except (OSError, SaveError):
        temporary.unlink(missing_ok=True)
        raise
    return digest


def open_plain(path: Path) -> int:
    """Descriptor of a plain file, to read from.

    Raises:
        OSError: the file is absent or not readable, or something else is in its place: a symbolic link (ELOOP), a
            directory (EISDIR), a pipe, a socket or a device (ENXIO). A checkpoint holds none of them.
    """
    # Non-blocking: opening a pipe would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "not a plain file", str(path))


def read_bytes(path: Path) -> bytes:
    """Content of a small file.

    Raises:
        OSError: see `open_plain`.
    """
    descriptor = open_plain(path)
    try:
        return _read_all(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> Digest:
    """Size and hash of a file.

    Raises:
        OSError: see `open_plain`.
    """
    pieces = hash_in_pieces(path)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            digest: Digest = end.value
            return digest


def hash_in_pieces(path: Path) -> Generator[None, None, Digest]:
    """Size and hash of a file: every `next` reads 4 MiB.

    Raises:
        OSError: see `open_plain`.
    """
    state, size = xxhash.xxh3_128(), 0
    descriptor = open_plain(path)
    try:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := os.readv(descriptor, [buffer]):
            state.update(buffer[:count])
            size += count
            yield
    finally:
        os.close(descriptor)
    return Digest(size, state.hexdigest())


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, *, fsync: bool) -> None:
    """Create a directory and its parents; each new name is forced to the disk."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        if fsync:
            sync_directory(directory.parent)


def remove_entry(path: Path) -> None:
    """Remove a file, a link (not its target), or a foreign directory with its contents.

    Raises:
        OSError: the file system refused.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        _log.warning("%s was removed: no checkpoint has a directory in it", path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(directory: Path, *, first: str, fsync: bool) -> None:
    """Remove a checkpoint's directory, the file called `first` before everything else.

    A subdirectory that cannot be removed stays, with the checkpoint's directory and a log line.

    Raises:
        OSError: the file system refused to remove a file, or the directory that is empty now.
    """
    (directory / first).unlink(missing_ok=True)
    if fsync:
        sync_directory(directory)
    stays = False
    for path in list(directory.iterdir()):
        foreign = path.is_dir() and not path.is_symlink()
        try:
            remove_entry(path)
        except OSError as error:
            if not foreign:
                raise
            stays = True
            _log.warning("%s stays: it cannot be removed (%s), which no checkpoint put there; remove it", path, error)
    if stays:
        return
    directory.rmdir()
    if fsync:
        sync_directory(directory.parent)


def is_temporary(path: Path) -> bool:
    """Whether the name is one of a file under construction (ours, or of the safetensors library)."""
    return path.name.startswith(".") and (path.name.endswith(".tmp") or path.name.startswith(".tmp"))


def temporary_name(path: Path) -> Path:
    """Name of a file under construction, which `is_temporary` knows."""
    # The process id keeps a late process of an earlier life from writing into this file.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


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


def _read_all(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    while piece := os.read(descriptor, _CHUNK_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _expected_digest(path: Path, tensors: dict[str, torch.Tensor]) -> Digest:
    """Digest of the file that the library should have written: its header, then the tensors in the header's order."""
    state, size = xxhash.xxh3_128(), 0
    for piece in _expected_pieces(path, tensors):
        state.update(piece)
        size += len(piece)
    return Digest(size, state.hexdigest())


def _expected_pieces(path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    length, header = _read_header(path, tensors)
    yield memoryview(length)
    yield memoryview(header)
    layout = _layout(header)
    # Tensors without elements cost nothing, and the library's header then gives its name of each dtype.
    empty = {key: torch.empty(0, dtype=tensor.dtype, device="cpu") for key, tensor in tensors.items()}
    named = _layout(save(empty)[_LENGTH_BYTES:])
    if layout is None or named is None or layout.keys() != tensors.keys():
        raise SaveError(f"{path}: the header read back lists other tensors than were written; {_CHECK}")
    start = 0
    for key in sorted(layout, key=lambda key: _offsets(layout[key])):
        values, end = tensors[key], start + tensors[key].nbytes
        if layout[key] != {"dtype": named[key]["dtype"], "shape": list(values.shape), "data_offsets": [start, end]}:
            raise SaveError(f"{path}: the header read back describes {key} as {layout[key]!r}; {_CHECK}")
        yield values.reshape(-1).view(torch.uint8).numpy().data
        start = end


def _read_header(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[bytes, bytes]:
    """The header and its length, as they are in the file, once the size of the file agrees with them.

    Raises:
        SaveError: it does not: a wrong length must not decide how much is read or allocated.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(_LENGTH_BYTES)
        header_bytes = int.from_bytes(length, "little")
        if size != _LENGTH_BYTES + header_bytes + sum(tensor.nbytes for tensor in tensors.values()):
            raise SaveError(f"{path}: what was read back differs from what was written in its size, {size}; {_CHECK}")
        return length, file.read(header_bytes)


def _layout(header: bytes) -> dict[str, Any] | None:
    """Tensors by name as a header describes them, None where it is none."""
    try:
        layout = json.loads(header)
    except (ValueError, RecursionError):
        return None
    if not isinstance(layout, dict):
        return None
    layout.pop("__metadata__", None)
    return layout


def _offsets(described: Any) -> list[int]:
    """Start and end of a tensor's bytes, from an untrusted header."""
    offsets = described.get("data_offsets") if isinstance(described, dict) else None
    return offsets if isinstance(offsets, list) and all(isinstance(offset, int) for offset in offsets) else []
