"""A predictor's collectives over the ranks of a job; alone there is nobody to agree with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Ranks"]


class Ranks:
    """A single rank; `cpsr.learning.exchange.Exchange` is one of several. Every rank calls each equally often.

    Attributes:
        trains: whether this rank trains the network.
    """

    trains = True

    def agree(self, entries: Sequence[int]) -> Sequence[int]:
        """History entries that any rank must leave out, for those of this rank, so that all predict from the same."""
        return entries

    def reduce(self, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums of float64 matrices by operator over the ranks that give one."""
        return dict(products)

    def broadcast(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's numbers and tensors, on every rank; tensors have the same shapes everywhere."""
        return shared

    def is_mine(self, operator: str) -> bool:
        """Whether this rank learns from an operator; a replicated one has one rank that does."""
        return True

    def portion(self, operator: str) -> float:
        """Factor of this rank's products in their sum, less than 1 where other ranks own the same elements, too."""
        return 1.0
