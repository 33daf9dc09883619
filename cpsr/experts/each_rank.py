"""One selection of all ranks, of policies that select among one rank's own experts."""

from collections.abc import Sequence
from dataclasses import replace

from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer, ExpertParallel
from cpsr.experts.operators import Operator
from cpsr.experts.policy import Policy
from cpsr.experts.popularity import Popularity

__all__ = ["EachRank", "as_on_each_rank"]


class EachRank:
    """What every rank of the expert-parallel group selects, worked out by each of them: nobody has to tell.

    Args:
        policies: of each rank, in their order.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Operator, ...]:
        """All of them, rank by rank, each under the whole budget."""
        return tuple(operator for policy in self._policies for operator in policy.select(step, popularity, budget))


def as_on_each_rank(layers: Sequence[ExpertLayer]) -> list[tuple[ExpertLayer, ...]]:
    """The same layers as each rank of the expert-parallel group has them."""
    size = max((layer.expert_parallel.size for layer in layers), default=1)
    return [
        tuple(replace(layer, expert_parallel=ExpertParallel(size, rank)) for layer in layers) for rank in range(size)
    ]
