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
        return self._files[self.occupancy.index(snapshot)] is not None

    def seal(self, index: int, snapshot: Snapshot, kind: Kind, copied: RunningCopy | None) -> bool:
        """Seal a snapshot; whether it could be. After `Occupancy.begin_seal`, which this ends.

        It counts once its copy is confirmed.

        Args:
            index: of its buffer.
            snapshot: a complete one, but for `copied`.
            kind: of the state.
            copied: a copy that has ended; its scalars are those of the snapshot.
        """
        file, shared = self._files[index], self._shared
        assert file is not None
        assert shared is not None
        try:
            encoded = None
            if copied is not None:
                snapshot.scalars, encoded = copied.result(), copied.encoded
            held = self.carrying.complete(index, snapshot)
            state = snapshot.shard, snapshot.iteration, snapshot.scalars
            stamp = shared.rank, shared.life, kind
            publish = file.prepare(*stamp, *state, branch=shared.branch, held=held, encoded=encoded)
        except Exception as error:  # noqa: BLE001 - the snapshot itself is whole, and is written to the disk
            logger.warning("iteration %d is not held in shared memory: %s", snapshot.iteration, error)
            self._end(index, snapshot, sealed=False)
            return False

        def count(unchanged: bool) -> None:
            if unchanged:
                publish()
            self._end(index, snapshot, sealed=unchanged)
            if unchanged and kind != "departure":
                self._counts(file.path, snapshot)

        if copied is None:
            count(True)
        else:
            copied.when_confirmed(count)
        return True

    def _end(self, index: int, snapshot: Snapshot, *, sealed: bool) -> None:
        if not sealed:
            self.carrying.forget()
        self.occupancy.end_seal(index, snapshot, sealed=sealed)

    def _counts(self, path: Path, snapshot: Snapshot) -> None:
        """The snapshot can be restarted from; it has its buffer, which nobody overwrites meanwhile."""
        if snapshot.replicate and self.on_sealed is not None:
            try:
                self.on_sealed(path, snapshot)
            except Exception as error:  # noqa: BLE001 - other machines lack it; this one has it
                logger.warning("iteration %d is not replicated: %s", snapshot.iteration, error)
        self.on_counting()

    def unseal(self, index: int) -> None:
        """The state in this buffer counts no more."""
        file = self._files[index]
        if file is not None:
            file.unseal()

    def _file_name(self, index: int) -> str:
        file = self._files[index]
        return "" if file is None else file.path.name
