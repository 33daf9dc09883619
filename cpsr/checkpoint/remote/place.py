"""A folder of checkpoints at an fsspec URL, with the few operations that copies need."""

import contextlib
import errno
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from cpsr.checkpoint.file_hash import Digest
from cpsr.checkpoint.files import (
    make_directory,
    open_plain,
    read_bytes,
    remove_tree,
    sync_directory,
    temporary_name,
    write_bytes,
)
from cpsr.checkpoint.manifest import step_iteration
from cpsr.checkpoint.remote.requests import PART_BYTES, SENDS, copy_file, options_for, read_ranges, takes_parts
from cpsr.errors import ConfigError, CPSRError, TargetError

__all__ = ["Place", "TargetAbsentError", "digest_of", "open_place"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20  # large enough for a network's bandwidth, small enough to stop between two of them
_FOLDER = "checkpoints"
# Errors of a file system where there is nothing, or no plain file, in a file's place.
_ABSENT = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)
_USER = re.compile(r"(?<=://)[^/@]*@")  # user and password in a URL


class TargetAbsentError(TargetError):
    """There is nothing, or no plain file, in a file's place at the target."""


def open_place(url: str, run_dir: Path | None = None) -> "Place":
    """The folder behind an fsspec URL; nothing is read or written yet.

    Args:
        url: for example `s3://bucket/run`, `file:///mnt/x/run`, `memory://run`. The file system's package takes the
            credentials from the environment.
        run_dir: of the run whose copies lie there.

    Raises:
        ConfigError: no file system of that name is installed, the URL is not usable, or one of the two directories
            lies in the other.
    """
    shown = _USER.sub("", url)
    if "::" in url:
        raise ConfigError(
            f"checkpoint.target '{shown}' is a chain of file systems; give a plain URL: what is read back must come "
            "from where it was written to"
        )
    try:
        # A separate instance: others in this process may cache listings.
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options_for(url))
    except ImportError as error:
        raise ConfigError(
            f"checkpoint.target '{shown}': {error} (pip install 'cpsr[s3]' or 'cpsr[gcs]' has those of S3 and of "
            "Google's storage)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.target '{shown}' is not usable: {_USER.sub('', str(error))}") from error
    if type(system) is not LocalFileSystem:  # a subclass may not use the local disk
        return RemotePlace(shown, system, root)
    if run_dir is not None:
        _refuse_overlap(Path(root), run_dir)
    return LocalPlace(shown, Path(root))


def _refuse_overlap(root: Path, run_dir: Path) -> None:
    there, here = root.resolve(), run_dir.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise ConfigError(f"the target {root} and run_dir {run_dir} lie in one another; a copy belongs on another disk")


def digest_of(chunks: Iterable[bytes]) -> Digest:
    """Size and hash of a file from its pieces."""
    state, size = xxhash.xxh3_128(), 0
    for chunk in chunks:
        state.update(chunk)
        size += len(chunk)
    return Digest(size, state.hexdigest())


