"""Host buffers in shared memory: their content survives the process that filled them, not the machine.

Each buffer lies in a file of `/dev/shm` that its user alone may read, as `cpsr.checkpoint.memory_states` describes it:
`cpsr-<run_id>-rank-00000-0`. Beside the numbered buffers, a rank may have small states (`small-0`: its scalars and
buffers, without weights and moments), replicas on other machines (`replica-<holder>-0`), and states that a restart
fetched (`fetched-...`).

A file is sealed by the length of its header, which is stored last. So nobody uses a state that is half written, or
whose writer died. Where experts take turns, each is a part with hashes of its own: one whose turn it is not comes from
the snapshot before, and is not hashed again.
"""

import ctypes
import errno
import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.arena import Arena, shared_memory_left
from cpsr.checkpoint.device import Pinning
from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory_states import (
    ELSEWHERE,
    HASH_PLACE,
    PENDING_HASH,
    SHARED_MEMORY,
    Kind,
    Left,
    MemoryState,
    SlabSize,
    describe,
    hash_of,
    open_own,
    size_of,
    write_at,
)
from cpsr.checkpoint.parts import Held, Parts, operator_of
from cpsr.checkpoint.tensor_file import (
    LENGTH_BYTES,
    PlacedTensor,
    bytes_of,
    header_of,
    image_of,
    in_file_order,
    members_of,
)
from cpsr.state.codec import SCALARS, encode
from cpsr.state.shard import Shard

__all__ = ["MemoryFile", "SharedMemory"]

# A killed process of many gigabytes takes some seconds to end; workers of torch's data loaders, if one has a lock
# after all, end within 5 s of their parent.
LOCK_SECONDS = 10.0

COPIED_BYTES = 1 << 14  # of a tensor of the small state; a view of a larger one takes less time than its copy


