"""Layers of experts, their load, and the strategies that draw them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert, ExpertLayer, ExpertParallel
from cpsr.engines.moe.token_counts import PerExpert, zeros
from cpsr.experts.policies import Budget, Load, Policy
from tests.experts.ledger import Ledger


def mixture(*experts: int, ranks: int = 1, rank: int = 0, expert_bytes: int = 10) -> tuple[ExpertLayer, ...]:
    """One layer for each number of experts."""
    group = ExpertParallel(ranks, rank)
    return tuple(ExpertLayer(f"blocks.{place}", count, expert_bytes, group) for place, count in enumerate(experts))


def load(*tokens: Sequence[float], ages: Sequence[Sequence[float]] | None = None) -> Load:
    """Unsaved tokens of each layer, which are its scores too."""
    unsaved = tuple(numpy.array(layer, dtype=numpy.float64) for layer in tokens)
    old = tuple(numpy.array(layer, dtype=numpy.float64) for layer in ages or [[0] * len(layer) for layer in tokens])
    return Load(unsaved, old)


def no_load(layers: Sequence[ExpertLayer]) -> Load:
    """No token has been routed."""
    return Load(zeros(layers), zeros(layers))


def most_at_risk_first(popularity: Load, layer: int) -> list[int]:
    """Indices of a layer's experts: most unsaved tokens first, then oldest snapshot, then lowest index."""
    tokens, ages = popularity.unsaved_tokens[layer], popularity.ages[layer]
    return sorted(range(len(tokens)), key=lambda index: (-tokens[index], -ages[index], index))


@st.composite
def mixtures(draw: st.DrawFn, layers: int = 5, experts_per_rank: int = 4) -> tuple[ExpertLayer, ...]:
    """Layers of different sizes, over one group of ranks."""
    ranks = draw(st.integers(1, 4))
    own = draw(st.lists(st.integers(1, experts_per_rank), min_size=1, max_size=layers))
    return mixture(*(ranks * count for count in own), ranks=ranks, rank=draw(st.integers(0, ranks - 1)))


@st.composite
def loads(draw: st.DrawFn, layers: Sequence[ExpertLayer]) -> Load:
    """Tokens with ties and zeros among them, and ages at which no expert is overdue."""

    def of(largest: int) -> PerExpert:
        return tuple(
            numpy.array(
                draw(st.lists(st.integers(0, largest), min_size=layer.experts, max_size=layer.experts)),
                dtype=numpy.float64,
            )
            for layer in layers
        )

    tokens = of(draw(st.sampled_from([0, 3, 1000])))
    return Load(tokens, of(5))


def selections(
    policy: Policy, layers: Sequence[ExpertLayer], tokens: Sequence[Sequence[float]], budget: Budget, steps: int
) -> list[set[Expert]]:
    """What a policy saves, snapshot by snapshot, where every iteration routes the same tokens."""
    ledger, found = Ledger(layers), []
    for step in range(steps):
        ledger.observe(tokens)
        chosen = set(policy.select(step, ledger.load, budget))
        ledger.saved(chosen)
        found.append(chosen)
    return found


def longest_wait(saved: Sequence[set[Expert]], layers: Sequence[ExpertLayer]) -> int:
    """The most snapshots of any expert from one that holds it to the next, the beginning and the end counted as such.

    Args:
        saved: of each snapshot.
        layers: of the model.
    """
    waits = []
    for expert in (Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)):
        saves = [-1, *(step for step, chosen in enumerate(saved) if expert in chosen), len(saved)]
        waits += [later - earlier for earlier, later in pairwise(saves)]
    return max(waits)
