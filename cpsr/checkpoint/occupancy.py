"""Which snapshot has which host buffer, and which buffer the next one may overwrite."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.state.shard import Shard

__all__ = ["Occupancy"]

_NO_VIEWS = Shard({})  # the copying thread makes the views of a snapshot


class Occupancy:
    """The buffers of a pool by their content. No buffer has a fixed role; every method may be called from any thread.

    A buffer is *in use* while its snapshot is being filled, written or restored from. A sealed state survives the
    process; its buffer may be free, and the state then lasts until a newer one overwrites it.

    Args:
        count: number of buffers.
        sealed: iteration of the sealed state by buffer, where an earlier process has left one.
        names: name of a buffer's file in shared memory by its index; empty without one.
    """

    def __init__(self, count: int, sealed: Mapping[int, int], names: Callable[[int], str]) -> None:
        self._count = count
        self._names = names
        self._lock = threading.Lock()
        self._in_use: dict[int, Snapshot] = {}
        self._sealing: Counter[int] = Counter()  # being hashed or read; their snapshots may be released meanwhile
        self._sealed = dict(sealed)
        self._earlier = set(sealed)  # of an earlier process
        self._whole: set[int] = set()  # of those that this process has sealed: every part is of the iteration itself
        self._sent: Counter[int] = Counter()  # being sent to other machines, so many
        self._replicated_at: int | None = None
        self._recovery: tuple[int, Snapshot] | None = None
        self._pins = 0

    @property
    def recovery(self) -> Snapshot | None:
        """The newest durable or restored state, as long as nothing has overwritten it."""
        recovery = self._recovery
        return None if recovery is None else recovery[1]

    @property
    def sealed_iterations(self) -> list[int]:
        """Iterations of the states that survive the process."""
        with self._lock:
            return sorted(self._sealed.values())

    @property
    def whole_iterations(self) -> set[int]:
        """Iterations of the states that this process has sealed, and that hold no older expert."""
        with self._lock:
            return {self._sealed[index] for index in self._whole}

    def take(
        self, iteration: int, spare: Collection[str] = (), *, keep_newest: bool = False
    ) -> tuple[int, Snapshot] | None:
        """Put an empty snapshot into a free buffer: an empty one, or else the one with the oldest state.

        Args:
            iteration: of the snapshot.
            spare: names of files whose buffers are used last.
            keep_newest: leave the newest sealed state alone; a kill during the copy then finds it.

        Returns:
            Index of the buffer, and the snapshot; None where no buffer is free.
        """
        with self._lock:
            free = self._free(keep_newest=keep_newest)
            if not free:
                return None
            kept = -1 if self._recovery is None else self._recovery[0]

            def worth(i: int) -> tuple[bool, bool, int, bool]:
                sealed = self._sealed.get(i, -1)
                return self._names(i) in spare, i in self._sent or sealed == self._replicated_at, sealed, i == kept

            index = min(free, key=worth)
            if index == kept:
                self._recovery = None
            self._forget(index)
            snapshot = self._in_use[index] = Snapshot(iteration, _NO_VIEWS)
        return index, snapshot

    @property
    def is_free(self) -> bool:
        """Whether `take` would find a buffer with `keep_newest`."""
        with self._lock:
            return bool(self._free(keep_newest=True))

    def _free(self, *, keep_newest: bool) -> list[int]:
        used = {*self._in_use, *self._sealing}
        if keep_newest and self._sealed:
            used.add(max(self._sealed, key=self._sealed.__getitem__))
        return [index for index in range(self._count) if index not in used]

    def index(self, snapshot: Snapshot) -> int:
        """Its buffer; ValueError where it has none."""
        for index, current in list(self._in_use.items()):
            if current is snapshot:
                return index
        raise ValueError(f"the snapshot of iteration {snapshot.iteration} holds no buffer of this pool")

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot has a buffer."""
        with self._lock:
            return any(current is snapshot for current in self._in_use.values())

    def release(self, snapshot: Snapshot) -> None:
        """Free the snapshot's buffer; a sealed state stays in it until it is overwritten.

        Raises:
            ValueError: it has none (released twice), or it is the pinned recovery state.
        """
        with self._lock:
            if self._recovery is not None and snapshot is self._recovery[1]:
                if self._pins:
                    raise ValueError(f"the recovery state (iteration {snapshot.iteration}) is pinned")
                self._in_use.pop(self._recovery[0], None)
                self._recovery = None
                return
            del self._in_use[self.index(snapshot)]

    def keep(self, snapshot: Snapshot) -> None:
        """Make this the recovery state and free its buffer; while another is pinned, only free its buffer."""
        with self._lock:
            if self._recovery is not None and snapshot is self._recovery[1]:
                return
            index = self.index(snapshot)
            if not self._pins:
                self._recovery = index, snapshot
            del self._in_use[index]

    def pin(self) -> None:
        """Keep the recovery state unchanged until `unpin`; calls nest."""
        with self._lock:
            self._pins += 1
            if self._recovery is not None:
                self._in_use[self._recovery[0]] = self._recovery[1]

    def unpin(self) -> None:
        """Undo one `pin`; ValueError without one."""
        with self._lock:
            if not self._pins:
                raise ValueError("unpin() without pin()")
            self._pins -= 1
            if not self._pins and self._recovery is not None:
                self._in_use.pop(self._recovery[0], None)

    def begin_seal(self, snapshot: Snapshot) -> int:
        """Its buffer, which nobody overwrites before `end_seal`, and neither the one that it reads."""
        with self._lock:
            index = self.index(snapshot)
            self._sealing += _read(index, snapshot)
        return index

    def end_seal(self, index: int, snapshot: Snapshot, *, sealed: bool) -> None:
        """The snapshot is sealed, or sealing failed."""
        with self._lock:
            self._sealing -= _read(index, snapshot)
            if sealed:
                self._sealed[index] = snapshot.iteration
                self._earlier.discard(index)
                if all(at == snapshot.iteration for at in snapshot.taken_at.values()):
                    self._whole.add(index)

    def unseal_after(self, iteration: int) -> list[int]:
        """Buffers with sealed states of later iterations, which no longer count."""
        with self._lock:
            later = [index for index, sealed in self._sealed.items() if sealed > iteration]
            for index in later:
                self._forget(index)
        return later

    def forget(self, index: int) -> None:
        """The state in this buffer counts no more."""
        with self._lock:
            self._forget(index)

    def forget_earlier(self) -> None:
        """States of earlier processes count no more: none of the same iteration is kept in place of a new one."""
        with self._lock:
            for index in list(self._earlier):
                self._forget(index)

    def _forget(self, index: int) -> None:
        self._sealed.pop(index, None)
        self._whole.discard(index)
        self._earlier.discard(index)

    def begin_sending(self, name: str) -> bool:
        """Overwrite this file's state last while it is sent; False where another one is sent already."""
        with self._lock:
            index = next((i for i in range(self._count) if self._names(i) == name), None)
            if index is None or (self._sent and index not in self._sent):
                return False
            self._sent[index] += 1
        return True

    def replicated(self, iteration: int | None) -> None:
        """Other machines have this state of every rank: with this rank's own it is overwritten last, until the next."""
        with self._lock:
            self._replicated_at = iteration

    def end_sending(self, name: str) -> None:
        """Undo `begin_sending`."""
        with self._lock:
            self._sent -= Counter(index for index in self._sent if self._names(index) == name)


def _read(index: int, snapshot: Snapshot) -> Counter[int]:
    """The buffers that must stay as they are while a snapshot is sealed."""
    return Counter([index] if snapshot.source is None else [index, snapshot.source])
