"""Durable files: written under a temporary name, forced to the disk, read back, renamed."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from cpsr.errors import SaveError

__all__ = ["Digest", "hash_file", "is_temporary", "make_directory", "remove_tree", "sync_directory"]
__all__ += ["sync_file", "temporary_name", "write_bytes", "write_tensors"]

_CHUNK_BYTES = 4 << 20  # large enough for the disk's bandwidth, small enough to stay out of the way in memory


@dataclass(frozen=True)
class Digest:
    """Size in bytes and xxh3-128 (hexadecimal) of one file."""

    bytes: int
    xxh3_128: str


def write_bytes(path: Path, data: bytes, *, fsync: bool) -> None:
    """Put a small file in place at once: temporary name, fsync, rename, fsync of the directory.

    Raises:
        OSError: the file system refused; the temporary file is gone, an older file of that name is untouched.
    """
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if fsync:
                os.fsync(descriptor)
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
        tensors: contiguous tensors on the CPU that nobody changes meanwhile.
        fsync: force the file to the disk, and read it back from there and not from the page cache.
        metadata: of the file, in its header.

    Returns:
        Size and hash of what was read back, which is what was to be written.

    Raises:
        SaveError: what was read back differs, or the file system refused; no file of that name was left or changed.
        OSError: the same, from a step after the writing itself.
    """
    temporary = temporary_name(path)
    try:
        save_file(tensors, temporary, metadata)
        # The library creates its files for the owner alone; who may enter the directory may read what is in it.
        temporary.chmod(path.parent.stat().st_mode & 0o666)
        if fsync:
            sync_file(temporary)
        digest = hash_file(temporary)
        if digest != _expected_digest(temporary, tensors):
            raise SaveError(f"{path}: what was read back differs from what was written; check the disk and the memory")
        temporary.replace(path)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise SaveError(f"{path}: {error}") from error
    except (OSError, SaveError):
        temporary.unlink(missing_ok=True)
        raise
    return digest


def hash_file(path: Path) -> Digest:
    """Size and hash of a file.

    Raises:
        OSError: the file is absent, not readable, or a symbolic link (a checkpoint holds none).
    """
    state, size = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := os.readv(descriptor, [buffer]):
            state.update(buffer[:count])
            size += count
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


def remove_tree(directory: Path, *, first: str, fsync: bool) -> None:
    """Remove a directory of plain files, the file called `first` before everything else."""
    marker = directory / first
    if marker.exists():
        marker.unlink()
        if fsync:
            sync_directory(directory)
    for path in list(directory.iterdir()):
        path.unlink(missing_ok=True)
    directory.rmdir()
    if fsync:
        sync_directory(directory.parent)


def is_temporary(path: Path) -> bool:
    """Whether the name is one of a file under construction (ours, or of the safetensors library)."""
    return path.name.startswith(".") and (path.name.endswith(".tmp") or path.name.startswith(".tmp"))


def temporary_name(path: Path) -> Path:
    """Name of a file under construction, which `is_temporary` knows."""
    # The process id keeps a straggler of an earlier life from writing into the file of this one.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync_file(path: Path) -> None:
    """Force a file to the disk, and what is read of it next to come from there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        # Clean pages are dropped, so that the reading back asks the disk. Not every platform has the call.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _expected_digest(path: Path, tensors: dict[str, torch.Tensor]) -> Digest:
    """Digest of the file that the library should have written: its header, then the tensors in the header's order."""
    state, size = xxhash.xxh3_128(), 0
    for piece in _expected_pieces(path, tensors):
        state.update(piece)
        size += len(piece)
    return Digest(size, state.hexdigest())


def _expected_pieces(path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    with path.open("rb") as file:
        length = file.read(8)  # the format starts with the header's length, little-endian
        header = file.read(int.from_bytes(length, "little"))
    yield memoryview(length)
    yield memoryview(header)
    layout = json.loads(header)
    layout.pop("__metadata__", None)
    if layout.keys() != tensors.keys():
        raise SaveError(f"{path}: the header read back lists other tensors than were written")
    for key in sorted(layout, key=lambda key: layout[key]["data_offsets"]):
        yield tensors[key].reshape(-1).view(torch.uint8).numpy().data
