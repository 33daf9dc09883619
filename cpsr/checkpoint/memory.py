"""Host buffers in shared memory: what they hold outlives the process that filled them, not the machine.

A file of `/dev/shm` for each buffer, readable by its user alone::

    cpsr-<run_id>-rank-00000-0
        one page: magic, sequence, sizes and xxh3-128 of what follows
        the tensors, in the layout of the buffer
        what they are: owner, iteration, life, layout, and the scalars

Beside the buffers, which are numbered, a rank may have small states (`small-0`: its scalars, and what is neither weight
nor moment), replicas on other machines (`replica-<holder>-0`), and what a restart has just brought (`fetched-...`).

The sequence is odd while the buffer is being filled. A state counts where it is even and the hash holds, so that one
that is half written, or was written by a process that died on the way, is never taken for whole.
"""

import errno
import json
import logging
import math
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.held import (
    HEADER,
    MAGIC,
    NAME,
    PAGE_BYTES,
    SHARED_MEMORY,
    HeldState,
    Kind,
    describe,
    files_of,
    held_state,
    held_states,
)
from cpsr.checkpoint.loading import dtype_name
from cpsr.checkpoint.owner import owner_path
from cpsr.codec import decode, encode
from cpsr.errors import CheckpointError
from cpsr.state import Shard

__all__ = [
    "BLOCK_BYTES",
    "PAGE_BYTES",
    "SHARED_MEMORY",
    "HeldState",
    "Kind",
    "MemoryFile",
    "SharedMemory",
    "held_bytes",
    "held_state",
    "held_states",
    "held_word",
    "load_held",
    "owned_word",
    "remove_held",
    "remove_unused",
    "shared_memory_left",
    "verify_held",
]

logger = logging.getLogger(__name__)

BLOCK_BYTES = 512  # of st_blocks, by POSIX
RESERVE_BYTES, RESERVE_SHARE = 1 << 24, 0.1
# A process of many gigabytes that was killed takes some seconds to be gone; workers of torch's data loaders, where one
# has a lock after all, end within 5 s of their parent.
LOCK_SECONDS = 10.0
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = 8


