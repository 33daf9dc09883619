"""Finished iterations, for the journal and for followers of the losses."""

from collections.abc import Callable, Sequence

from cpsr.journal import RankJournal, StepRow
from cpsr.state.losses import LossRecorder, Step

__all__ = ["StepLog"]


class StepLog:
    """Passes iterations on once their losses have arrived from the device.

    Args:
        journal: of this rank.
        losses: of this rank.

    Attributes:
        followers: called with finished iterations, after the journal.
    """

    def __init__(self, journal: RankJournal, losses: LossRecorder) -> None:
        self._journal = journal
        self._losses = losses
        self.followers: list[Callable[[Sequence[Step]], None]] = []

    def end(self, step: Step) -> None:
        """One iteration is complete."""
        self._forward(self._losses.end_iteration(step))

    def flush(self, *, wait: bool) -> None:
        """Forward the losses that have arrived; at the end of a life wait for the others."""
        self._forward(self._losses.flush(wait))

    def _forward(self, steps: Sequence[Step]) -> None:
        if steps:
            self._journal.record(*(StepRow(life=self._journal.life, **vars(step)) for step in steps))
            for follower in self.followers:
                follower(steps)
