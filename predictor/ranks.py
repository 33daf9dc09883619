"""A predictor's collectives over the ranks of a job: agreement, sums, and division of replicated operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.predictor.assignment import Share

__all__ = ["ALONE", "Ranks"]


def _itself(value: Any) -> Any:
    return value


def _all_of_it(operator: str) -> float:
    return 1.0


@dataclass(frozen=True)
class Ranks:
    """Collectives of a predictor; every rank calls each equally often and in the same order.

    Attributes:
        agree: history entries that any rank must leave out, for those of this rank.
        reduce: sums of float64 matrices by operator over the ranks that give one.
        broadcast: rank 0's value.
        trains: whether this rank trains the network.
        share: this rank's share of the replicated operators; None: all.
        portion: factor of this rank's products of an operator in their sum, less than 1 where other ranks own the same
            elements and give theirs, too.

    Raises:
        ValueError: operators are shared, and the ranks cannot agree or sum.
    """

    agree: Callable[[Sequence[int]], Sequence[int]] = _itself
    reduce: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = _itself
    broadcast: Callable[[Any], Any] = _itself
    trains: bool = True
    share: Share | None = None
    portion: Callable[[str], float] = _all_of_it

    def __post_init__(self) -> None:
        if self.share is not None and _itself in (self.agree, self.reduce):
            raise ValueError("operators that ranks share need agree and reduce: give both")


ALONE = Ranks()
