"""Experts with the most unsaved tokens, equally many on every rank."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy
from numpy.typing import NDArray

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.operators import Expert
from cpsr.experts.popularity import Popularity

__all__ = ["LoadAware"]

# Experts that are saved of each layer on each rank, `(layers, ranks)`.
Numbers = NDArray[numpy.int64]


class LoadAware:
    """The K experts of every layer with the most unsaved tokens, under the same limit for every rank.

    Experts are taken by unsaved tokens, over all layers, while their layer lacks some and their rank has room; a
    rank's room is its equal part of all that are saved, rounded up. Taking greedily may leave a layer short whose other
    experts are all on full ranks: then layers with experts elsewhere give up their least loaded ones there, along
    the shortest chain. So every layer always saves K and no rank more than its part.

    Args:
        layers: of the model; all over the same expert-parallel ranks.

    Raises:
        ConfigError: the layers are spread over groups of different sizes.

    Source: pec, section 3.1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        sizes = {layer.expert_parallel.size for layer in layers}
        if len(sizes) > 1:
            raise ConfigError(
                f"load-aware selection balances one expert-parallel group, and the layers have groups of {sizes} "
                "ranks: choose one size for all layers, or sequential selection"
            )
        self._layers = layers
        self._ranks = max(sizes, default=1)

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Expert, ...]:
        """K experts of each layer, or all of a smaller one, over all ranks."""
        count = budget.experts_in_each(self._layers)
        wanted = [min(count, layer.experts) for layer in self._layers]
        limit = -(-sum(wanted) // self._ranks)
        numbers = self._greedy(popularity, wanted, limit)
        owned = numpy.array([layer.experts_per_rank for layer in self._layers])
        for layer, want in enumerate(wanted):
            while numbers[layer].sum() < want:
                _make_room(numbers, layer, owned, limit)
        return tuple(self._experts(popularity, numbers))

    def _greedy(self, popularity: Popularity, wanted: Sequence[int], limit: int) -> Numbers:
        numbers = numpy.zeros((len(self._layers), self._ranks), dtype=numpy.int64)
        of_layer, of_rank = list(wanted), [limit] * self._ranks
        for layer, rank in self._by_risk(popularity):
            if of_layer[layer] and of_rank[rank]:
                of_layer[layer] -= 1
                of_rank[rank] -= 1
                numbers[layer, rank] += 1
        return numbers

    def _by_risk(self, popularity: Popularity) -> list[tuple[int, int]]:
        """Layer and rank of each expert, in the order in which experts are taken."""
        places = [
            (place, layer.owner(index)) for place, layer in enumerate(self._layers) for index in range(layer.experts)
        ]
        # The empty array is for a model without layers.
        tokens = numpy.concatenate([*popularity.unsaved_tokens, []])
        ages = numpy.concatenate([*popularity.ages, []])
        return [places[expert] for expert in numpy.lexsort((-ages, -tokens))]

    def _experts(self, popularity: Popularity, numbers: Numbers) -> Iterator[Expert]:
        """So many of each layer and rank, those at most risk."""
        for place, layer in enumerate(self._layers):
            left = numbers[place].copy()
            for index in popularity.most_at_risk_first(place):
                rank = layer.owner(index)
                if left[rank]:
                    left[rank] -= 1
                    yield Expert(place, index)


def _make_room(numbers: Numbers, short: int, owned: Numbers, limit: int) -> None:
    """One more expert for the layer `short`, in place: breadth first from it to a rank that has room.

    Args:
        numbers: `(layers, ranks)`.
        short: a layer that lacks an expert.
        owned: experts that each rank has of each layer, `(layers,)`.
        limit: of each rank.
    """
    load = numbers.sum(axis=0)
    # Layer -> (the layer that takes its place, the rank on which it does).
    gives: dict[int, tuple[int, int] | None] = {short: None}
    queue = deque([short])
    while queue:
        layer = queue.popleft()
        for rank in map(int, numpy.flatnonzero(numbers[layer] < owned[layer])):
            if load[rank] < limit:
                _shift(numbers, gives, layer, rank)
                return
            for other in map(int, numpy.flatnonzero(numbers[:, rank])):
                if other not in gives:
                    gives[other] = (layer, rank)
                    queue.append(other)
    raise AssertionError("equal parts of what all layers want always have room for it")


def _shift(numbers: Numbers, gives: dict[int, tuple[int, int] | None], layer: int, rank: int) -> None:
    """`layer` takes one more on `rank`, and the chain back to the layer that was short moves up."""
    numbers[layer, rank] += 1
    while (given := gives[layer]) is not None:
        taker, place = given
        numbers[layer, place] -= 1
        numbers[taker, place] += 1
        layer = taker
