"""Experts with the most unsaved tokens, as many as the bytes hold, shared over layers by their risk."""

from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.operators import Expert
from cpsr.experts.popularity import Popularity

__all__ = ["Moetion", "allocation"]


class Moetion:
    """Of the experts that this rank owns, those with the most unsaved tokens.

    Local and remote snapshots are selected apart, each by its own link's budget and its own account of unsaved tokens.
    Given the same account, the smaller selection is part of the larger.

    As printed, the algorithm ranks all experts of the model against one budget. Since the budget is one rank's link and
    popular experts may lie on one rank, this one ranks a rank's own experts. With one rank that is the same.

    Source: moetion, Algorithm 1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Expert, ...]:
        """This rank's experts, layer by layer; at least one, at most all that it owns."""
        owned = [layer.owned for layer in self._layers]
        counts = allocation(
            [popularity.unsaved_tokens[place][own.start : own.stop].sum() for place, own in enumerate(owned)],
            [len(own) for own in owned],
            [layer.expert_bytes for layer in self._layers],
            budget,
        )
        chosen: list[Expert] = []
        for place, (own, count) in enumerate(zip(owned, counts, strict=True)):
            first = [index for index in popularity.most_at_risk_first(place) if index in own]
            chosen += (Expert(place, index) for index in first[:count])
        return tuple(chosen)


def allocation(
    risks: ArrayLike, experts: Sequence[int], expert_bytes: Sequence[int], budget: Budget
) -> NDArray[numpy.int64]:
    """How many experts of each layer a snapshot takes, `(layers,)`.

    With experts of equal size the sum is exactly what the budget holds, `min(floor(B / C), all)`, but at least one. No
    layer takes more than it has, nor less than `floor(R_i / sum R x S)` or all, which is the paper's formula. It
    leaves open who gets the rest and what becomes of places that a small layer cannot use: here each next place
    goes to the layer with the largest `R_i / (S_i + 1)` (highest averages, d'Hondt). A larger budget never takes from
    any layer, which giving the rest to the largest remainders could.

    Args:
        risks: R, unsaved tokens of each layer; equal ones, all zero too, are shared equally.
        experts: that there are in each layer.
        expert_bytes: of one expert of each layer; the first that does not fit ends the selection.
        budget: bytes, or K times the number of layers in experts.

    Source: moetion, section 4.3.
    """
    sizes = numpy.asarray(experts, dtype=numpy.int64)
    if not sizes.sum():
        return numpy.zeros(sizes.shape, dtype=numpy.int64)
    layer = numpy.repeat(numpy.arange(sizes.size), sizes)
    place = numpy.concatenate([numpy.arange(1, size + 1) for size in sizes])
    average = numpy.asarray(risks, dtype=numpy.float64)[layer] / place
    order = layer[numpy.lexsort((layer, place, -average))]
    if budget.experts_per_layer is not None:
        taken = min(budget.experts_per_layer * sizes.size, order.size)
    else:
        needed = numpy.cumsum(numpy.asarray(expert_bytes, dtype=numpy.float64)[order])
        taken = max(1, int(numpy.searchsorted(needed, budget.expert_bytes, side="right")))
    return numpy.bincount(order[:taken], minlength=sizes.size).astype(numpy.int64)
