"""Experts with the most unsaved tokens, as many as the bytes hold, shared over layers by their risk."""

from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.experts.policies import Budget, Load, overdue

__all__ = ["Moetion", "allocation"]


class Moetion:
    """Of the experts that a rank owns, those with the most unsaved tokens.

    Local and remote snapshots are selected apart, each by its own link's budget and its own account of unsaved tokens.
    Given the same account, the smaller selection is part of the larger, as long as nothing is `overdue`.

    As printed, the algorithm ranks all experts of the model against one budget. Since the budget is one rank's link and
    popular experts may lie on one rank, this one ranks each rank's own experts, for all ranks without communication.
    With one rank that is the same.

    The paper's rule alone never saves an expert again to which nothing is routed. Here the oldest of a layer goes first
    when it is `overdue`, in place of others: of its own layer, or of another one where its own has no place. A layer's
    round follows from the places that it has now, at least one; where there are fewer places than layers, from one
    place as often as each layer can have one.

    Args:
        layers: of the model.

    Source: moetion, Algorithm 1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = tuple(layers)
        self._experts = [Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)]
        self._sizes = [len(layer.owned) for layer in layers]
        # Where each layer's experts begin: among all, and among a rank's own.
        first = _starts([layer.experts for layer in layers])
        self._starts = _starts(self._sizes)
        size = max((layer.expert_parallel.size for layer in layers), default=1)
        each = [(begin, layer.experts_per_rank) for begin, layer in zip(first, layers, strict=True)]
        self._own = numpy.array(
            [[begin + rank * count + index for begin, count in each for index in range(count)] for rank in range(size)]
        )

    def select(self, step: int, load: Load, budget: Budget) -> tuple[Expert, ...]:
        """Experts rank by rank and layer by layer; each rank has the whole budget, at least one and at most all."""
        all_tokens, all_ages = load.at_risk(self._layers)
        if not self._layers:
            return ()
        # All arrays from here on: (ranks, experts of a rank) or (ranks, layers).
        tokens, ages = all_tokens[self._own], all_ages[self._own]
        late = numpy.zeros(ages.shape, dtype=bool)
        order, taken, counts = self._selected(tokens, ages, late, budget)
        left = numpy.ones(ages.shape, dtype=bool)
        numpy.put_along_axis(left, order, ~taken, axis=1)
        late = self._late(ages, counts) & left
        if late.any():
            order, taken, counts = self._selected(tokens, ages, late, budget)
        return tuple(self._experts[place] for place in numpy.take_along_axis(self._own, order, axis=1)[taken].tolist())

    def _selected(
        self, tokens: NDArray[numpy.float64], ages: NDArray[numpy.float64], late: NDArray[numpy.bool_], budget: Budget
    ) -> tuple[NDArray[numpy.int64], NDArray[numpy.bool_], NDArray[numpy.int64]]:
        """A rank's experts with the first of each layer in front, which of these are taken, and how many of a layer."""
        layer = numpy.broadcast_to(numpy.repeat(numpy.arange(len(self._layers)), self._sizes), tokens.shape)
        counts = allocation(
            numpy.add.reduceat(tokens, self._starts, axis=1),
            self._sizes,
            [layer.expert_bytes for layer in self._layers],
            budget,
            numpy.maximum.reduceat(ages, self._starts, axis=1),
            numpy.logical_or.reduceat(late, self._starts, axis=1),
        )
        order = numpy.lexsort((-ages, -tokens, ~late, layer))
        return order, _places(self._sizes) <= numpy.repeat(counts, self._sizes, axis=1), counts

    def _late(self, ages: NDArray[numpy.float64], counts: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
        places = counts.sum(axis=1, keepdims=True)
        rounds = -(-numpy.asarray(self._sizes) // numpy.maximum(counts, 1)) * -(-len(self._layers) // places)
        of_layers = numpy.split(ages, self._starts[1:], axis=1)
        return numpy.concatenate([overdue(old, rounds[:, place]) for place, old in enumerate(of_layers)], axis=1)


def allocation(
    risks: ArrayLike,
    experts: Sequence[int],
    expert_bytes: Sequence[int],
    budget: Budget,
    ages: ArrayLike = 0.0,
    late: ArrayLike = False,
) -> NDArray[numpy.int64]:
    """How many experts of each layer a snapshot takes, `(layers,)`, or of each rank, `(ranks, layers)`.

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
        ages: of the oldest expert of each layer, shaped as the risks: where averages are equal and layers have equally
            many places, the older ones go first.
        late: layers that get their first place before all others, shaped as the risks; the older ones first.

    Source: moetion, section 4.3.
    """
    risks = numpy.asarray(risks, dtype=numpy.float64)
    if not sum(experts):
        return numpy.zeros(risks.shape, dtype=numpy.int64)
    layer, place = numpy.repeat(numpy.arange(len(experts)), experts), _places(experts)
    age = numpy.broadcast_to(ages, risks.shape)[..., layer]
    before_all = numpy.broadcast_to(late, risks.shape)[..., layer] & (place == 1)
    keys = (layer, -age, place, -risks[..., layer] / place, numpy.where(before_all, -age, 1.0))
    order = layer[numpy.lexsort(numpy.broadcast_arrays(*keys))]
    if budget.experts_per_layer is not None:
        fits = numpy.broadcast_to(numpy.arange(layer.size) < budget.experts_per_layer * len(experts), order.shape)
    else:
        needed = numpy.cumsum(numpy.asarray(expert_bytes, dtype=numpy.float64)[order], axis=-1)
        fits = needed <= budget.snapshot_bytes
        fits[..., 0] = True
    ranks = numpy.arange(risks.size // len(experts)).reshape(*risks.shape[:-1], 1)
    taken = (ranks * len(experts) + order)[fits]
    return numpy.bincount(taken, minlength=risks.size).reshape(risks.shape).astype(numpy.int64)


def _starts(sizes: Sequence[int]) -> NDArray[numpy.int64]:
    return numpy.cumsum([0, *sizes])[:-1]


def _places(sizes: Sequence[int]) -> NDArray[numpy.int64]:
    """1, 2, ... for each layer."""
    return numpy.arange(1, sum(sizes) + 1) - numpy.repeat(_starts(sizes), sizes)
