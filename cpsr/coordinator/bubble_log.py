"""What the bubbles of a rank amount to, told to the journal while the run goes on."""

from collections.abc import Callable
from time import monotonic

from cpsr.checkpoint.paced import CopyAccount
from cpsr.coordinator.bubbles import BubbleAccount, Bubbles
from cpsr.journal import BubbleRow
from cpsr.record import Recorder

__all__ = ["BubbleLog"]

# A row covers a minute at least, and a thousandth of the life so far: a life of a month then has 5000 of each rank,
# some 100 bytes each, and not one for each of its checkpoints.
ROW_SECONDS_MIN = 60.0
ROW_LIFE_SHARE = 1e-3


class BubbleLog:
    """Writes one rank's rows, on its training thread: a lock, a subtraction and an append each.

    The first checkpoint of a life brings a row, however early it comes.

    Args:
        bubbles: the waits of the rank.
        copied: tells what the copies of all snapshots so far amounted to; None where they wait for nothing.
        recorder: the journal.
        rank: global rank.
    """

    def __init__(
        self, bubbles: Bubbles, copied: Callable[[], CopyAccount | None], recorder: Recorder, rank: int
    ) -> None:
        self._bubbles = bubbles
        self._copied = copied
        self._recorder = recorder
        self._rank = rank
        self._told, self._told_copied = bubbles.account(), copied()
        self._began = self._told_at = monotonic()
        self._due_seconds = 0.0

    def at_checkpoint(self, iteration: int) -> None:
        """A checkpoint is due: record what came since the last row, where that is long enough ago."""
        if monotonic() - self._told_at >= self._due_seconds:
            self.record(iteration)

    def record(self, iteration: int) -> None:
        """Record what came since the last row, where there was anything; else the next row tells of it too."""
        now = monotonic()
        account, copied = self._bubbles.account(), self._copied()
        if account.bubble_seconds == self._told.bubble_seconds and account.slices == self._told.slices:
            return
        self._recorder.bubbles(self._row(iteration, now, account, copied))
        self._told, self._told_copied, self._told_at = account, copied, now
        self._due_seconds = max(ROW_SECONDS_MIN, ROW_LIFE_SHARE * (now - self._began))

    def _row(self, iteration: int, now: float, account: BubbleAccount, copied: CopyAccount | None) -> BubbleRow:
        before, before_copied = self._told, self._told_copied or CopyAccount()
        return BubbleRow(
            life=self._recorder.life,
            rank=self._rank,
            iteration=iteration,
            iterations=account.iterations - before.iterations,
            seconds=now - self._told_at,
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
