"""Makes complete snapshots survive the process: carries over what they left out, hashes them, and lets them count."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from cpsr.checkpoint.buffers import HostBuffer
from cpsr.checkpoint.carrying import Carrying
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import Kind
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.checkpoint.running import RunningCopy

__all__ = ["Sealing"]

logger = logging.getLogger(__name__)


class Sealing:
    """Seals the buffers of one pool, in one thread.

    Args:
        buffers: of the pool.
        shared: shared memory that they lie in; None: the process's own, and nothing can be sealed.

    Attributes:
        carrying: what a snapshot takes from the one before.
        occupancy: which snapshot has which buffer.
        on_sealed: called with the file of each snapshot that counts from now on, and that is to be replicated.
        on_counting: called for each snapshot that counts from now on.
    """

    def __init__(self, buffers: Sequence[HostBuffer], shared: SharedMemory | None) -> None:
        self._files = [buffer.memory for buffer in buffers]
        self._shared = shared
        self.carrying = Carrying([buffer.held for buffer in buffers])
        left = {index: file.iteration for index, file in enumerate(self._files) if file is not None}
        sealed = {index: iteration for index, iteration in left.items() if iteration >= 0}
        self.occupancy = Occupancy(len(buffers), sealed, self._file_name)
        self.on_sealed: Callable[[Path, Snapshot], None] | None = None
        self.on_counting: Callable[[], None] = lambda: None

    def is_possible(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot is one to restart from, in shared memory."""
        return self._files[self.occupancy.index(snapshot)] is not None and snapshot.contents.moments

    def seal(self, index: int, snapshot: Snapshot, kind: Kind, copied: RunningCopy | None) -> bool:
        """Seal a snapshot; whether it could be. After `Occupancy.begin_seal`, which this ends.

        Args:
            index: of its buffer.
            snapshot: a complete one, but for `copied`.
            kind: of the state.
            copied: a copy that has ended; its scalars are those of the snapshot.
        """
        file, shared, sealed = self._files[index], self._shared, False
        assert file is not None
        assert shared is not None
        try:
            encoded = None
            if copied is not None:
                snapshot.scalars, encoded = copied.result(), copied.encoded
            held = self.carrying.complete(index, snapshot)
            state = snapshot.shard, snapshot.iteration, snapshot.scalars
            file.seal(shared.rank, shared.life, kind, *state, branch=shared.branch, held=held, encoded=encoded)
            sealed = True
            if kind != "departure" and snapshot.replicate and self.on_sealed is not None:
                self.on_sealed(file.path, snapshot)  # nothing overwrites the buffer meanwhile
        except Exception as error:  # noqa: BLE001 - the snapshot itself is whole, and is written to the disk
            logger.warning("iteration %d is not held in shared memory: %s", snapshot.iteration, error)
        finally:
            if not sealed:
                self.carrying.forget()
            self.occupancy.end_seal(index, snapshot, sealed=sealed)
        if sealed and kind != "departure":
            self.on_counting()
        return sealed

    def unseal(self, index: int) -> None:
        """The state in this buffer counts no more."""
        file = self._files[index]
        if file is not None:
            file.unseal()

    def _file_name(self, index: int) -> str:
        file = self._files[index]
        return "" if file is None else file.path.name