class MemoryFile:
    """One buffer in shared memory; whoever fills it unseals it first and seals it at the end.

    Args:
        path: its file; one of the same size is taken over with what it holds.
        tensor_bytes: size of the buffer.
        wait_seconds: how long a process that still has it is waited for.

    Raises:
        FileInUseError: another process had it to the end of that time.
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, path: Path, tensor_bytes: int, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        size = PAGE_BYTES + tensor_bytes
        # For as long as this process lives: a stopped one that goes on would write into the next one's buffer.
        self._lock = FileLock(path, wait_seconds, create=True)
        self._descriptor = self._lock.open_again()
        try:
            os.fchmod(self._descriptor, 0o600)
            if not _is_of_size(self._descriptor, tensor_bytes):
                os.ftruncate(self._descriptor, 0)
            # Takes the memory now: a page that is not there when it is written to would end the process (SIGBUS).
            os.posix_fallocate(self._descriptor, 0, size)
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults are left for the training thread
            self._map = mmap.mmap(self._descriptor, size, flags=shared)
        except OSError as error:
            self.close(remove=True)  # it holds nothing: one that is of the right size has its memory already
            if error.errno == errno.ENOSPC:
                raise _no_room(size, shared_memory_left(path.parent), path.parent) from error
            raise
        self._tensor_bytes = tensor_bytes
        # Of the whole mapping: a buffer of no bytes is none to torch.
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = whole[PAGE_BYTES:]
        self._sequence = whole[_SEQUENCE_AT : _SEQUENCE_AT + 8].view(torch.int64).numpy()

    @property
    def iteration(self) -> int:
        """Of the state that is held, -1 where there is none."""
        held = describe(self.path)
        return -1 if held is None else held[0].iteration

    def unseal(self) -> None:
        """What is held counts no longer, from now on until `seal`."""
        self._sequence[0] |= 1

    def seal(
        self,
        rank: int,
        life: int,
        kind: Kind,
        shard: Shard,
        iteration: int,
        scalars: Any,
        owned: str = "",
        branch: int = 0,
    ) -> None:
        """What was written is whole.

        Args:
            rank: the owner of the state.
            life: life of the run.
            kind: see `HeldState`.
            shard: views into this buffer.
            iteration: iteration of the state.
            scalars: plain data (see `cpsr.codec.encode`).
            owned: see `HeldState`.
            branch: see `HeldState`.

        Raises:
            OSError: shared memory is full; the buffer stays unsealed.
        """
        self.unseal()
        tree, tensors = encode(scalars, "scalars")
        start = self.bytes.data_ptr()
        description = json.dumps(
            {
                "rank": rank,
                "iteration": iteration,
                "life": life,
                "branch": branch,
                "kind": kind,
                "owned": owned,
                "layout": {
                    key: [values.data_ptr() - start, dtype_name(values.dtype), list(values.shape)]
                    for key, values in shard.tensors()
                },
                "operators": {
                    name: [list(operator.parameter.global_shape), operator.parameter.offset, operator.iteration]
                    for name, operator in shard.operators.items()
                },
                "scalars": tree,
            }
        ).encode("utf-8")
        saved = save(tensors)
        end = PAGE_BYTES + self._tensor_bytes
        os.posix_fallocate(self._descriptor, end, len(description) + len(saved))
        os.pwrite(self._descriptor, description + saved, end)
        sequence = (int(self._sequence[0]) | 1) + 1
        digest = _digest(self._map, self._tensor_bytes, description, saved)
        header = HEADER.pack(MAGIC, sequence - 1, self._tensor_bytes, len(description), len(saved), digest)
        self._map[: len(header)] = header
        self._sequence[0] = sequence

    def close(self, *, remove: bool) -> None:
        """Let the file go; its memory stays mapped while tensors of it are in use.

        Args:
            remove: also remove the file, where it was not closed before; else what is held stays for the next process.
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
        self._run_id = run_id
        self._directory = directory
        self._wait_seconds = wait_seconds

    def files(self, count: int, tensor_bytes: int) -> list[MemoryFile]:
        """So many buffers, taken over from an earlier process where they fit.

        Raises:
            FileInUseError: another process has one, and did not let it go in time; none was made.
            OSError: shared memory is not there or too small; none was made.
        """
        made: list[MemoryFile] = []
        self._require_room(count, PAGE_BYTES + tensor_bytes)
        until = time.monotonic() + self._wait_seconds
        try:
            for slot in range(count):
                left_seconds = max(0.0, until - time.monotonic())
                made.append(MemoryFile(self.path(str(slot)), tensor_bytes, left_seconds))
        except OSError as error:
            for file in made:
                file.close(remove=file.iteration < 0)  # what an earlier process held is still good to restart from
            if isinstance(error, FileInUseError):
                raise FileInUseError(
                    self._directory,
                    f"{error}, and has not let it go within {self._wait_seconds:g} s: end it, where it is left of an "
                    "earlier life; two jobs cannot share a run directory",
                ) from error
            raise
        return made

    def _require_room(self, count: int, file_bytes: int) -> None:
        """Others need shared memory too: loaders' workers, NCCL."""
        sizes = [_size_of(self.path(str(slot))) for slot in range(count)]
        missing = sum(max(file_bytes - size, 0) for size in sizes)
        left = shared_memory_left(self._directory)
        if missing > left:
            raise _no_room(missing, left, self._directory)

    def path(self, slot: str) -> Path:
        """Where a buffer lies."""
        return self._directory / f"cpsr-{self._run_id}-rank-{self.rank:05d}-{slot}"


def shared_memory_left(directory: Path = SHARED_MEMORY) -> int:
    """Bytes that may still be taken there, beside what is left to others; OSError where it is not mounted."""
    memory = os.statvfs(directory)
    free, size = memory.f_bavail * memory.f_frsize, memory.f_blocks * memory.f_frsize
    return max(0, free - max(RESERVE_BYTES, int(RESERVE_SHARE * size)))


