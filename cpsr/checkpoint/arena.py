"""The slabs of a run in this machine's shared memory, as a place: listed, received whole, opened, sent and dropped."""

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.memory_states import (
    BLOCK_BYTES,
    NAME,
    PAGE_BYTES,
    SHARED_MEMORY,
    MemoryState,
    OpenState,
    describe,
    open_own,
    write_at,
)
from cpsr.checkpoint.place import Image, Index
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.checkpoint.tensor_file import LENGTH_BYTES
from cpsr.errors import CheckpointError

__all__ = ["PIECE_BYTES", "Arena", "Sealed", "bytes_of", "free_bytes", "shared_memory_left"]

RESERVE_BYTES, RESERVE_SHARE = 1 << 24, 0.1
# Of a slab at a time. Large enough that what is done for each in Python is lost beside the network, and small beside
# any state.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Sealed:
    """A slab of shared memory as it was at one moment: an `Image` of that, or none.

    Attributes:
        path: its file.
        iteration: of the state.
        size: bytes of the file.
        page: its first page at that time, which changes with every seal: while it is the same, so is the slab.
    """

    path: Path
    iteration: int
    size: int
    page: bytes

    @classmethod
    def at(cls, path: Path, iteration: int) -> "Sealed":
        """The slab that a file holds now; OSError where it cannot be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            page = os.pread(descriptor, PAGE_BYTES, 0)
            return cls(path, iteration, os.fstat(descriptor).st_size, page)
        finally:
            os.close(descriptor)

    def described(self) -> MemoryState:
        """Its state; CheckpointError where the file holds another slab by now, OSError where it cannot be read."""
        found = describe(self.path)
        if found is None or Sealed.at(self.path, self.iteration) != self:
            raise CheckpointError(f"{self.path.name} was overwritten before it was sent whole")
        return found

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """See `Image.pieces`, without the parts that other ranks hold; OSError where the file cannot be read."""
        state = self.described()
        yield from self.between([(PAGE_BYTES, state.size.header_bytes), *state.spans()])
        yield 0, memoryview(self.page)

    def between(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
        """Pieces of these spans of the file, each from its first byte to the one after its last.

        Raises:
            CheckpointError: the file holds another slab by now.
            OSError: it cannot be read.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            room = memoryview(bytearray(PIECE_BYTES))
            for offset, end in spans:
                while offset < end:
                    length = os.preadv(descriptor, [room[: end - offset]], offset)
                    # Looked at after the bytes, so that they are of this state.
                    if not length or os.pread(descriptor, PAGE_BYTES, 0) != self.page:
                        raise CheckpointError(f"{self.path.name} was overwritten before it was sent whole")
                    yield offset, room[:length]
                    offset += length
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Arena:
    """A `Place` whose slabs are files of `/dev/shm`, which their ranks fill and seal (`cpsr.checkpoint.memory`).

    Attributes:
        run_id: identity of the run.
        directory: where shared memory is mounted.
    """

    run_id: str
    directory: Path = SHARED_MEMORY

    def path(self, rank: int, slot: str) -> Path:
        """Where a slab of this rank lies."""
        return self.directory / f"cpsr-{self.run_id}-rank-{rank:05d}-{slot}"

    def slots(self) -> Iterator[tuple[Path, int, str]]:
        """Files of the run, whatever is in them: the path, the rank whose state it may hold, and its slot."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            matched = NAME.fullmatch(path.name)
            if matched is not None and matched["run_id"] == self.run_id:
                yield path, int(matched["rank"]), matched["slot"]

    def files(self) -> Iterator[Path]:
        """`slots` by their paths alone."""
        return (path for path, _, _ in self.slots())

    def taken_by(self, slots: str, ranks: Collection[int] | None = None) -> int:
        """Bytes of memory that `BUFFERS`, `WINDOWS` or `REPLICAS` take, of these ranks or of all."""
        found = ((path, rank) for path, rank, slot in self.slots() if re.fullmatch(slots, slot))
        return bytes_of(path for path, rank in found if ranks is None or rank in ranks)

    def room_for(self, slots: str, ranks: Collection[int] | None = None) -> int:
        """Bytes that such ones can take together: what is free, and what they have already; 0 without shared memory."""
        try:
            return free_bytes(self.directory) + self.taken_by(slots, ranks)
        except OSError:
            return 0

    def list(self, rank: int | None = None) -> Sequence[MemoryState]:
        """See `Place.list`; by rank and iteration, of one rank or of all."""
        paths = [path for path, owner, _ in self.slots() if rank is None or owner == rank]
        found = [state for state in map(describe, paths) if state is not None]
        return sorted(found, key=lambda state: (state.rank, state.iteration))

    def find(self, name: str, iteration: int) -> MemoryState:
        """The state of that iteration under this name, not verified; CheckpointError where it is not there any more."""
        found = describe(self._path(name))
        if found is None or found.iteration != iteration:
            raise CheckpointError(f"{name} does not hold iteration {iteration} any more")
        return found

    def open(self, index: Index) -> OpenState:
        """See `Place.open`."""
        return OpenState(self.find(index.name, index.iteration))

    def image(self, name: str, iteration: int) -> Sealed:
        """The state of that iteration to be sent; raises as `find`, and OSError where it cannot be read."""
        return Sealed.at(self.find(name, iteration).path, iteration)

    def put(self, name: str, image: Image) -> OpenState:
        """See `Place.put`; returns the slab, verified."""
        path = self._path(name)
        descriptor = open_own(path)
        try:
            _receive(descriptor, path, image)
            found = describe(path)
            if found is None:
                raise CheckpointError(f"what was to be {name} is no slab of that rank and run")
            return OpenState(found)
        except BaseException:
            self.drop(name)
            raise
        finally:
            os.close(descriptor)

    def drop(self, name: str) -> None:
        """See `Place.drop`."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        """Where it lies; a name that comes from another machine leads nowhere else."""
        matched = NAME.fullmatch(name)
        if matched is None or matched["run_id"] != self.run_id:
            raise CheckpointError(f"{name!r} is no slab of the run {self.run_id}")
        return self.directory / name


def _receive(descriptor: int, path: Path, image: Image) -> None:
    """Write an image; what was there counts no more, and the image counts once all of it is there."""
    os.pwrite(descriptor, bytes(PAGE_BYTES), 0)
    os.ftruncate(descriptor, image.size)
    # Shared memory is memory: to take what the control group does not have would end a process, perhaps training.
    missing = image.size - os.fstat(descriptor).st_blocks * BLOCK_BYTES
    if missing > (available := available_host_bytes()):
        raise OSError(errno.ENOMEM, f"{missing} bytes of memory are missing, {available} are available", str(path))
    os.posix_fallocate(descriptor, 0, image.size)  # or a write would fail halfway
    length = b""
    for offset, piece in image.pieces():
        if offset + len(piece) > image.size:
            raise CheckpointError(f"what was to be {path.name} is longer than its {image.size} bytes")
        if offset == 0:  # with its length a slab is sealed: that comes last, as at its owner
            length, piece, offset = bytes(piece[:LENGTH_BYTES]), piece[LENGTH_BYTES:], LENGTH_BYTES
        write_at(descriptor, piece, offset)
    write_at(descriptor, length, 0)


def shared_memory_left(directory: Path = SHARED_MEMORY) -> int:
    """Bytes that may still be allocated there, after the reserve for others; OSError where it is not mounted."""
    memory = os.statvfs(directory)
    free, size = memory.f_bavail * memory.f_frsize, memory.f_blocks * memory.f_frsize
    return max(0, free - max(RESERVE_BYTES, int(RESERVE_SHARE * size)))


def free_bytes(directory: Path = SHARED_MEMORY) -> int:
    """Bytes that files there may still take, of the machine's memory or the container's; raises likewise."""
    return min(available_host_bytes(), shared_memory_left(directory))


def bytes_of(paths: Iterable[Path]) -> int:
    """Memory that files take; one that is removed meanwhile takes none."""
    found = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found += path.lstat().st_blocks * BLOCK_BYTES
    return found
