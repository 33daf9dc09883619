"""A folder of checkpoints at an fsspec URL: a mounted directory, an object store, or any other file system."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from cpsr.checkpoint.files import FileHash, make_directory, sync_directory, sync_file, write_bytes
from cpsr.checkpoint.manifest import FileRecord, step_iteration
from cpsr.errors import ConfigError, CPSRError, TargetError

__all__ = ["CopyDamagedError", "CopyStoppedError", "Place", "open_place"]

_FOLDER = "checkpoints"
_READ_BYTES = 16 << 20  # between two looks whether to stop
_USER = re.compile(r"(?<=://)[^/@]*@")  # user and password in a URL


class CopyDamagedError(TargetError):
    """A file of a copy is torn, missing, altered or no plain file; the message names it."""


class CopyStoppedError(TargetError):
    """Copying was asked to stop; what is at the target is not committed."""


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
        # An instance of its own: others in this process may cache listings.
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"checkpoint.target '{shown}': {error} (pip install 'cpsr[s3]' or 'cpsr[gcs]' has those of S3 and of "
            "Google's storage)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.target '{shown}' is not usable: {_USER.sub('', str(error))}") from error
    if isinstance(system, LocalFileSystem) and run_dir is not None:
        there, here = Path(root).resolve(), run_dir.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigError(f"the target {root} and run_dir {run_dir} lie in one another; use another disk")
    return Place(shown, system, root)


class Place:
    """Folders of checkpoints, one level deep, with plain files in them.

    Every error of a file system becomes a `TargetError` that names the file; `CopyDamagedError` where a file to be read
    is not there. Names in a listing never lead outside the folder. On this machine files are forced to the disk.

    Args:
        shown: the URL without user and password, for messages.
        system: of fsspec, without a cache of listings.
        root: the path of the target there.

    Attributes:
        shown: as given.
        stopped: asked while files are sent and compared; once true, that ends with `CopyStoppedError`.
    """

    def __init__(self, shown: str, system: Any, root: str) -> None:
        self.shown = shown.rstrip("/")
        self.stopped: Callable[[], bool] = lambda: False
        self._system = system
        self._root = root.rstrip("/")
        self._is_local = isinstance(system, LocalFileSystem)

    def name(self, folder: str, file: str = "") -> str:
        """Full name of a file or folder, for messages."""
        return f"{self.shown}/{_FOLDER}/{folder}" + (f"/{file}" if file else "")

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints, ascending; none where the target does not exist yet."""
        return sorted(name for name in self.files("") if step_iteration(name) is not None)

    def files(self, folder: str) -> list[str]:
        """Names in a folder; none where it is gone."""
        with self._asking("listing", folder):
            try:
                found = self._system.ls(self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []  # in object stores a folder exists only through its files
            names = [one["name"].rstrip("/").rpartition("/")[2] for one in found if not one.get("islink")]
            return [name for name in names if name]

    def read(self, folder: str, file: str) -> bytes:
        """Content of a small file."""
        self._size(folder, file)
        with self._asking("reading", folder, file):
            return bytes(self._system.cat_file(self._path(folder, file)))

    def holds(self, folder: str, file: str, record: FileRecord) -> bool:
        """Whether a file has the size and the hash of its record; reads all of it."""
        if self._size(folder, file) != record.bytes:
            return False
        found = FileHash()
        with self._asking("reading", folder, file), self._system.open(self._path(folder, file), "rb") as opened:
            while piece := opened.read(_READ_BYTES):
                found.take(memoryview(piece))
                self._refuse_stop()
        return record.first_difference(found.record()) is None

    def write(self, folder: str, file: str, data: bytes) -> None:
        """Write a small file and read it back; TargetError also where something else was returned."""
        with self._asking("writing", folder, file):
            if self._is_local:
                write_bytes(Path(self._path(folder, file)), data)
            else:
                self._system.pipe_file(self._path(folder, file), data)
        if self.read(folder, file) != data:
            raise TargetError(f"{self.name(folder, file)}: what was read back differs from what was written")

    def send(self, folder: str, path: Path) -> None:
        """Write a local file under its own name; the caller compares it."""
        with self._asking("writing", folder, path.name):
            self._refuse_stop()
            self._system.put_file(str(path), self._path(folder, path.name), callback=_Parts(self._refuse_stop))
            self._force(folder, path.name)

    def duplicate(self, folder: str, file: str, target: str) -> None:
        """Copy a file into another folder under its name, at the target itself; the caller compares it."""
        with self._asking("copying", folder, file):
            self._system.cp_file(self._path(folder, file), self._path(target, file))
            self._force(target, file)

    def receive(self, folder: str, file: str, record: FileRecord, target: Path) -> None:
        """Copy a file of the recorded size to this machine; the caller compares it."""
        size = self._size(folder, file)
        if size != record.bytes:
            raise CopyDamagedError(f"{self.name(folder, file)} has {size} bytes; {record.bytes} were committed")
        with self._asking("reading", folder, file):
            self._system.get_file(self._path(folder, file), str(target))

    def make(self, folder: str) -> None:
        """Create a folder, where there are folders. The target's parent must exist: a mount may be missing."""
        with self._asking("creating", folder):
            if self._is_local:
                if not Path(self._root).parent.is_dir():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(Path(self._root).parent))
                make_directory(Path(self._path(folder)))
                return
            # Never with parents: on an object store that would create a bucket whose name was mistyped.
            bucket = "/" not in self._root.strip("/")
            for path in [*([] if bucket else [self._root]), self._path(""), self._path(folder)]:
                with contextlib.suppress(FileExistsError):
                    self._system.mkdir(path, create_parents=False)

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder and what is in it, the file called `first` before everything else."""
        with self._asking("removing", folder), contextlib.suppress(FileNotFoundError):
            if first in self.files(folder):
                self._system.rm_file(self._path(folder, first))
                if self._is_local:
                    sync_directory(Path(self._path(folder)))
            self._system.rm(self._path(folder), recursive=True)

    def _size(self, folder: str, file: str) -> int:
        with self._asking("reading", folder, file):
            found = self._system.info(self._path(folder, file))
            if found["type"] != "file" or found.get("islink"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
            return int(found["size"])

    def _refuse_stop(self) -> None:
        if self.stopped():
            raise CopyStoppedError("copying was stopped, because the run ends")

    def _force(self, folder: str, file: str) -> None:
        """Force a file on this machine to the disk, and out of the page cache: it is read back from the disk."""
        if self._is_local:
            path = Path(self._path(folder, file))
            sync_file(path)
            sync_directory(path.parent)

    def _path(self, folder: str, file: str = "") -> str:
        path = "/".join(part for part in (self._root, _FOLDER, folder, file) if part)
        if self._is_local and folder and Path(self._root, _FOLDER, folder).is_symlink():
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


class _Parts(Callback):  # type: ignore[misc]  # fsspec has no types
    """Calls a function after each part of a file that is sent."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self._check()
