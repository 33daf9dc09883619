"""A place for copies of checkpoints at an fsspec URL: a mounted directory, an object store, any other file system."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cpsr.checkpoint.direct_file import PieceHashes
from cpsr.checkpoint.files import sync_directory, sync_file, write_bytes
from cpsr.checkpoint.manifest import COMMIT, FileRecord
from cpsr.errors import ConfigError, CPSRError, TargetError

__all__ = ["CopyDamagedError", "Place", "open_place"]

_FOLDER = "checkpoints"
_READ_BYTES = 16 << 20
_USER = re.compile(r"(?<=://)[^/@]*@")  # user and password in a URL


class CopyDamagedError(TargetError):
    """A file of a copy is torn, missing, altered or no plain file; the message names it."""


def open_place(url: str, run_dir: Path | None = None) -> "Place":
    """The place behind an fsspec URL; nothing is read or written yet.

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
    import fsspec  # 20 ms, which a job without a target does not spend

    try:
        # An instance of its own: others in this process may cache listings.
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"checkpoint.target '{shown}': {error} (pip install 'cpsr[s3]' or 'cpsr[gcs]' has those of S3 and of "
            "Google's storage)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.target '{shown}' is not usable: {_USER.sub('', str(error))}") from error
    place = Place(shown, system, root)
    if place.is_local and run_dir is not None:
        there, here = Path(root).resolve(), run_dir.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigError(f"the target {root} and run_dir {run_dir} lie in one another; use another disk")
    return place


class Place:
    """Folders with plain files in them, at a URL.

    Every error of a file system becomes a `TargetError` that names the file; `CopyDamagedError` where a file to be read
    is not there. No link is followed.

    Args:
        shown: the URL without user and password, for messages.
        system: of fsspec, without a cache of listings.
        root: the path of the target there.

    Attributes:
        shown, system: as given.
        is_local: a directory of this machine, maybe a mounted one.
    """

    def __init__(self, shown: str, system: Any, root: str) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.shown = shown.rstrip("/")
        self.system = system
        self._root = root.rstrip("/")
        self.is_local = isinstance(system, LocalFileSystem)

    def name(self, folder: str, file: str = "") -> str:
        """Full name of a file or folder, for messages."""
        return f"{self.shown}/{_FOLDER}/{folder}" + (f"/{file}" if file else "")

    def list(self, folder: str = "") -> Sequence[str]:
        """Names in a folder, or of all folders, ascending; none where it is gone. Links are left out."""
        with self._asking("listing", folder):
            try:
                found = self.system.ls(self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []  # in object stores a folder exists only through its files
            names = (one["name"].rstrip("/").rpartition("/")[2] for one in found if not one.get("islink"))
            return sorted(name for name in names if name)

    def make(self, folder: str) -> None:
        """Create a folder, where there are folders."""
        # Never with parents: a mount may be missing, and an object store would create a bucket of a mistyped name.
        bucket = not self.is_local and "/" not in self._root.strip("/")
        with self._asking("creating", folder):
            for path in [*([] if bucket else [self._root]), self._path(""), self._path(folder)]:
                with contextlib.suppress(FileExistsError):
                    self.system.mkdir(path, create_parents=False)
                    if self.is_local:
                        sync_directory(Path(path).parent)

    def put(self, folder: str, path: Path, record: FileRecord) -> None:
        """Write a file of this machine under its own name, and read it back.

        Raises:
            CopyDamagedError: something else than its record says was read back.
        """
        with self._asking("writing", folder, path.name):
            self.system.put_file(str(path), self._path(folder, path.name))
        self._read_back(folder, path.name, record)

    def repeat(self, folder: str, file: str, source: str, record: FileRecord) -> None:
        """Put a file that another folder has: the file system copies it by itself; raises as `put`."""
        with self._asking("copying", source, file):
            self.system.cp_file(self._path(source, file), self._path(folder, file))
        self._read_back(folder, file, record)

    def write(self, folder: str, file: str, data: bytes) -> None:
        """Write a small file, and read it back; raises as `put`."""
        with self._asking("writing", folder, file):
            if self.is_local:
                write_bytes(Path(self._path(folder, file)), data)
            else:
                self.system.pipe_file(self._path(folder, file), data)
        if self.read(folder, file) != data:
            raise CopyDamagedError(f"{self.name(folder, file)}: what was read back differs from what was written")

    def open(self, folder: str, file: str, record: FileRecord | None = None) -> Iterator[bytes]:
        """Content of a file in pieces, compared with its record: the size before the first, the hashes after the last.

        Raises:
            CopyDamagedError: it is missing, no plain file, or not what its record says.
        """
        found, name = PieceHashes(), self.name(folder, file)
        with self._asking("reading", folder, file):
            path = self._path(folder, file)
            known = self.system.info(path)
            if known["type"] != "file" or known.get("islink"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
            if record is not None and known["size"] != record.bytes:
                raise CopyDamagedError(f"{name} has {known['size']} bytes, {record.bytes} were committed")
            with self.system.open(path, "rb") as opened:
                while piece := opened.read(_READ_BYTES):
                    found.take(memoryview(piece))
                    yield piece
        if record is not None and record.first_difference(FileRecord.of(found)) is not None:
            raise CopyDamagedError(f"{name} is not what was committed: its hash differs")

    def read(self, folder: str, file: str) -> bytes:
        """Content of a small file; raises as `open`."""
        return b"".join(self.open(folder, file))

    def check(self, folder: str, file: str, record: FileRecord) -> None:
        """Read a file and compare it with its record; raises as `open`."""
        for _ in self.open(folder, file, record):
            pass

    def drop(self, folder: str) -> None:
        """Remove a folder and what is in it, its commit record before everything else."""
        with self._asking("removing", folder), contextlib.suppress(FileNotFoundError):
            if COMMIT in self.list(folder):
                self.system.rm_file(self._path(folder, COMMIT))
                if self.is_local:
                    sync_directory(Path(self._path(folder)))
            self.system.rm(self._path(folder), recursive=True)

    def _read_back(self, folder: str, file: str, record: FileRecord) -> None:
        """Compare a file that was written; on this machine it is forced to the disk before, and read from there."""
        if self.is_local:
            with self._asking("writing", folder, file):
                sync_file(Path(self._path(folder, file)))
        self.check(folder, file, record)

    def _path(self, folder: str, file: str = "") -> str:
        path = "/".join(part for part in (self._root, _FOLDER, folder, file) if part)
        if self.is_local and folder and Path(self._root, _FOLDER, folder).is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return path

    @contextlib.contextmanager
    def _asking(self, what: str, folder: str, file: str = "") -> Iterator[None]:
        try:
            yield
        except CPSRError:
            raise
        except Exception as error:
            name = self.name(folder, file)
            absent = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
            if what == "reading" and (absent or (isinstance(error, OSError) and error.errno == errno.ELOOP)):
                raise CopyDamagedError(f"{name} is missing, or no plain file") from error
            # File systems raise errors of their own libraries: botocore, aiohttp and others.
            raise TargetError(f"{name}: {what} failed ({type(error).__name__}: {_USER.sub('', str(error))})") from error
