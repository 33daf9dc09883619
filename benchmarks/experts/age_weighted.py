"""Unsaved tokens weighed by how long they have been unsaved."""

from collections.abc import Sequence
from dataclasses import replace

from cpsr.engines.moe.operators import Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.policy import Policy

__all__ = ["AgeWeighted"]


class AgeWeighted:
    """Another policy, given each expert's unsaved tokens times its age.

    A policy that saves the experts with the most unsaved tokens saves popular ones over and over where places are few.
    The tokens of the many others pile up. An expert with r tokens an iteration that is saved every a-th time has
    `r (a - 1) / 2` at risk on average. For a given number of places the sum is least with a proportional to
    `1 / sqrt(r)`. Then `r a^2`, tokens times age, is equal for all when their turn comes.

    None of the papers does this; their own rule is the policy without it.

    Args:
        policy: that goes by unsaved tokens.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def select(self, step: int, popularity: Popularity, budget: Budget) -> Sequence[Operator]:
        """What the other policy selects; an expert saved in the last snapshot has age 1 by now."""
        weighed = tuple(
            tokens * (age + 1) for tokens, age in zip(popularity.unsaved_tokens, popularity.ages, strict=True)
        )
        return self._policy.select(step, replace(popularity, unsaved_tokens=weighed), budget)
