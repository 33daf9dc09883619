"""Experts with the most unsaved tokens, equally many on every rank."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy
from numpy.typing import NDArray

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import Popularity, overdue
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget

__all__ = ["LoadAware"]

# Experts that are saved of each layer on each rank, `(layers, ranks)`.
Numbers = NDArray[numpy.int64]


class LoadAware:
    """The K experts of every layer with the most unsaved tokens, under the same limit for every rank.

    Experts are taken by unsaved tokens over all layers, while their layer needs more and their rank has room. A rank's
    room is its equal part of all saved experts, rounded up. The greedy choice may leave a layer short whose other
    experts are all on full ranks. Then other layers give up their least loaded experts there, along the shortest
    chain. So every layer saves K, and no rank more than its part.

    Before all of them, the oldest expert of each layer that is `overdue` is taken, older ones first: the paper's rule
    alone never saves an expert again to which nothing is routed, though the optimizer moves it all the same.

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
        late, others = self._in_order(popularity, wanted)
        numbers = numpy.zeros((len(self._layers), self._ranks), dtype=numpy.int64)
        self._take(late, numbers, wanted, limit)
        kept = numbers.copy()
        self._take(others, numbers, wanted, limit)
        owned = numpy.array([layer.experts_per_rank for layer in self._layers])
        for layer, want in enumerate(wanted):
            while numbers[layer].sum() < want:
                _make_room(numbers, kept, layer, owned, limit)
        return tuple(self._first([*late, *others], numbers))

    def _in_order(self, popularity: Popularity, wanted: Sequence[int]) -> tuple[list[Expert], list[Expert]]:
        """All experts in order of selection: overdue ones, then the others."""
        tokens, ages = popularity.at_risk(self._layers)
        marks = [
            overdue(old, -(-layer.experts // want))
            for layer, want, old in zip(self._layers, wanted, popularity.ages, strict=True)
        ]
        late = numpy.concatenate([*marks, numpy.zeros(0, dtype=bool)])
        experts = [Expert(place, index) for place, layer in enumerate(self._layers) for index in range(layer.experts)]
        order = numpy.lexsort((-ages, numpy.where(late, 0.0, -tokens), ~late))
        ordered = [experts[place] for place in order]
        return ordered[: late.sum()], ordered[late.sum() :]

    def _take(self, experts: Iterable[Expert], numbers: Numbers, wanted: Sequence[int], limit: int) -> None:
        """Take experts, in place, while their layer lacks some and their rank has room."""
        of_layer = [want - int(has) for want, has in zip(wanted, numbers.sum(axis=1), strict=True)]
        of_rank = [limit - int(has) for has in numbers.sum(axis=0)]
        for expert in experts:
            rank = self._layers[expert.layer].owner(expert.index)
            if of_layer[expert.layer] and of_rank[rank]:
                of_layer[expert.layer] -= 1
                of_rank[rank] -= 1
                numbers[expert.layer, rank] += 1

    def _first(self, ordered: Iterable[Expert], numbers: Numbers) -> list[Expert]:
        """So many of each layer and rank, the first of them, layer by layer."""
        left = numbers.tolist()
        found: list[Expert] = []
        for expert in ordered:
            rank = self._layers[expert.layer].owner(expert.index)
            if left[expert.layer][rank]:
                left[expert.layer][rank] -= 1
                found.append(expert)
        return sorted(found, key=lambda expert: expert.layer)


def _make_room(numbers: Numbers, kept: Numbers, short: int, owned: Numbers, limit: int) -> None:
    """One more expert for the layer `short`, in place: breadth first from it to a rank that has room.

    Args:
        numbers: `(layers, ranks)`.
        kept: of them, which no layer gives up.
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
            for other in map(int, numpy.flatnonzero(numbers[:, rank] > kept[:, rank])):
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
