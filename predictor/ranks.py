"""A predictor's collectives over the ranks of a job: agreement, sums, and who learns from a replicated operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ALONE", "Ranks"]


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Ranks:
    """Collectives of a predictor; every rank calls each equally often and in the same order.

    Attributes:
        agree: history entries that any rank must leave out, for those of this rank.
        reduce: sums of float64 matrices by operator over the ranks that give one.
        broadcast: rank 0's value.
        trains: whether this rank trains the network.
        is_mine: whether this rank learns from an operator; a replicated one has one rank that does.
        portion: factor of this rank's products of an operator in their sum, less than 1 where other ranks own the same
            elements and give theirs, too.
    """

    agree: Callable[[Sequence[int]], Sequence[int]] = _itself
    reduce: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = _itself
    broadcast: Callable[[Any], Any] = _itself
    trains: bool = True
    is_mine: Callable[[str], bool] = lambda operator: True
    portion: Callable[[str], float] = lambda operator: 1.0


ALONE = Ranks()
