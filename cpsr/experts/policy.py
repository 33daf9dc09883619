"""What every way of choosing operators for a snapshot has in common."""

from collections.abc import Sequence
from typing import Protocol

from cpsr.experts.budget import Budget
from cpsr.experts.operators import Operator
from cpsr.experts.popularity import Popularity

__all__ = ["Policy"]


class Policy(Protocol):
    """Chooses what the next snapshot holds, alike on every rank that gives it the same."""

    def select(self, step: int, popularity: Popularity, budget: Budget) -> Sequence[Operator]:
        """The operators whose whole state the snapshot holds, each once; none for a model without experts.

        Args:
            step: number of the snapshot, from 0, each one more than the last.
            popularity: of the experts, up to this step.
            budget: of this snapshot.
        """
