"""Host buffers in shared memory: their content survives the process that filled them, not the machine.

Each buffer lies in a file of `/dev/shm` that its user alone may read, as `cpsr.checkpoint.memory_states` describes it:
`cpsr-<run_id>-rank-00000-0`. Beside the numbered buffers, a rank may have small states (`small-0`: its scalars and
buffers, without weights and moments), replicas on other machines (`replica-<holder>-0`), and states that a restart
fetched (`fetched-...`).

A file is sealed by the length of its header, which is stored last. So nobody uses a state that is half written, or
whose writer died. Each expert is a part with hashes of its own, so that one that did not change is neither copied nor
hashed nor sent again.
"""

import errno
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory_states import (
    HASH_PLACE,
    NAME,
    PENDING_HASH,
    SHARED_MEMORY,
    Kind,
    SlabSize,
    describe,
    described,
    hash_of,
    iteration_in,
    open_own,
    size_of,
    write_at,
)
from cpsr.checkpoint.parts import Held, Parts
from cpsr.checkpoint.tensor_file import LENGTH_BYTES, PlacedTensor, header_of, image_of, members_of
from cpsr.state.codec import encode
from cpsr.state.shard import Shard

__all__ = ["MemoryFile", "SharedMemory", "shared_memory_left"]

logger = logging.getLogger(__name__)

RESERVE_BYTES, RESERVE_SHARE = 1 << 24, 0.1
# A killed process of many gigabytes takes some seconds to end; workers of torch's data loaders, if one has a lock
# after all, end within 5 s of their parent.
LOCK_SECONDS = 10.0


