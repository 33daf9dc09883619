"""Host buffers in shared memory: their content survives the process that filled them, not the machine.

A file of `/dev/shm` for each buffer, readable by its user alone::

    cpsr-<run_id>-rank-00000-0
        one page: magic, sequence, sizes and xxh3-128 of what follows
        the tensors, in the layout of the buffer
        what they are: owner, iteration, life, layout, hash and iteration of each part, and the scalars

Beside the numbered buffers, a rank may have small states (`small-0`: its scalars and buffers, without weights and
moments), replicas on other machines (`replica-<holder>-0`), and states that a restart fetched (`fetched-...`).

The sequence is odd while the buffer is being filled. A state is valid if the sequence is even and all hashes match. So
nobody uses a state that is half written, or whose writer died. Each expert is a part with hashes of its own, so that
one that did not change is neither copied nor hashed nor sent again.
"""

import errno
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.loading import dtype_name
from cpsr.checkpoint.memory_states import (
    HEADER,
    MAGIC,
    PAGE_BYTES,
    SHARED_MEMORY,
    Kind,
    describe,
    digest_of,
    read_at,
    size_of,
    write_at,
)
from cpsr.checkpoint.parts import Held, Parts
from cpsr.state.codec import encode
from cpsr.state.shard import Shard

__all__ = ["MemoryFile", "SharedMemory", "shared_memory_left"]

logger = logging.getLogger(__name__)

RESERVE_BYTES, RESERVE_SHARE = 1 << 24, 0.1
# A killed process of many gigabytes takes some seconds to end; workers of torch's data loaders, if one has a lock
# after all, end within 5 s of their parent.
LOCK_SECONDS = 10.0
_SEQUENCE_AT = 8


