"""The host buffers of a pool: in shared memory where there is enough, pinned for a GPU, and let go in order."""

import logging
from collections.abc import Collection, Mapping

import torch

from cpsr.checkpoint.buffers import HostBuffer, layout_bytes
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.pinning import Pinning
from cpsr.errors import SaveError
from cpsr.state.device_values import Arrival, Deadline
from cpsr.state.shard import Shard

__all__ = ["PoolBuffers"]

logger = logging.getLogger(__name__)

# At the end of a life a device that does not finish its work within this time hangs.
IDLE_SECONDS = 5.0
# Memory that a device may still write to stays mapped, registered and locked until the process ends.
_left_alone: list[object] = []


class PoolBuffers:
    """Makes the buffers.

    Where CUDA refuses to pin shared memory, they are in pinned memory of the process: they do not survive it, which is
    reported, but no training step waits for copies through a staging buffer.

    Args:
        template: the shard that each holds.
        count: of buffers.
        memory: shared memory for them; None: the process's own.
        device: that copies into them; None: the host.
        units: operator -> its part, see `Parts`.

    Attributes:
        all: the buffers.
        problem: why they are not in shared memory; None where they are, or were not meant to be.
    """

    def __init__(
        self,
        template: Shard,
        count: int,
        memory: SharedMemory | None,
        device: torch.device | None,
        units: Mapping[str, str],
    ) -> None:
        self._device = device
        self._units = units
        self._pinnings: list[Pinning] = []
        self.problem: str | None = None
        self.all: list[HostBuffer] = []
        if memory is not None:
            self._make_shared(template, count, memory)
        while len(self.all) < count:
            self.all.append(HostBuffer(template, pinned=device is not None, units=units))

    def _make_shared(self, template: Shard, count: int, memory: SharedMemory) -> None:
        files: list[MemoryFile] = []
        try:
            files = memory.files(count, layout_bytes(template))
            if self._device is not None:
                for file in files:
                    self._pinnings.append(Pinning(file.bytes, self._device))
            self.all = [HostBuffer(template, pinned=False, memory=file, units=self._units) for file in files]
        except (OSError, SaveError) as error:
            self.problem = str(error)
            self._unpin()
            for file in files:
                file.close(remove=file.iteration < 0)  # a restart can still use the state of an earlier process

    def close(self, in_flight: Collection[int], *, remove: bool) -> None:
        """Unpin and close them.

        Args:
            in_flight: indices of those into which a copy may still be under way: they are left alone, with their locks.
            remove: remove all from shared memory; else it stays for the next life.
        """
        if in_flight or not self._is_idle():
            # Unregistering waits for the device; and the address of a registered mapping must not be used again.
            logger.warning(
                "the device has not finished its work: host memory of this rank stays pinned until the process ends, "
                "and %d of %d buffers stay locked because a copy into them may be under way",
                len(in_flight),
                len(self.all),
            )
            _left_alone.append((self.all, self._pinnings))
        else:
            self._unpin()
        for index, buffer in enumerate(self.all):
            if buffer.memory is not None and index not in in_flight:
                buffer.memory.close(remove=remove)

    def _is_idle(self) -> bool:
        if self._device is None or not self._pinnings:
            return True
        try:
            Arrival(self._device).wait("its work", Deadline(IDLE_SECONDS))
        except (SaveError, RuntimeError):  # it hangs, or fails at every call after an error of a kernel
            return False
        return True

    def _unpin(self) -> None:
        while self._pinnings:
            self._pinnings.pop().undo()
