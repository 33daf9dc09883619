"""Which ranks save when: with intervals of their own, some save between the checkpoints of all ranks."""

from typing import Literal

from cpsr.planner.plan import Plan

__all__ = ["Cadence", "Savers"]

# Who saves: every rank; this one but not all; others only.
Savers = Literal["all", "this", "others"]


class Cadence:
    """Counts base intervals since the last checkpoint of all ranks; equal on every rank, since all follow one plan.

    All ranks take part in the first checkpoint of a life or after a roll-back: their last one may be far behind.

    Args:
        rank: this process.
        iteration: start of the count.
    """

    def __init__(self, rank: int, iteration: int) -> None:
        self._rank = rank
        self.restart(iteration)

    def restart(self, iteration: int) -> None:
        """Count from here, with a checkpoint of all ranks next."""
        self._last = iteration
        self._count: int | None = None

    def is_due(self, plan: Plan, iteration: int) -> bool:
        """Whether any rank saves after this iteration."""
        return iteration - self._last >= plan.interval_iterations

    def take(self, plan: Plan, iteration: int) -> Savers:
        """A base interval has passed: which ranks save now."""
        self._last = iteration
        count = self._count = plan.largest_multiple if self._count is None else self._count + 1
        if count % plan.largest_multiple == 0:
            self._count = 0
            return "all"
        return "this" if count % plan.multiple_of(self._rank) == 0 else "others"
