"""What ranks that own the same weights and moments have beside them: buffers and scalars."""

import json
from dataclasses import replace

from cpsr.checkpoint.arena import Sealed
from cpsr.checkpoint.assemble import wanted_of
from cpsr.checkpoint.buffers import HostBuffer, slab_size
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import OpenState, fill
from cpsr.state.shard import Shard

__all__ = ["SmallStates"]

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
        others = Shard({}, template.others)
        whole, buffer = slab_size(template), slab_size(others)
        size = replace(buffer, header_bytes=whole.header_bytes)  # it names the parts of the whole
        files = memory.files([f"small-{number}" for number in range(FILES)], size)
        self._files = [(file, HostBuffer(others, pinned=False, memory=file)) for file in files]

    def seal(self, whole: Sealed) -> Sealed:
        """Copy a snapshot's buffers and scalars into a file, with hashes of the weights and moments that go with them.

        By the hashes a restart verifies that other ranks' weights and moments are the same.

        Raises:
            CheckpointError: the snapshot is not there any more, or damaged.
            SaveError, OSError: shared memory is full.
        """
        (file, buffer), iteration = self._files[0], whole.iteration
        self._files.reverse()
        file.unseal()
        small = buffer.shard_at(iteration)
        with OpenState(whole.described()) as slab:
            fill([slab], wanted_of(small), whole.path)
            scalars, parts = slab.scalars(), slab.state.parts
        whole.described()  # after all was read
        file.seal("small", small, iteration, scalars, owned=json.dumps(parts))
        return Sealed.at(file.path, iteration)

    def close(self, *, remove: bool) -> None:
        """Let the files go; see `MemoryFile.close`."""
        for file, _ in self._files:
            file.close(remove=remove)