def load_held(state: HeldState, into: Shard) -> Any:
    """Copy a state into the views of `into`, whose operators get the iterations at which they were taken.

    Returns:
        Its scalars.

    Raises:
        CheckpointError: it is not whole any more, or is of another model or split; `into` is as it was.
    """
    with _Reading(state) as reading:
        pairs = [(target, reading.tensor(key, target)) for key, target in into.tensors()]
        taken_at = reading.taken_at(into)
        scalars = reading.scalars()
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        into.operators.update({name: replace(into.operators[name], iteration=at) for name, at in taken_at.items()})
        return scalars


def verify_held(state: HeldState) -> str | None:
    """What is wrong with a state; None where every byte of it is as it was sealed."""
    try:
        with _Reading(state):
            return None
    except CheckpointError as error:
        return str(error)


def owned_word(shard: Shard) -> str:
    """One word for what a rank owns: names, slices, types and every byte of its weights and moments."""
    slices = {name: (one.parameter.global_shape, one.parameter.offset) for name, one in shard.operators.items()}
    tensors = {
        key: (dtype_name(values.dtype), tuple(values.shape), values.contiguous().reshape(-1).view(torch.uint8))
        for key, values in Shard(shard.operators).tensors()
    }
    return _owned_word(slices, tensors)


def held_word(state: HeldState) -> str:
    """The same for a state in shared memory; reads all of it.

    Raises:
        CheckpointError: it is not whole any more.
    """
    with _Reading(state) as reading:
        return reading.owned_word()


def held_bytes(run_id: str, ranks: Iterable[int], directory: Path = SHARED_MEMORY) -> int:
    """Memory of this machine that the buffers of these ranks take already, as an earlier life left them."""
    own, found = set(ranks), 0
    for path in files_of(run_id, directory):
        matched = NAME.fullmatch(path.name)
        if matched is not None and int(matched["rank"]) in own and matched["slot"].isdigit():
            found += path.lstat().st_blocks * BLOCK_BYTES
    return found


def remove_held(run_id: str, directory: Path = SHARED_MEMORY) -> int:
    """Remove all that this machine's shared memory holds of a run, used or not; return the bytes."""
    freed = sum(_removed(path) for path in files_of(run_id, directory))
    owner_path(run_id, directory).unlink(missing_ok=True)
    return freed


def remove_unused(run_id: str, directory: Path = SHARED_MEMORY, *, replicas: bool = True) -> int:
    """Remove a run's states that lie in no buffer of a living process, and what a restart brought; return the bytes.

    Args:
        run_id: identity of the run.
        directory: where shared memory is mounted.
        replicas: also remove what this machine holds for ranks of others: a process that keeps them has no lock there.
    """
    freed = 0
    for path in files_of(run_id, directory):
        kind = _kind_of(path)
        if kind == "replica":
            freed += _removed(path) if replicas else 0
            continue
        try:
            lock = FileLock(path)
        except FileInUseError:
            continue
        except OSError as error:
            logger.warning("%s is left as it is, since it cannot be opened: %s", path, error)
            continue
        freed += _size_of(path)
        lock.remove()
    if next(files_of(run_id, directory), None) is None:
        owner_path(run_id, directory).unlink(missing_ok=True)
    return freed