class MemoryFile:
    """One buffer in shared memory; whoever fills it unseals it first and seals it at the end.

    Args:
        path: its file; a file of the same size is reused with its state.
        tensor_bytes: size of the buffer.
        wait_seconds: how long a process that still has it is waited for.

    Raises:
        FileInUseError: another process had it to the end of that time.
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, path: Path, tensor_bytes: int, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        size = PAGE_BYTES + tensor_bytes
        # Until this process ends: a stopped process that continues would write into the next one's buffer.
        self._lock = FileLock(path, wait_seconds, create=True)
        self._descriptor = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            os.fchmod(self._descriptor, 0o600)
            if not _is_of_size(self._descriptor, tensor_bytes):
                os.ftruncate(self._descriptor, 0)
            # Allocates the memory now: writing to a page that cannot be allocated ends the process (SIGBUS).
            os.posix_fallocate(self._descriptor, 0, size)
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults are left for the training thread
            self._map = mmap.mmap(self._descriptor, size, flags=shared)
        except OSError as error:
            self.close(remove=True)  # a new file holds no state; a file of the right size has its memory already
            if error.errno == errno.ENOSPC:
                raise _no_room(size, shared_memory_left(path.parent), path.parent) from error
            raise
        self._tensor_bytes = tensor_bytes
        self._described_of: tuple[str, ...] | None = None
        self._described_text = ""
        # Of the whole mapping: a buffer of no bytes is none to torch.
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = whole[PAGE_BYTES:]
        self._sequence = whole[_SEQUENCE_AT : _SEQUENCE_AT + 8].view(torch.int64).numpy()

    @property
    def iteration(self) -> int:
        """Iteration of its state, -1 where it holds none."""
        found = describe(self.path)
        return -1 if found is None else found[0].iteration

    def unseal(self) -> None:
        """Invalidate the state in the buffer, until `seal`."""
        self._sequence[0] |= 1

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
            OSError: shared memory is full; the buffer stays unsealed.
        """
        self.unseal()
        tree, tensors = encode(scalars, "scalars") if encoded is None else encoded
        held = self._all_of(iteration) if held is None else held
        held.hash_rest()
        stamp: dict[str, Any] = {"rank": rank, "iteration": iteration, "life": life, "branch": branch, "kind": kind}
        stamp |= {"owned": owned, "taken_at": held.taken_at}
        stamp["hashes"] = [held.digests[place].hex() for place in sorted(held.digests)]
        texts = json.dumps(stamp)[1:-1], self._described(shard, held.parts), f'"scalars": {json.dumps(tree)}'
        description = f"{{{', '.join(texts)}}}".encode()
        return self._put(description, save(tensors))

    def restamp(self, life: int, branch: int) -> None:
        """Make the sealed state one of another life. A kill meanwhile leaves it unsealed.

        Raises:
            OSError: there is none.
        """
        found = describe(self.path)
        if found is None:
            raise OSError(f"{self.path} holds no complete state")
        _, stamp, _, (_, length, _) = found
        text = json.dumps({**stamp, "life": life, "branch": branch}).encode()
        end = PAGE_BYTES + self._tensor_bytes
        self._put(text, read_at(self._descriptor, found[3][2], end + length))()

    def _put(self, description: bytes, saved: bytes) -> Callable[[], None]:
        """Write description and scalars; returns what declares the state complete."""
        self.unseal()
        end = PAGE_BYTES + self._tensor_bytes
        os.posix_fallocate(self._descriptor, end, len(description) + len(saved))
        write_at(self._descriptor, description, end)
        write_at(self._descriptor, saved, end + len(description))
        sequence = (int(self._sequence[0]) | 1) + 1
        digest = digest_of(description, saved)
        header = HEADER.pack(MAGIC, sequence - 1, self._tensor_bytes, len(description), len(saved), digest)
        self._map[: len(header)] = header

        def publish() -> None:
            self._sequence[0] = sequence

        return publish

    def _all_of(self, iteration: int) -> Held:
        """The whole buffer as one part."""
        held = Held(Parts([("other/all", 0, self._tensor_bytes)], self._tensor_bytes), self.bytes)
        held.fill(held.parts.names, iteration)
        return held

    def _described(self, shard: Shard, parts: Parts) -> str:
        """Layout, operators and segments as JSON, which are the same for all snapshots."""
        tensors = (*shard.operators, *shard.others)
        if self._described_of != tensors:
            described = {
                "layout": _layout(shard, self.bytes.data_ptr()),
                "operators": {
                    name: [list(operator.parameter.global_shape), operator.parameter.offset, parts.of(name)]
                    for name, operator in shard.operators.items()
                },
                "segments": [[segment.begin, segment.end] for segment in parts.segments],
            }
            self._described_of, self._described_text = tensors, json.dumps(described)[1:-1]
        return self._described_text

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
        run_id: identity of the run.
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
        self.run_id = run_id
        self._directory = directory
        self._wait_seconds = wait_seconds

    def files(self, count: int, tensor_bytes: int) -> list[MemoryFile]:
        """So many buffers, reused from an earlier process where their size fits.

        Raises:
            FileInUseError: another process has one, and did not release it in time; none was made.
            OSError: shared memory is not there or too small; none was made.
        """
        made: list[MemoryFile] = []
        self._require_room(map(str, range(count)), PAGE_BYTES + tensor_bytes)
        until = time.monotonic() + self._wait_seconds
        try:
            for slot in range(count):
                left_seconds = max(0.0, until - time.monotonic())
                made.append(MemoryFile(self.path(str(slot)), tensor_bytes, left_seconds))
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

    def file(self, slot: str, tensor_bytes: int) -> MemoryFile:
        """One more buffer, under a name of its own; its file is reused where the size fits.

        Raises:
            OSError: as `files`.
        """
        self._require_room([slot], PAGE_BYTES + tensor_bytes)
        return MemoryFile(self.path(slot), tensor_bytes, self._wait_seconds)

    def _require_room(self, slots: Iterable[str], file_bytes: int) -> None:
        """Others need shared memory too: loaders' workers, NCCL."""
        missing = sum(max(file_bytes - size_of(self.path(slot)), 0) for slot in slots)
        left = shared_memory_left(self._directory)
        if missing > left:
            raise _no_room(missing, left, self._directory)

    def path(self, slot: str) -> Path:
        """Where a buffer lies."""
        return self._directory / f"cpsr-{self.run_id}-rank-{self.rank:05d}-{slot}"


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


def _is_of_size(descriptor: int, tensor_bytes: int) -> bool:
    header = os.pread(descriptor, HEADER.size, 0)
    return len(header) == HEADER.size and HEADER.unpack(header)[2] == tensor_bytes


def _layout(shard: Shard, start: int) -> dict[str, Any]:
    """Byte offset from `start`, dtype and shape of each tensor."""
    return {
        key: [values.data_ptr() - start, dtype_name(values.dtype), list(values.shape)]
        for key, values in shard.tensors()
    }