class Place(ABC):
    """Folders of checkpoints, one level deep, with plain files in them.

    Every error of a file system becomes a `TargetError` that names the file; `TargetAbsentError` where nothing is
    there. Nothing is cached, and names in a listing never lead outside the folder.

    Attributes:
        shown: the URL without user and password, for messages.
        sends: files that `begin` may send at a time; 0 where only `send` works.
    """

    sends = 0

    def __init__(self, shown: str) -> None:
        self.shown = shown.rstrip("/")

    def name(self, folder: str, file: str = "") -> str:
        """Full name of a file or folder, for messages."""
        return f"{self.shown}/{_FOLDER}/{folder}" + (f"/{file}" if file else "")

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints, ascending; none where the target does not exist yet."""
        with self._asking("listing", ""):
            return sorted(name for name in self._list("") if step_iteration(name) is not None)

    def files(self, folder: str) -> list[str]:
        """Names in a folder; none where it is gone."""
        with self._asking("listing", folder):
            return self._list(folder)

    def read(self, folder: str, file: str, size: int | None = None) -> bytes:
        """Content of a small file.

        Args:
            folder: where it is.
            file: its name.
            size: in bytes, that it should have; spares a request, and of a longer file one byte more is read.
        """
        with self._asking("reading", folder, file):
            return self._read(folder, file, size)

    def chunks(self, folder: str, file: str) -> Iterator[bytes]:
        """Content of a file of any size, piece by piece."""
        with self._asking("reading", folder, file):
            yield from self._chunks(folder, file)

    def write(self, folder: str, file: str, data: bytes) -> None:
        """Write a small file and read it back.

        Raises:
            TargetError: the target refused, or gave back something else.
        """
        with self._asking("writing", folder, file):
            self._write(folder, file, data)
        if self.read(folder, file, len(data)) != data:
            raise TargetError(f"{self.name(folder, file)}: what was read back differs from what was written")

    def send(self, folder: str, file: str, chunks: Iterable[bytes]) -> None:
        """Write a file of any size; errors of CPSR in `chunks` are passed on."""
        with self._asking("writing", folder, file):
            self._send(folder, file, chunks)

    def begin(self, folder: str, file: str, descriptor: int, size: int, check: Callable[[], None]) -> Future[Digest]:
        """Begin to write a local file in parts and to read it back, beside others; `finish` waits for it.

        Args:
            folder: where to.
            file: the name there.
            descriptor: of the local file, from its beginning; it is closed in the end.
            size: in bytes, that the file should have.
            check: called after each part; what it raises ends the writing.
        """
        raise NotImplementedError(f"{self.shown} takes no files in parts")

    def finish(self, folder: str, file: str, writing: Future[Digest]) -> Digest:
        """Wait for the result of `begin`: what was read back. Errors of CPSR in its `check` are passed on."""
        with self._asking("writing", folder, file):
            return writing.result()

    def duplicate(self, folder: str, file: str, target: str, size: int) -> bool:
        """Give a file the same name in another folder without sending it; False where the file system cannot.

        Args:
            folder: where it is.
            file: its name.
            target: folder that exists.
            size: in bytes, that the new file must have.
        """
        try:
            with self._asking("copying", folder, file):
                return self._duplicate(folder, file, target) == size
        except TargetError as error:
            _log.debug("%s is sent again: %s", self.name(target, file), error)
            return False

    def make(self, folder: str) -> None:
        """Create a folder, where there are folders. The target's parent must exist: a mount may be missing."""
        with self._asking("creating", folder):
            self._make(folder)

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder and what is in it, the file called `first` before everything else."""
        with self._asking("removing", folder), contextlib.suppress(FileNotFoundError):
            self._remove(folder, first)

    @contextlib.contextmanager
    def _asking(self, what: str, folder: str, file: str = "") -> Iterator[None]:
        try:
            yield
        except CPSRError:
            raise
        except Exception as error:
            name = self.name(folder, file)
            if isinstance(error, OSError) and (error.errno in _ABSENT or isinstance(error, FileNotFoundError)):
                raise TargetAbsentError(f"{name}: {what} failed: nothing is there, or no plain file") from error
            # File systems raise errors of their own libraries: botocore, aiohttp and others.
            raise TargetError(f"{name}: {what} failed ({type(error).__name__}: {_USER.sub('', str(error))})") from error

    @abstractmethod
    def _list(self, folder: str) -> list[str]: ...

    @abstractmethod
    def _read(self, folder: str, file: str, size: int | None) -> bytes: ...

    @abstractmethod
    def _chunks(self, folder: str, file: str) -> Iterator[bytes]: ...

    @abstractmethod
    def _write(self, folder: str, file: str, data: bytes) -> None: ...

    @abstractmethod
    def _send(self, folder: str, file: str, chunks: Iterable[bytes]) -> None: ...

    @abstractmethod
    def _duplicate(self, folder: str, file: str, target: str) -> int: ...

    @abstractmethod
    def _make(self, folder: str) -> None: ...

    @abstractmethod
    def _remove(self, folder: str, first: str) -> None: ...


class LocalPlace(Place):
    """A directory of this machine, a mounted one for example: files are forced to the disk, links never followed.

    Attributes:
        root: the directory.
    """

    def __init__(self, shown: str, root: Path) -> None:
        super().__init__(shown)
        self.root = root

    def _list(self, folder: str) -> list[str]:
        directory = self._path(folder) if folder else self.root / _FOLDER
        if not directory.is_dir():
            return []
        return [path.name for path in directory.iterdir() if not path.is_symlink()]

    def _read(self, folder: str, file: str, size: int | None) -> bytes:
        return read_bytes(self._path(folder) / file)

    def _chunks(self, folder: str, file: str) -> Iterator[bytes]:
        with open(open_plain(self._path(folder) / file), "rb", buffering=0) as opened:  # noqa: PTH123 - a descriptor
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk

    def _write(self, folder: str, file: str, data: bytes) -> None:
        write_bytes(self._path(folder) / file, data, fsync=True)

    def _send(self, folder: str, file: str, chunks: Iterable[bytes]) -> None:
        path = self._path(folder) / file
        temporary = temporary_name(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666), "wb", buffering=0) as opened:
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[os.write(opened.fileno(), left) :]
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):  # so that reading it back reads the disk
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        temporary.replace(path)
        sync_directory(path.parent)

    def _duplicate(self, folder: str, file: str, target: str) -> int:
        path = self._path(target) / file
        path.unlink(missing_ok=True)
        os.link(self._path(folder) / file, path, follow_symlinks=False)
        sync_directory(path.parent)
        return path.lstat().st_size

    def _make(self, folder: str) -> None:
        if not self.root.parent.is_dir():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root.parent))
        make_directory(self._path(folder), fsync=True)

    def _remove(self, folder: str, first: str) -> None:
        remove_tree(self._path(folder), first=first, fsync=True)

    def _path(self, folder: str) -> Path:
        directory = self.root / _FOLDER / folder
        if directory.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
        return directory


class RemotePlace(Place):
    """A folder of any other file system that fsspec knows."""

    def __init__(self, shown: str, system: Any, root: str) -> None:
        super().__init__(shown)
        self._system = system
        self._root = root.rstrip("/")
        self.sends = SENDS if takes_parts(system) else 0

    def begin(self, folder: str, file: str, descriptor: int, size: int, check: Callable[[], None]) -> Future[Digest]:
        """See `Place`."""
        return copy_file(self._system, descriptor, self._path(folder, file), size, check)

    def _list(self, folder: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []  # in object stores a folder exists only through its files
        return [name for name in (path.rstrip("/").rpartition("/")[2] for path in found) if name]

    def _read(self, folder: str, file: str, size: int | None) -> bytes:
        # Without a range object stores are asked for the size first.
        asked = {"start": 0, "end": size + 1} if size and self._system.async_impl else {}
        return bytes(self._system.cat_file(self._path(folder, file), **asked))

    def _chunks(self, folder: str, file: str) -> Iterator[bytes]:
        path = self._path(folder, file)
        self._system.invalidate_cache()  # a listing may hold the size of an older file of that name
        size = self._system.info(path)["size"] if self._system.async_impl else None
        if size is not None:
            yield from read_ranges(self._system, path, size)
            return
        with self._system.open(path, "rb", block_size=PART_BYTES) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk

    def _write(self, folder: str, file: str, data: bytes) -> None:
        self._system.pipe_file(self._path(folder, file), data)

    def _send(self, folder: str, file: str, chunks: Iterable[bytes]) -> None:
        # Closing keeps the partial file, also after an error: without a commit record it does not count.
        with self._system.open(self._path(folder, file), "wb", block_size=PART_BYTES) as opened:
            for chunk in chunks:
                opened.write(chunk)

    def _duplicate(self, folder: str, file: str, target: str) -> int:
        self._system.cp_file(self._path(folder, file), self._path(target, file))  # object stores copy by themselves
        self._system.invalidate_cache()
        return int(self._system.info(self._path(target, file))["size"])

    def _make(self, folder: str) -> None:
        # Never with parents: on an object store that would create a bucket whose name was mistyped.
        with contextlib.suppress(Exception):  # often the others are there; if not, whatever the error, they are made
            self._system.mkdir(self._path(folder), create_parents=False)
            return
        bucket = "/" not in self._root.strip("/")
        for path in [*([] if bucket else [self._root]), self._path(""), self._path(folder)]:
            with contextlib.suppress(FileExistsError):
                self._system.mkdir(path, create_parents=False)

    def _remove(self, folder: str, first: str) -> None:
        there = self._list(folder)
        if first in there:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(self._path(folder, first))
        self._system.invalidate_cache()
        if there or not self._system.async_impl:
            self._system.rm(self._path(folder), recursive=True)

    def _path(self, folder: str, file: str = "") -> str:
        return "/".join(part for part in (self._root, _FOLDER, folder, file) if part)
