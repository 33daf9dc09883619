"""Which snapshot has which host buffer, and which buffer the next one may overwrite."""

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory_states import Left
from cpsr.state.shard import Shard

__all__ = ["Occupancy"]

_NO_VIEWS = Shard({})  # the copying thread makes the views of a snapshot
NOTHING = -1


@dataclass(eq=False)
class _Buffer:
    """What is known of one buffer.

    Attributes:
        name: of its file in shared memory; empty without one.
        sealed: iteration of its sealed state, or `NOTHING`.
        left: that state, if an earlier process has sealed it.
        whole: whether this process has, and every part is of the iteration itself.
        snapshot: that has it.
        seals: how many are under way that write or read it; their snapshots may be released meanwhile.
        sendings: to how many other machines it is being sent.
    """

    name: str
    sealed: int
    left: Left | None
    whole: bool = False
    snapshot: Snapshot | None = None
    seals: int = 0
    sendings: int = 0

    @property
    def is_used(self) -> bool:
        """Whether nothing may overwrite it now."""
        return self.snapshot is not None or self.seals > 0

    @property
    def age(self) -> tuple[int, ...]:
        """The least for what may go first: a state of an older life is void once a later one is there."""
        if self.sealed < 0:
            return (0,)
        return (2, self.sealed) if self.left is None else (1, *self.left)

    def forget(self) -> None:
        """Its state counts no more."""
        self.sealed, self.left, self.whole = NOTHING, None, False


class Occupancy:
    """The buffers of a pool by their content. No buffer has a fixed role; every method may be called from any thread.

    A buffer is *in use* while its snapshot is being filled, written or restored from. A sealed state survives the
    process; its buffer may be free, and the state then lasts until a newer one overwrites it.

    Args:
        files: name of each buffer's file in shared memory, empty without one; and the sealed state that an earlier
            process has left there, if there is one.
    """

    def __init__(self, files: Iterable[tuple[str, Left | None]]) -> None:
        self._buffers = [_Buffer(name, NOTHING if left is None else left.iteration, left) for name, left in files]
        self._lock = threading.RLock()
        self._replicated_at: int | None = None

    @property
    def sealed_iterations(self) -> list[int]:
        """Iterations of the states that survive the process."""
        with self._lock:
            return sorted(buffer.sealed for buffer in self._buffers if buffer.sealed >= 0)

    @property
    def whole_iterations(self) -> set[int]:
        """Iterations of the states that this process has sealed, and that hold no older expert."""
        with self._lock:
            return {buffer.sealed for buffer in self._buffers if buffer.whole}

    def take(self, iteration: int, spare: Collection[str] = (), *, keep_newest: bool = False) -> Snapshot | None:
        """Put an empty snapshot into a free buffer: an empty one, or else the one with the oldest state.

        Args:
            iteration: of the snapshot.
            spare: names of files whose buffers are used last.
            keep_newest: leave the newest sealed state alone; a kill during the copy then finds it.

        Returns:
            The snapshot; None where no buffer is free.
        """

        def worth(buffer: _Buffer) -> tuple[bool, bool, tuple[int, ...]]:
            elsewhere = buffer.sendings > 0 or buffer.sealed == self._replicated_at
            return buffer.name in spare, elsewhere, buffer.age

        with self._lock:
            buffer = min(self._free(keep_newest=keep_newest), key=worth, default=None)
            if buffer is None:
                return None
            buffer.forget()
            buffer.snapshot = Snapshot(iteration, _NO_VIEWS, place=self._buffers.index(buffer))
            return buffer.snapshot

    @property
    def is_free(self) -> bool:
        """Whether `take` would find a buffer with `keep_newest`."""
        with self._lock:
            return bool(self._free(keep_newest=True))

    def _free(self, *, keep_newest: bool) -> list[_Buffer]:
        sealed = (buffer for buffer in self._buffers if keep_newest and buffer.sealed >= 0)
        kept = max(sealed, key=lambda buffer: buffer.age, default=None)
        return [buffer for buffer in self._buffers if not buffer.is_used and buffer is not kept]

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot has a buffer."""
        return self._buffers[snapshot.place].snapshot is snapshot

    def _require(self, snapshot: Snapshot) -> None:
        if not self.holds(snapshot):
            raise ValueError(f"the snapshot of iteration {snapshot.iteration} holds no buffer of this pool")

    def release(self, snapshot: Snapshot) -> None:
        """Free the snapshot's buffer, where a sealed state stays until it is overwritten; ValueError: it has none."""
        with self._lock:
            self._require(snapshot)
            self._buffers[snapshot.place].snapshot = None

    def begin_seal(self, snapshot: Snapshot) -> None:
        """Until `end_seal` nobody overwrites its buffer, nor the one it takes parts from; ValueError: it has none."""
        with self._lock:
            self._require(snapshot)
            self._note_seal(snapshot, 1)

    def end_seal(self, snapshot: Snapshot, *, sealed: bool) -> None:
        """The snapshot, which may be released by now, is sealed, or sealing failed."""
        with self._lock:
            self._note_seal(snapshot, -1)
            if sealed:
                buffer = self._buffers[snapshot.place]
                buffer.sealed, buffer.left = snapshot.iteration, None
                buffer.whole |= all(at == snapshot.iteration for at in snapshot.taken_at.values())

    def _note_seal(self, snapshot: Snapshot, change: int) -> None:
        for place in {snapshot.place, snapshot.place if snapshot.source is None else snapshot.source}:
            self._buffers[place].seals += change

    def unseal_after(self, iteration: int) -> list[int]:
        """Buffers with sealed states of later iterations, which no longer count."""
        with self._lock:
            later = [index for index, buffer in enumerate(self._buffers) if buffer.sealed > iteration]
            for index in later:
                self._buffers[index].forget()
        return later

    def forget(self, snapshot: Snapshot) -> None:
        """The state in the snapshot's buffer counts no more."""
        with self._lock:
            self._buffers[snapshot.place].forget()

    def forget_earlier(self) -> None:
        """States of earlier processes count no more: none of the same iteration is kept in place of a new one."""
        with self._lock:
            for buffer in self._buffers:
                if buffer.left is not None:
                    buffer.forget()

    def begin_sending(self, name: str) -> bool:
        """Overwrite this file's state last while it is sent; False where another one is sent already."""
        with self._lock:
            buffer = next((one for one in self._buffers if one.name == name), None)
            if buffer is None or any(one.sendings for one in self._buffers if one is not buffer):
                return False
            buffer.sendings += 1
        return True

    def end_sending(self, name: str) -> None:
        """Undo `begin_sending`."""
        with self._lock:
            next(one for one in self._buffers if one.name == name).sendings -= 1

    def replicated(self, iteration: int | None) -> None:
        """Other machines have this state of every rank: with this rank's own it is overwritten last, until the next."""
        with self._lock:
            self._replicated_at = iteration
