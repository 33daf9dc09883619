"""States of a run in a machine's shared memory, by the headers of their files; no tensor is read.

Each file is a slab: one safetensors image, which that library alone can read::

    8 bytes: length of the header; 0 while the file is being filled
    the header, filled up with spaces to the size that was reserved for it
    the buffer: `param/...`, `moment/...` and `other/...`, with `padding/...` in the gaps
    the small state: its tensors, a safetensors image within `small/tensors`, and its tree as JSON in `small`
    the last padding

The header's metadata is the index. Its texts are: `hash`, xxh3-128 of the rest of the header and of all that lies
behind the buffer; `sealed_at`, in ns, another one at each seal; `run`, `rank`, `life`, `branch`, `kind`, `iteration`,
`owned` (see `MemoryState`); `buffer_bytes` and `file_bytes`; and as JSON `operators` (global shape, offset, block and
part of each), `taken_at` (iteration of each part), `segments` (first byte in the buffer and byte after the last) and
`hashes` (of each segment, the xxh3-64 of every MiB of it).
"""

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import xxhash

from cpsr.checkpoint.direct_file import PIECE_DIGITS, pieces_in
from cpsr.checkpoint.tensor_file import LENGTH_BYTES, METADATA, NO_HEADER, TensorHeader

__all__ = ["BLOCK_BYTES", "HASH_PLACE", "NAME", "PAGE_BYTES", "PENDING_HASH", "SHARED_MEMORY", "Described"]
__all__ += ["HeldOperator", "Kind", "MemoryState", "SlabSize", "describe", "described", "hash_of", "iteration_in"]
__all__ += ["memory_state", "open_own", "owner_path", "size_of", "write_at"]

logger = logging.getLogger(__name__)

# Tests use other directories, so that one machine acts as several.
SHARED_MEMORY = Path(os.environ.get("CPSR_SHARED_MEMORY", "/dev/shm"))  # noqa: S108 - that it is shared memory is the purpose; mode 0600, links refused
PAGE_BYTES = 4096
# Of a header; see `SlabSize.for_tensors`.
INDEX_BYTES, TENSOR_BYTES, OPERATOR_BYTES = 2000, 240, 240
BLOCK_BYTES = 512  # of st_blocks, by POSIX
NAME = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-rank-(?P<rank>\d{5})-(?P<slot>[0-9a-z-]+)")

Kind = Literal["snapshot", "departure", "small", "window", "upstream"]


@dataclass(frozen=True)
class MemoryState:
    """A complete state in shared memory, as its file's header describes it.

    Attributes:
        path: its file.
        rank: the rank whose state it is.
        iteration: iteration at which it was taken.
        life: life of the run that took it.
        branch: how often that life had gone back before.
        kind: `snapshot`, with all scalars; `departure`, the tensors at the last step boundary of a broken group;
            `small`, all but weights and moments; `window`, sparse snapshots of several iterations, of which `iteration`
            is the first (`cpsr.replay`); `upstream`, what a stage sent to others in that iteration.
        owned: of a `small` one, which weights and moments belong to it (see `owned_word`); else empty.
        oldest_iteration: of its parts; older than `iteration` where experts are.
        newest_iteration: of its parts; of a window the last one.
    """

    path: Path
    rank: int
    iteration: int
    life: int
    kind: Kind
    owned: str = ""
    branch: int = 0
    oldest_iteration: int = -1
    newest_iteration: int = -1

    @property
    def name(self) -> str:
        """Of its file."""
        return self.path.name

    @property
    def place(self) -> Literal["own", "replica", "other"]:
        """By the file's name: a rank's own buffer or window, a replica, or what a restart or a replication needs."""
        matched = NAME.fullmatch(self.path.name)
        slot = "" if matched is None else matched["slot"]
        own = slot.removeprefix("window-").isdigit()
        return "own" if own else "replica" if slot.startswith("replica-") else "other"


def memory_state(path: Path) -> MemoryState | None:
    """The state that a file describes, not verified; None where the file holds no complete state."""
    found = describe(path)
    return None if found is None else found.state


def iteration_in(path: Path) -> int:
    """Iteration of the state in a file, -1 where it holds none."""
    found = describe(path)
    return -1 if found is None else found.state.iteration