class _Reading:
    """A state's file, mapped and verified; tensors are views of it while it is open."""

    def __init__(self, state: HeldState) -> None:
        self._state = state
        found = describe(state.path)
        if found is None or found[0] != state:
            raise CheckpointError(f"{state.path} does not hold iteration {state.iteration} any more")
        self._description, digest, (tensor_bytes, description_bytes, scalar_bytes) = found[1:]
        try:
            data = _mapped(state.path)
        except (OSError, ValueError) as error:  # a process may be refused the memory, or find the file cut off
            raise CheckpointError(f"{state.path} cannot be read: {error}") from error
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        end = PAGE_BYTES + tensor_bytes
        description = data[end : end + description_bytes]
        self._saved = data[end + description_bytes : end + description_bytes + scalar_bytes]
        if _digest(data, tensor_bytes, description, self._saved) != digest:
            raise CheckpointError(f"{state.path} (iteration {state.iteration}) is damaged: its hash does not hold")

    def __enter__(self) -> "_Reading":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def tensor(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor of that key, of the shape and type of `like`."""
        offset, dtype, shape = self._description["layout"].get(key, (0, "nothing", []))
        if (dtype, tuple(shape)) != (dtype_name(like.dtype), tuple(like.shape)):
            raise CheckpointError(
                f"{self._state.path} holds {key} as {dtype} of shape {tuple(shape)}, this job has "
                f"{dtype_name(like.dtype)} of shape {tuple(like.shape)}: it is of another model or split over ranks"
            )
        start = PAGE_BYTES + int(offset)
        return self._bytes[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def owned_word(self) -> str:
        """See `owned_word`."""
        tensors = {}
        for key, (offset, dtype, shape) in self._description["layout"].items():
            if not key.startswith("other/"):
                start, size = PAGE_BYTES + offset, math.prod(shape) * getattr(torch, dtype).itemsize
                tensors[key] = dtype, tuple(shape), self._bytes[start : start + size]
        operators = self._description["operators"].items()
        return _owned_word({name: (tuple(shape), offset) for name, (shape, offset, _) in operators}, tensors)

    def taken_at(self, into: Shard) -> dict[str, int]:
        """When each of these operators was taken, each of which must be the same slice of the whole."""
        found = {}
        for name, operator in into.operators.items():
            shape, offset, found[name] = self._description["operators"].get(name, ([], 0, 0))
            if (tuple(shape), offset) != (operator.parameter.global_shape, operator.parameter.offset):
                raise CheckpointError(f"{self._state.path} holds another slice of {name}")
        return found

    def scalars(self) -> Any:
        """Decoded anew: nothing of it lies in shared memory."""
        try:
            tensors = load(bytes(self._saved))
            return decode(self._description["scalars"], tensors)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"the scalars of {self._state.path} cannot be decoded: {error!r}") from error


def _size_of(path: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _removed(path: Path) -> int:
    """The bytes of a file that is removed; 0 where another rank has removed the same."""
    size = _size_of(path)
    path.unlink(missing_ok=True)
    return size


def _kind_of(path: Path) -> str:
    """`replica`, `small` and so on; of a rank's own buffers their number."""
    matched = NAME.fullmatch(path.name)
    return "" if matched is None else matched["slot"].partition("-")[0]


def _no_room(missing: int, left: int, directory: Path) -> OSError:
    return OSError(
        f"{missing} bytes are missing in {directory}, {left} can be taken beside what is left to others: enlarge it "
        "(docker: --shm-size), or set checkpoint.shared_memory to false"
    )


def _is_of_size(descriptor: int, tensor_bytes: int) -> bool:
    header = os.pread(descriptor, HEADER.size, 0)
    return len(header) == HEADER.size and HEADER.unpack(header)[2] == tensor_bytes


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _owned_word(
    slices: Mapping[str, tuple[tuple[int, ...], int]],
    tensors: Mapping[str, tuple[str, tuple[int, ...], torch.Tensor]],
) -> str:
    """Of the slices by operator, and by key of type, shape and bytes of each tensor."""
    state = xxhash.xxh3_128(repr(sorted(slices.items())).encode())
    for key, (dtype, shape, data) in sorted(tensors.items(), key=lambda item: item[0]):
        state.update(repr((key, dtype, shape)).encode())
        state.update(data.numpy().data)
    return state.hexdigest()


def _digest(data: mmap.mmap, tensor_bytes: int, description: bytes, saved: bytes) -> bytes:
    state = xxhash.xxh3_128()
    with memoryview(data) as view, view[PAGE_BYTES : PAGE_BYTES + tensor_bytes] as tensors:
        state.update(tensors)
    state.update(description)
    state.update(saved)
    return state.digest()
