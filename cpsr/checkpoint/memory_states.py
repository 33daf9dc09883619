"""States of a run in a machine's shared memory, by the descriptions in their files; no tensor is read."""

import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

__all__ = [
    "BLOCK_BYTES",
    "HEADER",
    "MAGIC",
    "NAME",
    "PAGE_BYTES",
    "SHARED_MEMORY",
    "Kind",
    "MemoryState",
    "describe",
    "digest_of",
    "files_of",
    "memory_state",
    "memory_states",
    "owner_path",
    "read_at",
    "size_of",
    "write_at",
]

logger = logging.getLogger(__name__)

# Tests use other directories, so that one machine acts as several.
SHARED_MEMORY = Path(os.environ.get("CPSR_SHARED_MEMORY", "/dev/shm"))  # noqa: S108 - that it is shared memory is the purpose; mode 0600, links refused
PAGE_BYTES = 4096
BLOCK_BYTES = 512  # of st_blocks, by POSIX
MAGIC = b"CPSRMEM2"
# Magic, sequence, tensor bytes, description bytes, scalar bytes, hash of both; the description has those of tensors.
HEADER = struct.Struct("<8s4Q16s")
NAME = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-rank-(?P<rank>\d{5})-(?P<slot>[0-9a-z-]+)")

Kind = Literal["snapshot", "departure", "small", "window", "upstream"]


@dataclass(frozen=True)
class MemoryState:
    """A complete state in shared memory, as its file describes it.

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
    def place(self) -> Literal["own", "replica", "other"]:
        """By the file's name: a rank's own buffer or window, a replica, or what a restart or a replication needs."""
        matched = NAME.fullmatch(self.path.name)
        slot = "" if matched is None else matched["slot"]
        own = slot.removeprefix("window-").isdigit()
        return "own" if own else "replica" if slot.startswith("replica-") else "other"


def memory_states(run_id: str, directory: Path = SHARED_MEMORY) -> list[MemoryState]:
    """The states of a run in this machine's shared memory, by their descriptions; not verified."""
    described = (describe(path) for path in files_of(run_id, directory))
    return sorted(
        (found[0] for found in described if found is not None), key=lambda state: (state.rank, state.iteration)
    )


def memory_state(path: Path) -> MemoryState | None:
    """The state that a file describes, not verified; None where the file holds no complete state."""
    found = describe(path)
    return None if found is None else found[0]


def owner_path(run_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """The file that names the owner of a run's files; see `cpsr.checkpoint.memory_owners`."""
    return directory / f"cpsr-{run_id}-owner"


def files_of(run_id: str, directory: Path) -> Iterator[Path]:
    """Files of a run in shared memory, whatever is in them."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        matched = NAME.fullmatch(path.name)
        if matched is not None and matched["run_id"] == run_id:
            yield path


# A state, its description and hash; bytes of its tensors, its description and its scalars.
Described = tuple[MemoryState, Mapping[str, Any], bytes, tuple[int, int, int]]


def describe(path: Path) -> Described | None:
    """The description of a file's state, with hash and sizes; None where the file holds no complete state."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, and is ignored: %s", path, error)
        return None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            logger.warning("%s belongs to another user, and is ignored", path)
            return None
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        magic, sequence, tensor_bytes, description_bytes, scalar_bytes, digest = HEADER.unpack(header)
        end = PAGE_BYTES + tensor_bytes + description_bytes + scalar_bytes
        if magic != MAGIC or sequence % 2 or end > os.fstat(descriptor).st_size:
            return None
        file.seek(PAGE_BYTES + tensor_bytes)
        try:
            description = json.loads(file.read(description_bytes))
            rank, iteration, life, branch = (int(description[name]) for name in ("rank", "iteration", "life", "branch"))
            kind = description["kind"]
            if kind not in get_args(Kind):
                raise ValueError(f"{kind!r} is no kind of state")
            ages = [int(one) for one in description["taken_at"].values()]
            owned = str(description["owned"])
            state = MemoryState(path, rank, iteration, life, kind, owned, branch, min(ages), max(ages))
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the description of the state in %s cannot be read; it is ignored: %r", path, error)
            return None
    return state, description, digest, (tensor_bytes, description_bytes, scalar_bytes)


def digest_of(description: bytes, saved: bytes) -> bytes:
    """xxh3-128 of a state's description, which has the hashes of its tensors, and of its scalars."""
    state = xxhash.xxh3_128(description)
    state.update(saved)
    return state.digest()


def size_of(path: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it: one call takes 2 GiB at most."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read so many bytes, fewer only at the end of the file: one call takes 2 GiB at most."""
    pieces, left = list[bytes](), size
    while left and (piece := os.pread(descriptor, left, offset + size - left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
