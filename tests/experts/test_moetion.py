"""MOETION's selection: exact sums, proportional shares, and nothing that a layer does not have."""

import math

import numpy
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.moetion import Moetion, allocation
from cpsr.experts.operators import Expert
from tests.experts.mixtures import load, loads, mixture, mixtures, no_load

SIZE = 10
RISKS_AND_EXPERTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 64)), min_size=1, max_size=12)


def counts(risks: list[int], experts: list[int], budget_bytes: float) -> list[int]:
    found = allocation(risks, experts, [SIZE] * len(experts), Budget(snapshot_bytes=budget_bytes))
    return [int(count) for count in found]


def test_layers_share_in_proportion_to_their_risk() -> None:
    assert counts([600, 300, 100], [64, 64, 64], 100) == [6, 3, 1]


def test_what_a_small_layer_cannot_use_goes_to_the_others() -> None:
    assert counts([900, 60, 40], [2, 8, 8], 100) == [2, 5, 3]


def test_without_any_tokens_layers_share_equally() -> None:
    assert counts([0, 0, 0], [8, 8, 8], 70) == [3, 2, 2]


def test_the_bytes_of_unequal_experts_are_kept() -> None:
    found = allocation([100, 100], [4, 4], [10, 40], Budget(snapshot_bytes=99))
    assert found.tolist() == [2, 1]  # 10 + 40 + 10, and the next 40 do not fit


def test_experts_by_number() -> None:
    assert allocation([300, 100], [8, 8], [1, 1], Budget(experts_per_layer=2)).tolist() == [3, 1]


@given(RISKS_AND_EXPERTS, st.integers(1, 5000))
def test_the_sum_is_exact_and_no_layer_is_overdrawn(layers: list[tuple[int, int]], budget: int) -> None:
    risks, experts = [risk for risk, _ in layers], [have for _, have in layers]
    found = counts(risks, experts, budget)
    wanted = max(1, budget // SIZE)
    assert sum(found) == min(wanted, sum(experts))
    assert all(0 <= taken <= have for taken, have in zip(found, experts, strict=True))
    if total := sum(risks):
        for taken, (risk, have) in zip(found, layers, strict=True):
            assert taken >= min(risk * wanted // total, have)


@given(RISKS_AND_EXPERTS, st.integers(1, 5000), st.integers(0, 1000))
def test_a_larger_budget_takes_from_no_layer(layers: list[tuple[int, int]], budget: int, more: int) -> None:
    risks, experts = [risk for risk, _ in layers], [have for _, have in layers]
    small, large = counts(risks, experts, budget), counts(risks, experts, budget + more)
    assert all(few <= many for few, many in zip(small, large, strict=True))


@given(st.data())
def test_a_rank_saves_its_own_experts_with_the_most_unsaved_tokens(data: st.DataObject) -> None:
    layers: tuple[ExpertLayer, ...] = data.draw(mixtures())
    popularity = data.draw(loads(layers))
    budget = Budget(snapshot_bytes=data.draw(st.integers(1, 200)))
    found = Moetion(layers).select(0, popularity, budget)
    assert len(set(found)) == len(found) >= 1
    assert len(found) == 1 or budget.fits(sum(layers[expert.layer].expert_bytes for expert in found))
    for place, layer in enumerate(layers):
        saved = {expert.index for expert in found if expert.layer == place}
        assert saved <= set(layer.owned)
        tokens = popularity.unsaved_tokens[place]
        least = min((tokens[index] for index in saved), default=math.inf)
        assert all(tokens[index] <= least for index in set(layer.owned) - saved)


@given(st.data(), st.integers(1, 200), st.integers(0, 200))
def test_the_remote_selection_is_part_of_the_local_one(data: st.DataObject, remote: int, more: int) -> None:
    layers = data.draw(mixtures())
    popularity, policy = data.draw(loads(layers)), Moetion(layers)
    here = policy.select(0, popularity, Budget(snapshot_bytes=remote + more))
    there = policy.select(0, popularity, Budget(snapshot_bytes=remote))
    assert set(there) <= set(here)


def test_what_other_ranks_have_at_risk_does_not_count() -> None:
    """Of the first layer this rank owns the experts with little at risk, of the second those with much."""
    layers = mixture(4, 4, ranks=2, rank=1)
    found = Moetion(layers).select(0, load([90, 90, 1, 1], [0, 0, 9, 9]), Budget(snapshot_bytes=20))
    assert found == (Expert(1, 2), Expert(1, 3))


def test_a_budget_below_one_expert_saves_the_one_at_most_risk() -> None:
    budget = Budget(snapshot_bytes=5, non_expert_bytes=50)
    assert Moetion(mixture(4, 4)).select(0, load([1, 2, 3, 4], [0, 90, 0, 0]), budget) == (Expert(1, 1),)


def test_non_expert_bytes_are_not_there_for_experts() -> None:
    found = Moetion(layers := mixture(8)).select(0, no_load(layers), Budget(snapshot_bytes=100, non_expert_bytes=69))
    assert len(found) == 3


def test_a_model_without_experts() -> None:
    assert Moetion(()).select(0, no_load(()), Budget(snapshot_bytes=100)) == ()


def test_a_large_model_with_the_same_load_everywhere() -> None:
    found = counts([1] * 100, [100] * 100, 5000 * SIZE)
    assert numpy.unique(found).tolist() == [50]
