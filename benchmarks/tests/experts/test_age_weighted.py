"""Selection by tokens times age: what it changes, and that it leaves fewer tokens at risk."""

from itertools import pairwise

import numpy
import pytest

from cpsr.benchmarks.experts.age_weighted import AgeWeighted
from cpsr.benchmarks.experts.unsaved import UnsavedTokens
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.moetion import Moetion
from cpsr.experts.policy import Policy
from tests.engines.moe.mixtures import load, mixture

LAYERS = mixture(16)
# Tokens an iteration: powers of four, so that the best ages are powers of two.
RATES = [4.0 ** (index // 4) for index in range(16)]
STEPS = 4000


def run(policy: Policy) -> tuple[float, list[int]]:
    """Mean tokens at risk with one expert a snapshot, and how often each was saved."""
    ledger, risks, saved = UnsavedTokens(LAYERS), [], [0] * len(RATES)
    for step in range(STEPS):
        ledger.observe([RATES])
        popularity = Popularity(ledger.tokens, ledger.tokens, ledger.ages)
        (chosen,) = policy.select(step, popularity, Budget(experts_per_layer=1))
        assert isinstance(chosen, Expert)
        ledger.saved([chosen])
        saved[chosen.index] += 1
        risks.append(ledger.tokens[0].sum())
    return float(numpy.mean(risks)), saved


def test_the_longer_unsaved_goes_first() -> None:
    popularity = load([10, 7, 0], ages=[[0, 1, 9]])
    budget = Budget(experts_per_layer=1)
    assert Moetion(mixture(3)).select(0, popularity, budget) == (Expert(0, 0),)
    assert AgeWeighted(Moetion(mixture(3))).select(0, popularity, budget) == (Expert(0, 1),)


def test_an_expert_with_four_times_the_tokens_is_saved_twice_as_often() -> None:
    _, saved = run(AgeWeighted(Moetion(LAYERS)))
    often = [sum(saved[first : first + 4]) for first in (0, 4, 8, 12)]
    for few, many in pairwise(often):
        assert many / few == pytest.approx(2, rel=0.1)


def test_close_to_the_least_that_can_be_at_risk() -> None:
    """The least, with ages that need not be whole: `((sum sqrt(r))^2 - sum r) / 2`."""
    least = (sum(rate**0.5 for rate in RATES) ** 2 - sum(RATES)) / 2
    weighed, _ = run(AgeWeighted(Moetion(LAYERS)))
    plain, _ = run(Moetion(LAYERS))
    assert 0.99 * least <= weighed <= 1.02 * least
    assert plain >= 1.4 * least
