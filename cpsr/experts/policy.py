"""Interface of the policies that choose operators for a snapshot."""

from collections.abc import Sequence
from typing import Protocol

from cpsr.engines.moe.operators import Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget

__all__ = ["Policy"]


class Policy(Protocol):
    """Chooses the operators of the next snapshot; equal on all ranks for equal arguments."""

    def select(self, step: int, popularity: Popularity, budget: Budget) -> Sequence[Operator]:
        """The operators whose whole state the snapshot holds, each once; none for a model without experts.

        Args:
            step: number of the snapshot, from 0, each one more than the last.
            popularity: of the experts, up to this step.
            budget: of this snapshot.
        """
