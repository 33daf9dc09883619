"""Finished iterations, for the journal and for followers of the losses."""

from collections.abc import Callable, Sequence

from cpsr.journal import RankJournal, StepRow
from cpsr.state.losses import LossRecorder, Step

__all__ = ["StepLog"]

UNKNOWN_ITERATIONS = 20  # without a loss, before that is reported


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
        # Iterations of this life without a loss; None once one has come, or was reported missing.
        self._without_loss: int | None = 0 if journal.rank == 0 else None

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
            self._report_missing(steps)

    def _report_missing(self, steps: Sequence[Step]) -> None:
        """Say once, after the first iterations of a life, that the run knows no loss."""
        if self._without_loss is None:
            return
        self._without_loss += len(steps)
        if any(step.loss is not None for step in steps):
            self._without_loss = None
        elif self._without_loss >= UNKNOWN_ITERATIONS:
            self._journal.event(
                "no loss",
                f"no loss is known after {self._without_loss} iterations, because the model does not return it: the "
                "loss curve stays empty, and predicted states cannot be checked. Call recovery.log_loss(loss) before "
                "optimizer.step()",
                steps[-1].iteration,
            )
            self._without_loss = None
