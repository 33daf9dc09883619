"""What no other rank has of a rank's state, where all own the same weights and moments: its buffers and its scalars."""

import hashlib
from pathlib import Path
from typing import Any

from cpsr.checkpoint.buffers import HostBuffer, layout_bytes
from cpsr.checkpoint.memory import PAGE_BYTES, HeldState, MemoryFile, SharedMemory, load_held
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.state import Shard

__all__ = ["SmallStates", "fingerprint", "load_together", "small_bytes"]

_KIND: Any = "small"
FILES = 2  # taken in turn: one is sent while the next is sealed


class SmallStates:
    """Small states of this rank in shared memory, each in the place of the one before the last.

    Args:
        memory: this rank's shared memory.
        template: the shard whose buffers every snapshot has.

    Raises:
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, memory: SharedMemory, template: Shard) -> None:
        self._memory = memory
        others = _others(template)
        self._files: list[tuple[MemoryFile, HostBuffer]] = []
        for number in range(FILES):
            file = MemoryFile(memory.path(f"small-{number}"), layout_bytes(others))
            self._files.append((file, HostBuffer(others, pinned=False, memory=file)))

    def seal(self, snapshot: Snapshot) -> Path:
        """Copy a snapshot's buffers and scalars into a file; SaveError or OSError where that fails."""
        file, buffer = self._files[0]
        self._files.reverse()
        file.unseal()
        buffer.copy_others(snapshot.shard)
        small = _others(buffer.shard({}))
        file.seal(self._memory.rank, self._memory.life, _KIND, small, snapshot.iteration, snapshot.scalars)
        return file.path

    def close(self, *, remove: bool) -> None:
        """Let the files go; see `MemoryFile.close`."""
        for file, _ in self._files:
            file.close(remove=remove)


def small_bytes(template: Shard) -> int:
    """Bytes of a small state without its description and scalars."""
    return PAGE_BYTES + layout_bytes(_others(template))


def load_together(small: HeldState, tensors: HeldState, into: Shard) -> Any:
    """Put a rank's small state and another rank's whole one of the same iteration together; return the scalars.

    Args:
        small: of the rank that comes back.
        tensors: of any rank that owns the same.
        into: views to be written.

    Raises:
        CheckpointError: one of them is not whole any more, or is of another model or split.
    """
    load_held(tensors, Shard(into.operators))
    return load_held(small, _others(into))


def fingerprint(shard: Shard) -> str:
    """One word for what a rank owns, to be compared: names, types and slices of its weights and moments."""
    owned = [(key, str(values.dtype), tuple(values.shape)) for key, values in Shard(shard.operators).tensors()]
    slices = [
        (name, operator.parameter.global_shape, operator.parameter.offset) for name, operator in shard.operators.items()
    ]
    return hashlib.sha256(repr((sorted(owned), sorted(slices))).encode()).hexdigest()


def _others(shard: Shard) -> Shard:
    return Shard({}, shard.others)
