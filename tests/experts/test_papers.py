"""A figure of MOETION, and adaptive sharding: everything once, within its bound of the best."""

from itertools import product

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import ExpertLayer
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import Budget, Policy, Sequential
from cpsr.experts.sharding import adaptive_sharding
from tests.engines.moe.mixtures import mixture
from tests.experts.ledger import Ledger

# moetion, section 7.2: percent of the tokens that each of 64 experts gets.
TOKENS_OF_64 = [80 / 6] * 6 + [20 / 58] * 58


def at_risk(policy: Policy, layers: tuple[ExpertLayer, ...], saved_per_layer: int) -> float:
    """Mean unsaved tokens over 200 iterations with a snapshot after each."""
    generator = numpy.random.default_rng(0)
    popular = [generator.permutation(TOKENS_OF_64) / 100 for _ in layers]
    ledger, risks = Ledger(layers), []
    for step in range(200):
        ledger.observe([generator.multinomial(4096, share) for share in popular])
        chosen = policy.select(step, ledger.load, Budget(experts_per_layer=saved_per_layer))
        ledger.saved(chosen)
        risks.append(sum(layer.sum() for layer in ledger.tokens))
    return float(numpy.mean(risks))


@pytest.mark.parametrize("saved_per_layer", [16, 25])
def test_by_popularity_half_as_many_tokens_are_at_risk_as_in_turn(saved_per_layer: int) -> None:
    """moetion, Figure 11, with the "25% to 40%" of the experts that it saves (section 4.1), and its spread of tokens.

    It takes that many. With an eighth of them, the popular experts leave little for the others: three quarters of the
    tokens at risk under round-robin still are.
    """
    layers = mixture(64, 64, 64)
    in_turn = at_risk(Sequential(layers), layers, saved_per_layer)
    assert at_risk(Moetion(layers), layers, saved_per_layer) <= in_turn / 2


PARTS = st.lists(st.integers(0, 50), max_size=6).map(
    lambda sizes: {f"part{place}": size for place, size in enumerate(sizes)}
)
OWN_EXPERTS = st.lists(st.integers(0, 60), min_size=1, max_size=3)


def best(parts: dict[str, int], experts: list[int]) -> int:
    """The smallest largest sum of a rank, of all ways there are."""
    found = []
    for ranks in product(range(len(experts)), repeat=len(parts)):
        sums = list(experts)
        for rank, size in zip(ranks, parts.values(), strict=True):
            sums[rank] += size
        found.append(max(sums))
    return min(found)


def busiest(parts: dict[str, int], experts: list[int]) -> int:
    saved = [sum(parts[name] for name in own) for own in adaptive_sharding(parts, experts)]
    return max(map(sum, zip(saved, experts, strict=True)))


def test_ranks_without_experts_take_the_large_parts() -> None:
    found = adaptive_sharding({"norm": 1, "head": 50, "embedding": 50, "attention": 20}, [60, 0, 0])
    assert found == ((), ("head", "attention"), ("embedding", "norm"))


@given(PARTS, OWN_EXPERTS)
def test_every_part_is_saved_once(parts: dict[str, int], experts: list[int]) -> None:
    assert sorted(name for own in adaptive_sharding(parts, experts) for name in own) == sorted(parts)


@given(PARTS, OWN_EXPERTS)
def test_it_is_within_its_bound_of_the_best(parts: dict[str, int], experts: list[int]) -> None:
    ranks = len(experts)
    assert busiest(parts, experts) <= (3 / 2 - 1 / (2 * ranks)) * best(parts, experts)
    alike = [experts[0]] * ranks
    assert busiest(parts, alike) <= (4 / 3 - 1 / (3 * ranks)) * best(parts, alike) + 1e-9
