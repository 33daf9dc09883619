"""Makes complete snapshots survive the process: carries over what they left out, hashes them, and lets them count."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from cpsr.checkpoint.buffers import HostBuffer
from cpsr.checkpoint.copying import CopyEngine, Publish
from cpsr.checkpoint.host_snapshot import Contents, Snapshot
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import Kind
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.checkpoint.parts import Held
from cpsr.checkpoint.running_copy import RunningCopy

__all__ = ["Carrying", "Sealing"]


class Carrying:
    """Follows which buffer has the newest snapshot, and of which iteration each of its parts is.

    `begin` and `begun` belong to the training thread; `complete` to the one that seals, in the order of the snapshots.

    Args:
        held: what each buffer holds.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._newest: tuple[int, Snapshot] | None = None

    def begin(self, index: int, snapshot: Snapshot, contents: Contents) -> None:
        """Note what a snapshot copies into its buffer; of everything if there is no snapshot before it.

        Raises:
            SaveError: an operator that it leaves out has no part of its own.
        """
        if self._newest is not None and self._newest[0] == index:
            self._newest = None
        if contents.uncopied and self._newest is None:
            contents = replace(contents, uncopied=frozenset())
        snapshot.contents, held = contents, self._held[index]
        copied = held.parts.besides(contents.uncopied)
        held.overwrite(copied)
        snapshot.taken_at = dict.fromkeys(copied, snapshot.iteration)
        if contents.uncopied and self._newest is not None:
            snapshot.source, before = self._newest[0], self._newest[1]
            snapshot.taken_at = {**before.taken_at, **snapshot.taken_at}

    def begun(self, index: int, snapshot: Snapshot) -> None:
        """Its copy is under way: the next one may carry over what it holds."""
        self._newest = index, snapshot

    def forget(self) -> None:
        """Carry nothing over: a snapshot failed, or the run has gone back."""
        self._newest = None

    def complete(self, index: int, snapshot: Snapshot) -> Held:
        """What the buffer holds once its copy is through: what was left out comes from the snapshot before.

        Raises:
            SaveError: that one does not hold it.
        """
        held = self._held[index]
        if not snapshot.taken_at:  # it was loaded, not copied
            snapshot.taken_at = _iterations(held, snapshot)
            held.taken_at = dict(snapshot.taken_at)
        held.fill([part for part, at in snapshot.taken_at.items() if at == snapshot.iteration], snapshot.iteration)
        if snapshot.source is not None:
            held.carry(snapshot.taken_at, self._held[snapshot.source])
        return held


def _iterations(held: Held, snapshot: Snapshot) -> dict[str, int]:
    """The oldest iteration in each part of a loaded state."""
    found = dict.fromkeys(held.parts.names, snapshot.iteration)
    for name, operator in snapshot.shard.operators.items():
        part = held.parts.of(name)
        found[part] = min(found[part], operator.iteration)
    return found


logger = logging.getLogger(__name__)


class Sealing:
    """Seals the buffers of one pool.

    Args:
        buffers: of the pool.
        shared: shared memory that they lie in; None: the process's own, and nothing can be sealed.
        engine: copies into them.

    Attributes:
        carrying: what a snapshot takes from the one before.
        occupancy: which snapshot has which buffer.
        on_sealed: called with the file of each snapshot that counts from now on, and that is to be replicated.
        on_counting: called for each snapshot that counts from now on.
    """

    def __init__(self, buffers: Sequence[HostBuffer], shared: SharedMemory | None, engine: CopyEngine) -> None:
        self._files = [buffer.memory for buffer in buffers]
        self._shared, self._engine = shared, engine
        self.carrying = Carrying([buffer.held for buffer in buffers])
        left = {index: file.iteration for index, file in enumerate(self._files) if file is not None}
        sealed = {index: iteration for index, iteration in left.items() if iteration >= 0}
        self.occupancy = Occupancy(len(buffers), sealed, self._file_name)
        self.on_sealed: Callable[[Path, Snapshot], None] | None = None
        self.on_counting: Callable[[], None] = lambda: None

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
                held = self.carrying.complete(index, snapshot)
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
                self.carrying.forget()
            self.occupancy.end_seal(index, snapshot, sealed=counts)
            if counts and kind != "departure":
                self._counts(file.path, snapshot)

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
