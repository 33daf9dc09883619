"""Experts in turn."""

from collections.abc import Sequence

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget

__all__ = ["Sequential"]


class Sequential:
    """The next K experts of every layer, whatever their load.

    Layers are interleaved: each begins in the round where the layer before ends, and the round goes from rank to rank.
    So all ranks save equally many experts, to within one, and an unchanged K saves each expert once in `ceil(E / K)`
    snapshots. Where every rank owns one expert this is the paper's order. The paper goes through all experts of one
    rank before the next rank's. Where each rank owns several, one rank would then do the work of all.

    Source: pec, section 3.1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Expert, ...]:
        """K experts of each layer, or all of a smaller one, over all ranks."""
        count = budget.experts_in_each(self._layers)
        chosen: list[Expert] = []
        first = step * count
        for place, layer in enumerate(self._layers):
            taken = min(count, layer.experts)
            chosen += (Expert(place, layer.in_turn(first + offset)) for offset in range(taken))
            # A layer that is saved whole loads all ranks equally, and does not change the turn.
            if taken < layer.experts:
                first += count
        return tuple(chosen)