def owner_path(run_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """The file that names the owner of a run's files; see `cpsr.checkpoint.memory_owners`."""
    return directory / f"cpsr-{run_id}-owner"


@dataclass(frozen=True)
class SlabSize:
    """Bytes of a file that are known before its state is: where the buffer begins, and how long it is."""

    header_bytes: int
    buffer_bytes: int

    @property
    def bytes(self) -> int:
        """Of both."""
        return self.header_bytes + self.buffer_bytes

    @classmethod
    def for_tensors(cls, keys: Iterable[str], buffer_bytes: int) -> Self:
        """The size of a file with the tensors of these keys in its buffer, whatever its small state will be.

        A tensor takes its key and some 110 bytes of the header, and padding before it as many. In the index, an
        operator takes its name, that of its part and some 60; and a part twice its name and some 150. Each MiB has a
        hash.
        """
        wanted = LENGTH_BYTES + INDEX_BYTES + PIECE_DIGITS * pieces_in(buffer_bytes)
        for key in keys:
            name = len(json.dumps(key))
            wanted += TENSOR_BYTES + name + (OPERATOR_BYTES + 5 * name if key.startswith("param/") else 0)
        return cls(-(-wanted // PAGE_BYTES) * PAGE_BYTES, buffer_bytes)


@dataclass(frozen=True)
class HeldOperator:
    """What a state holds of an operator; the first three as of `cpsr.state.shard.ParamSlice`."""

    global_shape: tuple[int, ...]
    offset: int
    block: tuple[int, ...] | None
    iteration: int


@dataclass(frozen=True)
class Described:
    """What the header of a file says of its state; not verified. The size is without the small state."""

    state: MemoryState
    size: SlabSize
    operators: Mapping[str, HeldOperator]
    index: Mapping[str, str]
    header: TensorHeader


def describe(path: Path) -> Described | None:
    """What a file's header says; None where the file holds no complete state, or cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # nor waits for a pipe
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, and is ignored: %s", path, error)
        return None
    try:
        return described(path, descriptor)
    finally:
        os.close(descriptor)


def described(path: Path, descriptor: int) -> Described | None:
    """`describe` of a file that is open."""
    status = os.fstat(descriptor)
    if not _is_own(status):
        logger.warning("%s belongs to another user, or is no plain file, and is ignored", path)
        return None
    header = TensorHeader(status.st_size)
    try:
        header.take(memoryview(os.pread(descriptor, LENGTH_BYTES, 0)))
        if header.end == LENGTH_BYTES:  # it is being filled, or holds nothing
            return None
        header.take(memoryview(os.pread(descriptor, header.end - LENGTH_BYTES, LENGTH_BYTES)))
        index = header.metadata()
        if int(index["file_bytes"]) != status.st_size:
            return None
        named = NAME.fullmatch(path.name)
        if named is not None and (named["run_id"], int(named["rank"])) != (index["run"], int(index["rank"])):
            raise ValueError(f"it is of rank {index['rank']} of the run {index['run']!r}")
        size = SlabSize(header.end, int(index["buffer_bytes"]))
        return Described(_state_in(path, index), size, _operators_in(index), index, header)
    except NO_HEADER as error:
        why = type(error).__name__, error  # not its `repr`, which may hold all that was read
        logger.warning("the header of the state in %s cannot be read; it is ignored: %s: %s", path, *why)
        return None


def _state_in(path: Path, index: Mapping[str, str]) -> MemoryState:
    kind: Any = index["kind"]
    if kind not in get_args(Kind):
        raise ValueError(f"{kind!r} is no kind of state")
    rank, iteration, life, branch = (int(index[name]) for name in ("rank", "iteration", "life", "branch"))
    ages = [int(one) for one in json.loads(index["taken_at"]).values()]
    return MemoryState(path, rank, iteration, life, kind, index["owned"], branch, min(ages), max(ages))


def _operators_in(index: Mapping[str, str]) -> dict[str, HeldOperator]:
    taken_at = json.loads(index["taken_at"])
    return {
        name: HeldOperator(tuple(shape), offset, None if block is None else tuple(block), int(taken_at[part]))
        for name, (shape, offset, block, part) in json.loads(index["operators"]).items()
    }


_HASH_AT = LENGTH_BYTES + len(f'{{"{METADATA}":{{"hash":"')  # it comes first
PENDING_HASH = "0" * 32
HASH_PLACE = slice(_HASH_AT, _HASH_AT + len(PENDING_HASH))


def hash_of(header: bytes | memoryview, behind: bytes | memoryview) -> str:
    """The hash that belongs into a header: of all else in it, and of what lies behind the buffer."""
    state = xxhash.xxh3_128(memoryview(header)[LENGTH_BYTES : HASH_PLACE.start])
    state.update(memoryview(header)[HASH_PLACE.stop :])
    state.update(behind)
    return state.hexdigest()


def size_of(path: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def open_own(path: Path) -> int:
    """A descriptor of a file that is to be written, made where there is none.

    Raises:
        OSError: it belongs to another user, who could read what is written, or is no plain file; or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not _is_own(os.fstat(descriptor)):
            raise OSError(errno.EPERM, "it belongs to another user, or is no plain file: remove it", str(path))
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it: one call takes 2 GiB at most."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
