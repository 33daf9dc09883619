"""Snapshots to host memory in step: all ranks take the same ones, and send the same ones to their peers."""

from collections.abc import Callable

from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool

__all__ = ["Turns"]


class Turns:
    """Follows the ranks' votes on whether the next snapshot can be taken, and whether links to peers are free.

    A restart needs one iteration of which every rank has a state, in its own memory or on another machine. Ranks that
    skip snapshots by themselves, or send whichever is newest when a link is free, may have none in common. All ranks
    read the same vote before the same step, and so decide alike. The pool keeps the newest state that the peers have in
    full until they have the next: if a machine is lost, the others restart from it.

    Args:
        pool: the host buffers.
        sending: whether a replica of this rank's is under way.
        iteration: of the state that this life begins with.
    """

    def __init__(self, pool: SnapshotPool, sending: Callable[[], bool], iteration: int = 0) -> None:
        self._pool = pool
        self._sending = sending
        self._cast_at = self._read_at = -1  # iterations of the votes
        self._blocked = self._busy = False
        self._sent_at = -2
        self._sent: Snapshot | None = None
        pool.occupancy.replicated(iteration)  # what the peers have of the life before

    def ballot(self) -> tuple[bool, bool]:
        """Whether this rank cannot take a snapshot now, and whether one of its links is busy, or soon will be."""
        sealed = None if self._sent is None else self._sent.sealed
        return not self._pool.occupancy.is_free, self._sending() or (sealed is not None and not sealed.done())

    def sent(self, snapshot: Snapshot) -> None:
        """This one goes to the peers once it is sealed."""
        self._sent = snapshot

    def read(self, iteration: int, blocked: bool, busy: bool) -> None:
        """A ballot was cast after this iteration, and the result of the one before is here.

        Args:
            iteration: the finished one.
            blocked: whether any rank could take none.
            busy: whether any rank's link was busy.
        """
        self._read_at, self._cast_at = self._cast_at, iteration
        self._blocked, self._busy = blocked, busy
        if not busy and self._sent is not None and self._sent.iteration == self._sent_at < self._read_at:
            self._pool.occupancy.replicated(self._sent_at)

    def restart(self) -> None:
        """The run has gone back: votes of later iterations say nothing about those that come again."""
        self._cast_at = self._read_at = -1
        self._sent_at = -2
        self._pool.occupancy.replicated(None)

    @property
    def may_take(self) -> bool:
        """Whether every rank could take a snapshot at the last vote."""
        return not self._blocked

    def may_send(self, iteration: int, *, always: bool = False) -> bool:
        """Whether the snapshot of this iteration goes to the peers; every rank asks for the same snapshots.

        Args:
            iteration: of the snapshot.
            always: also if a link is busy; it then waits for its turn. For checkpoints, of which there are few.
        """
        if not always and (self._busy or self._sent_at >= self._read_at):
            return False
        self._sent_at = iteration
        return True
