"""Snapshots and windows in step: all ranks take the same snapshots, and send the same states to their peers."""

from collections.abc import Callable

from cpsr.checkpoint.occupancy import Occupancy

__all__ = ["Turns"]


class Turns:
    """Follows the ranks' votes on whether the next snapshot can be taken, and whether links to peers are free.

    A restart needs one iteration of which every rank has a state, in its own memory or on another machine. Ranks that
    skip snapshots by themselves, or send whichever is newest when a link is free, may have none in common. All ranks
    read the same vote before the same step, and so decide alike. Each rank keeps the newest state that the peers have
    in full until they have the next: if a machine is lost, the others restart from it.

    Args:
        occupancy: of the host buffers.
        sending: whether a replica of this rank's is under way.
        keep: called with the iteration of the newest state that the peers have in full, None where they have none.
        iteration: of the state that this life begins with.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        sending: Callable[[], bool],
        keep: Callable[[int | None], None],
        iteration: int = 0,
    ) -> None:
        self._occupancy = occupancy
        self._sending, self._keep = sending, keep
        self._cast_at = self._read_at = -1  # iterations of the votes
        self._blocked = self._busy = False
        self._sent_at = -2
        self._sent: tuple[int, int, Callable[[], bool]] | None = None
        keep(iteration)  # what the peers have of the life before

    def ballot(self) -> tuple[bool, bool]:
        """Whether this rank cannot take a snapshot now, and whether one of its links is busy, or soon will be."""
        # In this order: a state that is sealed meanwhile is seen on its link.
        busy = (self._sent is not None and self._sent[2]()) or self._sending()
        return not self._occupancy.is_free, busy

    def sent(self, iteration: int, pending: Callable[[], bool], first: int | None = None) -> None:
        """This one goes to the peers.

        Args:
            iteration: as given to `may_send`.
            pending: whether it has still to be sealed and offered.
            first: of a window, whose last iteration that is.
        """
        self._sent = iteration, iteration if first is None else first, pending

    def read(self, iteration: int, blocked: bool, busy: bool) -> None:
        """A ballot was cast after this iteration, and the result of the one before is here.

        Args:
            iteration: the finished one.
            blocked: whether any rank could take none.
            busy: whether any rank's link was busy.
        """
        self._read_at, self._cast_at = self._cast_at, iteration
        self._blocked, self._busy = blocked, busy
        if not busy and self._sent is not None and self._sent[0] == self._sent_at < self._read_at:
            self._keep(self._sent[1])

    def restart(self) -> None:
        """The run has gone back: votes of later iterations say nothing about those that come again."""
        self._cast_at = self._read_at = -1
        self._sent_at = -2
        self._keep(None)

    @property
    def may_take(self) -> bool:
        """Whether every rank could take a snapshot at the last vote."""
        return not self._blocked

    def may_send(self, iteration: int, *, always: bool = False) -> bool:
        """Whether the state of this iteration goes to the peers; every rank asks for the same iterations.

        Args:
            iteration: of the snapshot, or the last of a window.
            always: also if a link is busy; it then waits for its turn. For checkpoints, of which there are few.
        """
        if not always and (self._busy or self._sent_at >= self._read_at):
            return False
        self._sent_at = iteration
        return True
