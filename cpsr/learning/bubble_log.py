"""Records the bubbles of a rank in the journal during the run."""

from collections.abc import Callable
from time import monotonic

from cpsr.checkpoint.paced import CopyAccount
from cpsr.journal import BubbleRow, RankJournal
from cpsr.learning.bubbles import BubbleAccount, Bubbles

__all__ = ["BubbleLog"]

# A row covers at least a minute, and a thousandth of the life so far. A life of a month then has 5000 rows per rank, of
# some 100 bytes each, instead of one per checkpoint.
ROW_SECONDS_MIN = 60.0
ROW_LIFE_SHARE = 1e-3


class BubbleLog:
    """Writes one rank's rows, on its training thread: a lock, a subtraction and an append each.

    The first checkpoint of a life brings a row, however early it comes.

    Args:
        bubbles: the waits of the rank.
        copied: returns the account of all snapshot copies so far; None where they wait for nothing.
        journal: of this rank.
    """

    def __init__(self, bubbles: Bubbles, copied: Callable[[], CopyAccount | None], journal: RankJournal) -> None:
        self._bubbles = bubbles
        self._copied = copied
        self._journal = journal
        self._recorded, self._recorded_copied = bubbles.account(), copied()
        self._began = self._recorded_at = monotonic()
        self._due_seconds = 0.0

    def at_checkpoint(self, iteration: int) -> None:
        """Record a row at a checkpoint, if the last one is long enough ago."""
        if monotonic() - self._recorded_at >= self._due_seconds:
            self.record(iteration)

    def record(self, iteration: int) -> None:
        """Record what happened since the last row; if nothing did, the next row covers this time too."""
        now = monotonic()
        account, copied = self._bubbles.account(), self._copied()
        if account.bubble_seconds == self._recorded.bubble_seconds and account.slices == self._recorded.slices:
            return
        self._journal.record(self._row(iteration, now, account, copied))
        self._recorded, self._recorded_copied, self._recorded_at = account, copied, now
        self._due_seconds = max(ROW_SECONDS_MIN, ROW_LIFE_SHARE * (now - self._began))

    def _row(self, iteration: int, now: float, account: BubbleAccount, copied: CopyAccount | None) -> BubbleRow:
        before, before_copied = self._recorded, self._recorded_copied or CopyAccount()
        return BubbleRow(
            life=self._journal.life,
            rank=self._journal.rank,
            iteration=iteration,
            iterations=account.iterations - before.iterations,
            seconds=now - self._recorded_at,
            bubble_seconds=account.bubble_seconds - before.bubble_seconds,
            used_seconds=account.used_seconds - before.used_seconds,
            late_seconds=account.late_seconds - before.late_seconds,
            outside_seconds=account.outside_seconds - before.outside_seconds,
            slices=account.slices - before.slices,
            late_slices=account.late_slices - before.late_slices,
            copied_seconds=None if copied is None else copied.in_waits_seconds - before_copied.in_waits_seconds,
            copied_bytes=None if copied is None else copied.in_waits_bytes - before_copied.in_waits_bytes,
            copied_beside_bytes=None if copied is None else copied.other_bytes - before_copied.other_bytes,
        )
