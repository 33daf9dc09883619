"""Combines policies that each select among one rank's own experts."""

from collections.abc import Sequence
from dataclasses import replace

from cpsr.engines.moe.layers import ExpertLayer, ExpertParallel
from cpsr.engines.moe.operators import Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.policy import Policy

__all__ = ["EachRank", "as_on_each_rank"]


class EachRank:
    """Selection of all ranks of the expert-parallel group, computed on each rank without communication.

    Args:
        policies: of each rank, in their order.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Operator, ...]:
        """The selections rank by rank, each under the whole budget."""
        return tuple(operator for policy in self._policies for operator in policy.select(step, popularity, budget))


def as_on_each_rank(layers: Sequence[ExpertLayer]) -> list[tuple[ExpertLayer, ...]]:
    """The layers of each rank of the expert-parallel group."""
    size = max((layer.expert_parallel.size for layer in layers), default=1)
    return [
        tuple(replace(layer, expert_parallel=ExpertParallel(size, rank)) for layer in layers) for rank in range(size)
    ]