class MemoryFile:
    """One buffer in shared memory; whoever fills it unseals it first and seals it at the end.

    Args:
        path: its file; a state of the same size stays in it.
        size: of the buffer, and of what is reserved for the header before it.
        wait_seconds: how long a process that still has it is waited for.

    Attributes:
        path: its file.
        size: as given.
        bytes: the buffer.

    Raises:
        FileInUseError: another process had it to the end of that time.
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, path: Path, size: SlabSize, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path, self.size = path, size
        # Until this process ends: a stopped process that continues would write into the next one's buffer.
        self._lock = FileLock(path, wait_seconds, create=True)
        self._descriptor = -1
        holds_none = size_of(path) == 0 and path.lstat().st_uid == os.geteuid()  # a new one
        try:
            self._descriptor = open_own(path)
            found = described(path, self._descriptor)
            holds_none = found is None or found.size != size
            if holds_none:
                os.pwrite(self._descriptor, bytes(LENGTH_BYTES), 0)
                os.ftruncate(self._descriptor, size.bytes)
            # Allocates the memory now: writing to a page that cannot be allocated ends the process (SIGBUS).
            os.posix_fallocate(self._descriptor, 0, size.bytes)
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults are left for the training thread
            self._map = mmap.mmap(self._descriptor, size.bytes, flags=shared)
        except OSError as error:
            self.close(remove=holds_none)  # else a later start may have the descriptors and the memory for it
            if error.errno == errno.ENOSPC:
                raise _no_room(size.bytes, shared_memory_left(path.parent), path.parent) from error
            raise
        self._whole = Parts([("other/all", 0, size.buffer_bytes)], size.buffer_bytes)
        self._described_of: tuple[object, ...] | None = None
        self._constant: tuple[bytes, dict[str, str]] = b"", {}
        # Of the whole mapping: a buffer of no bytes is none to torch.
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = whole[size.header_bytes :]
        self._length = whole[:LENGTH_BYTES].view(torch.int64).numpy()

    @property
    def iteration(self) -> int:
        """Iteration of its state, -1 where it holds none."""
        if self._descriptor < 0:
            return iteration_in(self.path)
        found = described(self.path, self._descriptor)  # also where no more files can be opened
        return -1 if found is None else found.state.iteration

    def unseal(self) -> None:
        """Invalidate the state in the buffer, until `seal`."""
        self._length[0] = 0

    def seal(self, *given: Any, **named: Any) -> None:
        """Declare the written state complete; see `prepare`."""
        self.prepare(*given, **named)()

    def prepare(
        self,
        rank: int,
        life: int,
        kind: Kind,
        shard: Shard,
        iteration: int,
        scalars: Any,
        owned: str = "",
        branch: int = 0,
        held: Held | None = None,
        encoded: tuple[Any, dict[str, torch.Tensor]] | None = None,
    ) -> Callable[[], None]:
        """Write all that describes the state in the buffer.

        Args:
            rank: the owner of the state.
            life: life of the run.
            kind: see `MemoryState`.
            shard: views into this buffer.
            iteration: iteration of the state.
            scalars: plain data (see `cpsr.state.codec.encode`).
            owned: see `MemoryState`.
            branch: see `MemoryState`.
            held: iterations and hashes of the buffer's parts; None: all of it is of that iteration, and hashed now.
            encoded: the scalars, where they are encoded already.

        Returns:
            Declares it complete, by one store.

        Raises:
            SaveError: the header does not fit; the buffer stays unsealed.
            OSError: shared memory is full; likewise.
        """
        self.unseal()
        tree, tensors = encode(scalars) if encoded is None else encoded
        if held is None:
            held = Held(self._whole, self.bytes)
            held.fill(held.parts.names, iteration)
        held.hash_rest()
        members, index = self._described(shard, held.parts)
        matched = NAME.fullmatch(self.path.name)
        stamp = {"run": "" if matched is None else matched["run_id"], "rank": rank, "life": life, "branch": branch}
        stamp |= {"kind": kind, "iteration": iteration, "owned": owned}
        hashes = [held.digests[segment].hex() for segment in held.parts.segments]
        index = index | {name: str(value) for name, value in stamp.items()}
        index |= {"taken_at": json.dumps(held.taken_at), "hashes": json.dumps(hashes)}
        return self._put(index, members, [run.data for run in image_of(tensors)], json.dumps(tree).encode())

    def restamp(self, life: int, branch: int) -> None:
        """Make the sealed state one of another life. A kill meanwhile leaves it unsealed.

        Raises:
            OSError: there is none, or its header is damaged.
        """
        found = describe(self.path)
        if found is None:
            raise OSError(f"{self.path} holds no complete state")
        index, header = found.index, found.header
        with self.path.open("rb") as file:
            file.seek(self.size.bytes)
            behind = file.read()
        if hash_of(header.content, behind) != index.get("hash"):
            raise OSError(f"{self.path} is damaged: its hash does not hold")
        members = [members_of(header.tensors(), header.end)]
        self._seal({**index, "life": str(life), "branch": str(branch)}, members, behind)()

    def _put(
        self, index: Mapping[str, str], members: bytes, image: list[memoryview], tree: bytes
    ) -> Callable[[], None]:
        """Write the small state and the header; returns what declares the state complete."""
        placed = [_raw("small/tensors", self.size.buffer_bytes, sum(run.nbytes for run in image))]
        placed += [_raw("small", placed[0].end, len(tree))]
        end = self.size.header_bytes + placed[-1].end
        # It does not shrink: another process may have it mapped.
        rest = max(0, os.fstat(self._descriptor).st_size - end)
        behind = b"".join([*image, tree, bytes(rest)])
        os.posix_fallocate(self._descriptor, self.size.bytes, len(behind))
        write_at(self._descriptor, behind, self.size.bytes)
        placed += [_padding(placed[-1].end, rest)] if rest else []
        index = {**index, "buffer_bytes": str(self.size.buffer_bytes), "file_bytes": str(self.size.bytes + len(behind))}
        return self._seal(index, [members, members_of(placed)], behind)

    def _seal(self, index: Mapping[str, str], members: Iterable[bytes], behind: bytes) -> Callable[[], None]:
        """Write the header; returns what declares the state complete."""
        self.unseal()
        index = {**index, "hash": PENDING_HASH, "sealed_at": str(time.time_ns())}
        first = {name: index[name] for name in ("hash", "sealed_at")}  # in the first page
        _, *pieces = header_of(first | index, members, self.size.header_bytes)
        self._map.seek(LENGTH_BYTES)
        for piece in pieces:
            self._map.write(piece)
        with memoryview(self._map)[: self.size.header_bytes] as header:
            self._map[HASH_PLACE] = hash_of(header, behind).encode()

        def publish() -> None:
            self._length[0] = self.size.header_bytes - LENGTH_BYTES

        return publish

    def _described(self, shard: Shard, parts: Parts) -> tuple[bytes, dict[str, str]]:
        """Of the header, what is the same for all snapshots: the buffer's tensors, operators and segments.

        Names alone do not tell: windows of another order have the same ones elsewhere, and parts of their own.
        """
        described_of = (parts, *shard.operators, *shard.others)
        if self._described_of != described_of:
            operators = {
                name: [one.parameter.global_shape, one.parameter.offset, one.parameter.block, parts.of(name)]
                for name, one in shard.operators.items()
            }
            segments = [[segment.begin, segment.end] for segment in parts.segments]
            index = {"operators": json.dumps(operators), "segments": json.dumps(segments)}
            self._described_of, self._constant = described_of, (members_of(self._layout(shard)), index)
        return self._constant

    def _layout(self, shard: Shard) -> Iterable[PlacedTensor]:
        """The tensors of the buffer in its order, with padding in the gaps."""
        start, end = self.bytes.data_ptr(), 0
        placed = [
            PlacedTensor(key, tuple(values.shape), values.dtype, values.data_ptr() - start if values.numel() else 0)
            for key, values in shard.tensors()
        ]
        for one in sorted(placed, key=lambda one: (one.first, one.end)):
            if one.first > end:
                yield _padding(end, one.first - end)
            yield one
            end = one.end
        if end < self.size.buffer_bytes:
            yield _padding(end, self.size.buffer_bytes - end)

    def close(self, *, remove: bool) -> None:
        """Close the file; its memory stays mapped while tensors use it.

        Args:
            remove: also remove the file, if it was not closed before; else its state stays for the next process.
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if remove:
            self._lock.remove()
        else:
            self._lock.release()


