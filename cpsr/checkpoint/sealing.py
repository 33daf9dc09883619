"""Makes complete snapshots survive the process: carries over what they left out, hashes them, and lets them count."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from cpsr.checkpoint.buffers import HostBuffer
from cpsr.checkpoint.copying import CopyEngine, Publish
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import Kind
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.checkpoint.parts import Held
from cpsr.checkpoint.running_copy import RunningCopy

__all__ = ["Sealing"]


logger = logging.getLogger(__name__)


class Sealing:
    """Seals the buffers of one pool, and follows which has the newest snapshot, from which the next one takes parts.

    `begin` and `begun` belong to the training thread, `seal` to any.

    Args:
        buffers: of the pool.
        shared: shared memory that they lie in; None: the process's own, and nothing can be sealed.
        engine: copies into them.

    Attributes:
        occupancy: which snapshot has which buffer.
        on_sealed: called with the file of each snapshot that counts from now on, and that is to be replicated; in the
            engine's thread.
        on_counting: called for each snapshot that counts from now on; likewise.
    """

    def __init__(self, buffers: Sequence[HostBuffer], shared: SharedMemory | None, engine: CopyEngine) -> None:
        self._files = [buffer.memory for buffer in buffers]
        self._shared, self._engine = shared, engine
        self._held = [buffer.held for buffer in buffers]
        self._newest: tuple[int, Snapshot] | None = None
        left = {index: file.iteration for index, file in enumerate(self._files) if file is not None}
        sealed = {index: iteration for index, iteration in left.items() if iteration >= 0}
        self.occupancy = Occupancy(len(buffers), sealed, self._file_name)
        self.on_sealed: Callable[[Path, Snapshot], None] | None = None
        self.on_counting: Callable[[], None] = lambda: None

    def begin(self, index: int, snapshot: Snapshot, left_out: Collection[str] = ()) -> None:
        """Note what a snapshot copies into its buffer; of everything if there is no snapshot before it.

        Args:
            index: of the buffer.
            snapshot: an empty one.
            left_out: operators that it takes from the snapshot before.

        Raises:
            SaveError: one has no part of its own.
        """
        self.unseal(index)
        before = None if self._newest is None or self._newest[0] == index else self._newest
        held, self._newest = self._held[index], before
        older: Mapping[str, int] = {}
        if left_out and before is not None:
            snapshot.source, older = before[0], before[1].taken_at
        copied = held.parts.besides(left_out if older else ())
        snapshot.taken_at = {**older, **dict.fromkeys(copied, snapshot.iteration)}
        held.overwrite(snapshot.copied_parts)

    def begun(self, snapshot: Snapshot) -> None:
        """Its copy is under way: the next one may take from what it holds."""
        self._newest = self.occupancy.index(snapshot), snapshot

    def forget(self) -> None:
        """Take nothing over: a snapshot failed."""
        self._newest = None

    def forget_all(self) -> None:
        """The run has gone back: of iterations that come again no buffer holds a part."""
        self.forget()
        for held in self._held:
            held.overwrite(held.parts.names)

    def _complete(self, index: int, snapshot: Snapshot) -> Held:
        """What the buffer holds once its copy is through: what was left out comes from the snapshot before.

        Raises:
            SaveError: that one does not hold it.
        """
        held = self._held[index]
        if not snapshot.taken_at:  # it was loaded, not copied
            snapshot.taken_at = _iterations(held, snapshot)
            held.taken_at = dict(snapshot.taken_at)
        held.fill(snapshot.copied_parts, snapshot.iteration)
        if snapshot.source is not None:
            held.carry(snapshot.taken_at, self._held[snapshot.source])
        return held

    def seal(self, snapshot: Snapshot, kind: Kind, copied: RunningCopy | None) -> "Future[bool] | None":
        """Seal a snapshot that has a buffer; see `SnapshotPool.seal`. It counts once its copy is confirmed."""
        index, shared = self.occupancy.index(snapshot), self._shared
        file = self._files[index]
        if file is None or shared is None:
            return None
        self.occupancy.begin_seal(snapshot)

        def prepare() -> Publish | None:
            try:
                encoded = None
                if copied is not None:
                    snapshot.scalars, encoded = copied.result(), copied.encoded
                held = self._complete(index, snapshot)
                state = snapshot.shard, snapshot.iteration, snapshot.scalars
                stamp = shared.rank, shared.life, kind
                publish = file.prepare(*stamp, *state, branch=shared.branch, held=held, encoded=encoded)
                snapshot.hashed = held.by_address()
            except Exception as error:  # noqa: BLE001 - the snapshot itself is whole, and is written to the disk
                logger.warning("iteration %d is not held in shared memory: %s", snapshot.iteration, error)
                return None
            return publish

        def ended(counts: bool) -> None:
            if not counts:
                self.forget()
                self._held[index].overwrite(self._held[index].parts.names)  # its iteration may be tried again
            if counts and kind != "departure":
                self._counts(file.path, snapshot)
            self.occupancy.end_seal(index, snapshot, sealed=counts)
            snapshot.settled = True

        return self._engine.seal(prepare, ended, copied)

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


def _iterations(held: Held, snapshot: Snapshot) -> dict[str, int]:
    """The oldest iteration in each part of a loaded state."""
    found = dict.fromkeys(held.parts.names, snapshot.iteration)
    for name, operator in snapshot.shard.operators.items():
        part = held.parts.of(name)
        found[part] = min(found[part], operator.iteration)
    return found
