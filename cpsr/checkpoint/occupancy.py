"""Which snapshot has which host buffer, and which buffer the next one may overwrite."""

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory_states import Left
from cpsr.ranks.held import NONE, Held
from cpsr.state.shard import Shard

__all__ = ["Occupancy"]

_NO_VIEWS = Shard({})  # the copying thread makes the views of a snapshot
NOTHING = -1
# In the way of overwriting a state: nothing; it may become common; every rank holds it.
FREE, OPEN, COMMON = range(3)
COPIED, SEALED = "copied", "sealed"


@dataclass(eq=False)
class _Buffer:
    """What is known of one buffer.

    Attributes:
        name: of its file in shared memory; empty without one.
        sealed: iteration of its sealed state, or `NOTHING`.
        left: that state, if an earlier process has sealed it.
        branch: how often the life had gone back when this process has sealed it.
        whole: whether this process has, and it holds every part, of the iteration itself.
        snapshot: that has it.
        seals: how many are under way that write or read it; their snapshots may be released meanwhile.
    """

    name: str
    sealed: int
    left: Left | None
    branch: int = 0
    whole: bool = False
    snapshot: Snapshot | None = None
    seals: int = 0

    @property
    def is_used(self) -> bool:
        """Whether nothing may overwrite it now."""
        return self.snapshot is not None or self.seals > 0

    @property
    def age(self) -> tuple[int, ...]:
        """The least for what may go first: a state of an older life is void once a later one is there."""
        if self.sealed < 0:
            return (0,)
        return (2, self.branch, self.sealed) if self.left is None else (1, *self.left)

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
        self._kept: Collection[int] = ()
        self._branch, self._passed = 0, NONE
        self._open: dict[Snapshot, set[str]] = {}  # what each one that is due still waits for
        self._tell: Callable[[Held], None] = lambda held: None
        self._ask: Callable[[int], Held] | None = None
        self._ordered: Callable[[int], int] = lambda branch: NONE

    def join(
        self,
        tell: Callable[[Held], None],
        ask: Callable[[int], Held],
        ordered: Callable[[int], int] = lambda branch: NONE,
    ) -> None:
        """Follow the other ranks, so that all keep a snapshot of one iteration; see `ranks.held`.

        Args:
            tell: says what this rank holds; never called twice at once.
            ask: what all ranks hold of a branch.
            ordered: iteration of the one that all send to other machines, or `NONE`.
        """
        with self._lock:
            self._tell, self._ask, self._ordered = tell, ask, ordered
            tell(self._held())

    def _held(self) -> Held:
        passed = min((snapshot.iteration - 1 for snapshot in self._open), default=self._passed)
        unsure = {snapshot.iteration for snapshot in self._open}
        counting = [buffer.sealed for buffer in self._buffers if self._counts(buffer) and buffer.sealed not in unsure]
        return Held.of(self._branch, passed, counting)

    def _counts(self, buffer: _Buffer) -> bool:
        """Whether a restart would take its state, as far as this rank knows."""
        return buffer.sealed >= 0 and buffer.left is None and buffer.branch == self._branch

    @property
    def common(self) -> int:
        """The newest iteration of which all ranks hold a snapshot, as far as this one knows, or `NONE`."""
        with self._lock:
            return (self._held() if self._ask is None else self._ask(self._branch)).newest

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

    def take(
        self, iteration: int, spare: Collection[str] = (), *, keep_newest: bool = False, due: bool = False
    ) -> Snapshot | None:
        """Put an empty snapshot into a free buffer: an empty one, or else the one with the oldest state.

        Args:
            iteration: of the snapshot.
            spare: names of files whose buffers are used last.
            keep_newest: leave alone the newest sealed state that all ranks hold, and newer ones that may become that; a
                kill then finds it. Otherwise these go last.
            due: all ranks take one of this iteration, or skip it; then call `copied` once it is complete.

        Returns:
            The snapshot; None where no buffer is free: this rank skips it.
        """
        with self._lock:
            standing = self._standing()
            replicated = {*self._kept, self._ordered(self._branch)} - {NONE}

            def worth(buffer: _Buffer) -> tuple[bool, int, bool, tuple[int, ...]]:
                stands = standing.get(buffer, FREE)
                age = (-buffer.sealed,) if stands == OPEN else buffer.age  # the oldest of these is common elsewhere
                return buffer.name in spare, stands, buffer.sealed in replicated, age

            kept = standing if keep_newest else ()
            free = [buffer for buffer in self._buffers if not buffer.is_used and buffer not in kept]
            buffer = min(free, key=worth, default=None)
            is_replicated = buffer is not None and buffer.sealed in replicated
            if is_replicated and OPEN in {standing[one] for one in kept}:
                buffer = None  # another one is free once the other ranks have sealed
            if buffer is None:
                if due:
                    self.skip(iteration)
                return None
            buffer.forget()
            buffer.snapshot = Snapshot(iteration, _NO_VIEWS, place=self._buffers.index(buffer))
            if due:
                self._passed = max(self._passed, iteration)
                self._open[buffer.snapshot] = {COPIED, SEALED}
            self._tell(self._held())
            return buffer.snapshot

    def _standing(self) -> dict[_Buffer, int]:
        """The buffers whose states a restart may need, and what stands in the way of each."""
        if self._ask is None:
            sealed = [buffer for buffer in self._buffers if buffer.sealed >= 0]
            return {max(sealed, key=lambda buffer: buffer.age): COMMON} if sealed else {}
        held = self._ask(self._branch)
        needed = [one for one in self._buffers if self._counts(one) and held.must_stay(one.sealed)]
        return {buffer: COMMON if buffer.sealed == held.newest else OPEN for buffer in needed}

    def skip(self, iteration: int) -> None:
        """This rank takes no snapshot of this iteration, where one is due; or it begins with it."""
        with self._lock:
            self._passed = max(self._passed, iteration)
            self._tell(self._held())

    def copied(self, snapshot: Snapshot) -> None:
        """The copy of one that is due is complete, and will not be taken back."""
        self._came(snapshot, COPIED)

    def _came(self, snapshot: Snapshot, what: str) -> None:
        with self._lock:
            awaited = self._open.get(snapshot, set())
            awaited.discard(what)
            if not awaited:
                self._open.pop(snapshot, None)
            self._tell(self._held())

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
            if COPIED in self._open.get(snapshot, ()):  # given up
                self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        self._open.pop(snapshot, None)
        self._tell(self._held())

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
                buffer.sealed, buffer.left, buffer.branch = snapshot.iteration, None, self._branch
                of_now = all(at == snapshot.iteration for at in snapshot.taken_at.values())
                buffer.whole |= of_now and not snapshot.lacking
                self._came(snapshot, SEALED)
            else:
                self._drop(snapshot)

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
            self._drop(snapshot)

    def rewind(self, iteration: int) -> None:
        """The run has gone back to this iteration: what was sealed before does not count any more."""
        with self._lock:
            self._branch, self._passed = self._branch + 1, iteration
            self._open.clear()
            self._tell(self._held())

    def forget_earlier(self) -> None:
        """States of earlier processes count no more: none of the same iteration is kept in place of a new one."""
        with self._lock:
            for buffer in self._buffers:
                if buffer.left is not None:
                    buffer.forget()

    def keep(self, iterations: Collection[int]) -> None:
        """Overwrite states of these last: after the loss of a machine they go with those that others have."""
        with self._lock:
            self._kept = iterations