class SharedMemory:
    """The files of one rank's buffers.

    Args:
        run_id: identity of the run.
        rank: owner of the buffers.
        life: of the run, stamped on what is sealed.
        directory: where shared memory is mounted.
        wait_seconds: how long a process that still has a buffer is waited for.

    Attributes:
        arena: the run's slabs here.
        rank: owner of the buffers.
        life: stamped on what is sealed.
        branch: how often this life has gone back to an earlier state, stamped likewise.
    """

    def __init__(
        self,
        run_id: str,
        rank: int,
        life: int,
        directory: Path = SHARED_MEMORY,
        wait_seconds: float = LOCK_SECONDS,
    ) -> None:
        self.rank = rank
        self.life = life
        self.branch = 0
        self.arena = Arena(run_id, directory)
        self._wait_seconds = wait_seconds

    def files(self, count: int, size: SlabSize) -> list[MemoryFile]:
        """So many buffers, with the states of an earlier process where their size fits.

        Raises:
            FileInUseError: another process has one, and did not release it in time; none was made.
            OSError: shared memory is not there or too small; none was made.
        """
        made: list[MemoryFile] = []
        self._require_room(map(str, range(count)), size.bytes)
        until = time.monotonic() + self._wait_seconds
        try:
            for slot in range(count):
                left_seconds = max(0.0, until - time.monotonic())
                made.append(MemoryFile(self.path(str(slot)), size, left_seconds))
        except OSError as error:
            for file in made:
                file.close(remove=file.iteration < 0)  # a restart can still use the state of an earlier process
            if isinstance(error, FileInUseError):
                raise FileInUseError(
                    f"{error}, and has not let it go within {self._wait_seconds:g} s: end it, where it is left of an "
                    "earlier life; two jobs cannot share a run directory",
                ) from error
            raise
        return made

    def file(self, slot: str, size: SlabSize) -> MemoryFile:
        """One more buffer, under a name of its own; with the state of an earlier process where its size fits.

        Raises:
            OSError: as `files`.
        """
        self._require_room([slot], size.bytes)
        return MemoryFile(self.path(slot), size, self._wait_seconds)

    def _require_room(self, slots: Iterable[str], file_bytes: int) -> None:
        """Others need shared memory too: loaders' workers, NCCL."""
        missing = sum(max(file_bytes - size_of(self.path(slot)), 0) for slot in slots)
        left = shared_memory_left(self.arena.directory)
        if missing > left:
            raise _no_room(missing, left, self.arena.directory)

    def path(self, slot: str) -> Path:
        """Where a buffer lies."""
        return self.arena.path(self.rank, slot)


def shared_memory_left(directory: Path = SHARED_MEMORY) -> int:
    """Bytes that may still be allocated there, after the reserve for others; OSError where it is not mounted."""
    memory = os.statvfs(directory)
    free, size = memory.f_bavail * memory.f_frsize, memory.f_blocks * memory.f_frsize
    return max(0, free - max(RESERVE_BYTES, int(RESERVE_SHARE * size)))


def _no_room(missing: int, left: int, directory: Path) -> OSError:
    return OSError(
        f"{missing} bytes are missing in {directory}, {left} can be taken beside what is left to others: enlarge it "
        "(docker: --shm-size), or set checkpoint.shared_memory to false"
    )


def _padding(first: int, size: int) -> PlacedTensor:
    return _raw(f"padding/{first}", first, size)


def _raw(name: str, first: int, size: int) -> PlacedTensor:
    """Bytes of no other type."""
    return PlacedTensor(name, (size,), torch.uint8, first)
