"""What a machine's shared memory holds of a run, as its files say; read without a tensor (see `memory`)."""

import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "HEADER",
    "MAGIC",
    "NAME",
    "PAGE_BYTES",
    "SHARED_MEMORY",
    "HeldState",
    "Kind",
    "describe",
    "files_of",
    "held_state",
    "held_states",
]

logger = logging.getLogger(__name__)

# Another directory than the machine's lets one machine stand for several.
SHARED_MEMORY = Path(os.environ.get("CPSR_SHARED_MEMORY", "/dev/shm"))  # noqa: S108 - that it is shared memory is the purpose; mode 0600, links refused
PAGE_BYTES = 4096
MAGIC = b"CPSRMEM1"
HEADER = struct.Struct("<8s4Q16s")  # magic, sequence, tensor bytes, description bytes, scalar bytes, hash
NAME = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-rank-(?P<rank>\d{5})-(?P<slot>[0-9a-z-]+)")

Kind = Literal["snapshot", "mixed", "departure", "small"]


@dataclass(frozen=True)
class HeldState:
    """A whole state in shared memory, as its file describes it.

    Attributes:
        path: its file.
        rank: the rank whose state it is.
        iteration: iteration at which it was taken.
        life: life of the run that took it.
        branch: how often that life had gone back before.
        kind: `snapshot`, with all scalars; `mixed`, the same with experts that were taken before it; `departure`, the
            tensors at the last step boundary of a broken group; `small`, all but weights and moments.
        owned: of a `small` one, which weights and moments belong to it (see `owned_word`); else empty.
    """

    path: Path
    rank: int
    iteration: int
    life: int
    kind: Kind
    owned: str = ""
    branch: int = 0


def held_states(run_id: str, directory: Path = SHARED_MEMORY) -> list[HeldState]:
    """The states of a run that this machine's shared memory holds, as their files say; not verified."""
    held = (describe(path) for path in files_of(run_id, directory))
    return sorted((found[0] for found in held if found is not None), key=lambda state: (state.rank, state.iteration))


def held_state(path: Path) -> HeldState | None:
    """The state that a file holds, as it says; None where it holds none that is whole. Not verified."""
    found = describe(path)
    return None if found is None else found[0]


def files_of(run_id: str, directory: Path) -> Iterator[Path]:
    """Files of a run in shared memory, whatever is in them."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        matched = NAME.fullmatch(path.name)
        if matched is not None and matched["run_id"] == run_id:
            yield path


# A state, its whole description, the hash of its bytes; sizes of its tensors, its description and its scalars.
Described = tuple[HeldState, Mapping[str, Any], bytes, tuple[int, int, int]]


def describe(path: Path) -> Described | None:
    """What a file says that it holds, its hash and sizes; None where it holds nothing that is whole."""
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
            state = HeldState(path, rank, iteration, life, description["kind"], str(description["owned"]), branch)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s says nothing that can be read of what it holds, and is ignored: %r", path, error)
            return None
    return state, description, digest, (tensor_bytes, description_bytes, scalar_bytes)