class MemoryFile:
    """One buffer in shared memory; whoever fills it unseals it first and seals it at the end.

    Args:
        memory: of its rank; what is sealed is stamped with the life and branch of that time.
        slot: its name there; a state of the same size stays in it.
        size: of the buffer, and of what is reserved for the header before it.
        wait_seconds: how long a process that still has it is waited for.

    Attributes:
        path: its file.
        size: as given.
        bytes: the buffer.
        iteration: of its state, -1 where it holds none.
        left: the state that an earlier process has left there, if there was one.

    Raises:
        FileInUseError: another process had it to the end of that time.
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, memory: "SharedMemory", slot: str, size: SlabSize, wait_seconds: float) -> None:
        self._memory, self.path, self.size, self.iteration = memory, memory.path(slot), size, -1
        self.left: Left | None = None
        # Until this process ends: a stopped process that continues would write into the next one's buffer.
        self._lock = FileLock(self.path, wait_seconds, create=True)
        self._descriptor = -1
        self._pinning: Pinning | None = None
        is_new = size_of(self.path) == 0 and self.path.lstat().st_uid == os.geteuid()
        try:
            self._descriptor = open_own(self.path)
            found = describe(self.path, self._descriptor)
            if found is not None and found.size == size:
                self.iteration, self.left = found.iteration, Left(found.life, found.branch, found.iteration)
            else:
                is_new = True
                os.pwrite(self._descriptor, bytes(LENGTH_BYTES), 0)
                os.ftruncate(self._descriptor, size.bytes)
            # Allocates the memory now: writing to a page that cannot be allocated ends the process (SIGBUS).
            os.posix_fallocate(self._descriptor, 0, size.bytes)
            self._file_bytes = os.fstat(self._descriptor).st_size
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults are left for the training thread
            self._map = mmap.mmap(self._descriptor, size.bytes, flags=shared)
        except OSError as error:
            self.close(remove=is_new)  # else a later start may have the descriptors and the memory for it
            if error.errno == errno.ENOSPC:
                raise memory.no_room(size.bytes) from error
            raise
        self._whole = Parts([("other/all", 0, size.buffer_bytes)], size.buffer_bytes)
        self._described_of: tuple[object, ...] | None = None
        self._constant: tuple[bytes, dict[str, str]] = b"", {}
        self._image_form: object = None
        self._image_header = b""
        # Of the whole mapping: a buffer of no bytes is none to torch.
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = whole[size.header_bytes :]
        self._length = whole[:LENGTH_BYTES].view(torch.int64).numpy()

    def pin(self, device: torch.device | None) -> None:
        """Let this device copy into the buffer without a staging buffer; None, or a second call, changes nothing.

        Raises:
            SaveError: CUDA refuses.
        """
        if device is not None and self._pinning is None:
            self._pinning = Pinning(self.bytes, device)

    def unseal(self) -> None:
        """Invalidate the state in the buffer, until `seal`."""
        self._length[0], self.iteration, self.left = 0, -1, None

    def seal(self, kind: Kind, shard: Shard, iteration: int, scalars: Any, owned: str = "") -> None:
        """Declare the written state complete, with these scalars as plain data; see `prepare`."""
        self.prepare(kind, shard, iteration, encode(scalars, prefix=SCALARS), owned)()

    def prepare(
        self,
        kind: Kind,
        shard: Shard,
        iteration: int,
        encoded: tuple[Any, dict[str, torch.Tensor]],
        owned: str = "",
        held: Held | None = None,
        samples: Mapping[str, str] | None = None,
    ) -> Callable[[], None]:
        """Write all that describes the state in the buffer.

        Args:
            kind: see `MemoryState`.
            shard: views into this buffer.
            iteration: iteration of the state.
            encoded: the small state as `cpsr.state.codec.encode` gives it.
            owned: see `MemoryState`.
            held: iterations and hashes of the buffer's parts; None: all of it is of that iteration, and hashed now.
            samples: hash of a few elements of each part that ranks share, see `HeldPart`.

        Returns:
            Declares it complete, by one store.

        Raises:
            SaveError: the header does not fit; the buffer stays unsealed.
            OSError: shared memory is full; likewise.
        """
        self.unseal()
        tree, tensors = encoded
        if held is None:
            held = Held(self._whole, self.bytes)
            held.fill(held.parts.names, iteration)
        held.hash_rest()
        members, index = self._described(shard, held.parts, held.parts.names - held.taken_at.keys())
        hashes = [
            held.digests[segment].hex() if segment.part in held.taken_at else "" for segment in held.parts.segments
        ]
        stamp = {**self._memory.stamp, "kind": kind, "iteration": str(iteration), "owned": owned}
        index = index | stamp | {"taken_at": json.dumps(held.taken_at), "hashes": json.dumps(hashes)}
        index["samples"] = json.dumps(samples or {})
        return self._put(index, members, self._image(tensors), json.dumps(tree).encode())

    def _image(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """The small state's tensors as a file; its header is made anew where their names or forms change."""
        ordered = in_file_order(tensors)
        form = [(name, one.dtype, one.shape) for name, one in ordered.items()]
        if form != self._image_form:
            self._image_form, self._image_header = form, image_of(ordered)[0].tobytes()
        return b"".join([self._image_header, *map(_content_of, ordered.values())])

    def restamp(self) -> MemoryState:
        """Make the sealed state one of this life. A kill meanwhile leaves it unsealed.

        Raises:
            OSError: there is none, or its header is damaged.
        """
        found = describe(self.path)
        if found is None:
            raise OSError(f"{self.path} holds no complete state")
        with self.path.open("rb") as file:
            file.seek(self.size.bytes)
            behind = file.read()
        if hash_of(found.header.content, behind) != found.index.get("hash"):
            raise OSError(f"{self.path} is damaged: its hash does not hold")
        members = [members_of(found.header.tensors(), found.header.end)]
        self._seal({**found.index, **self._memory.stamp}, members, behind)()
        state = describe(self.path)
        assert state is not None
        return state

    def _put(self, index: Mapping[str, str], members: bytes, image: bytes, tree: bytes) -> Callable[[], None]:
        """Write the small state and the header; returns what declares the state complete."""
        placed = [_raw("small/tensors", self.size.buffer_bytes, len(image))]
        placed += [_raw("small", placed[0].end, len(tree))]
        end = self.size.header_bytes + placed[-1].end
        # It does not shrink: another process may have it mapped.
        rest = max(0, self._file_bytes - end)
        behind = b"".join([image, tree, bytes(rest)])
        if end > self._file_bytes:
            os.posix_fallocate(self._descriptor, self.size.bytes, len(behind))
            self._file_bytes = end
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
            self.iteration, self.left = int(index["iteration"]), None
            self._length[0] = self.size.header_bytes - LENGTH_BYTES

        return publish

    def _described(self, shard: Shard, parts: Parts, lacking: frozenset[str]) -> tuple[bytes, dict[str, str]]:
        """Of the header, what is the same for most snapshots: the buffer's tensors, operators and segments.

        Names alone do not tell: windows of another order have the same ones elsewhere, and parts of their own.
        """
        described_of = (parts, lacking, *shard.operators, *shard.others)
        if self._described_of != described_of:
            operators = {
                name: [one.parameter.global_shape, one.parameter.offset, one.parameter.block, parts.of(name)]
                for name, one in shard.operators.items()
            }
            segments = [[segment.begin, segment.end] for segment in parts.segments]
            index = {"operators": json.dumps(operators), "segments": json.dumps(segments)}
            layout = (
                _elsewhere(one) if parts.of(operator_of(one.name)) in lacking else one for one in self._layout(shard)
            )
            self._described_of, self._constant = described_of, (members_of(layout), index)
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

    def close(self, *, remove: bool, unpin: bool = True) -> None:
        """Close the file; its memory stays mapped while tensors use it.

        Args:
            remove: also remove the file, if it was not closed before; else its state stays for the next process.
            unpin: also unpin it, for which the device has to be idle; else its owner keeps it to the process's end.
        """
        if self._pinning is not None and unpin:
            self._pinning.undo()
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
        self.arena = Arena(run_id, directory)
        self.life, self.branch = life, 0
        self._rank, self._wait_seconds = rank, wait_seconds

    @property
    def stamp(self) -> dict[str, str]:
        """Of what is sealed now: see `MemoryState`."""
        stamp = {"run": self.arena.run_id, "rank": self._rank, "life": self.life, "branch": self.branch}
        return {name: str(value) for name, value in stamp.items()}

    def path(self, slot: str) -> Path:
        """Where a buffer lies."""
        return self.arena.path(self._rank, slot)

    def file(self, slot: str, size: SlabSize) -> MemoryFile:
        """`files` of this one name."""
        return self.files([slot], size)[0]

    def files(self, slots: Sequence[str], size: SlabSize) -> list[MemoryFile]:
        """Buffers of these names, with the states of an earlier process where their size fits.

        Raises:
            FileInUseError: another process has one, and did not release it in time; none was made.
            OSError: shared memory is not there or too small; none was made.
        """
        missing = sum(max(size.bytes - size_of(self.path(slot)), 0) for slot in slots)
        if missing > shared_memory_left(self.arena.directory):  # others need some, too: loaders' workers, NCCL
            raise self.no_room(missing)
        made: list[MemoryFile] = []
        until = time.monotonic() + self._wait_seconds
        try:
            for slot in slots:
                made.append(MemoryFile(self, slot, size, max(0.0, until - time.monotonic())))
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

    def no_room(self, missing: int) -> OSError:
        """The error where so many bytes cannot be had."""
        directory = self.arena.directory
        return OSError(
            f"{missing} bytes are missing in {directory}, {shared_memory_left(directory)} can be taken beside what is "
            "left to others: enlarge it (docker: --shm-size), or set checkpoint.shared_memory to false"
        )


def _content_of(tensor: torch.Tensor) -> bytes | memoryview:
    """The memory of a contiguous tensor on the host."""
    if tensor.nbytes > COPIED_BYTES:
        return bytes_of(tensor).data
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _elsewhere(one: PlacedTensor) -> PlacedTensor:
    """The place of a tensor that other ranks hold."""
    return replace(one, name=f"{ELSEWHERE}{one.name}")


def _padding(first: int, size: int) -> PlacedTensor:
    return _raw(f"padding/{first}", first, size)


def _raw(name: str, first: int, size: int) -> PlacedTensor:
    """Bytes of no other type."""
    return PlacedTensor(name, (size,), torch.uint8, first)
