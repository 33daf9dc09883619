"""MOETION's selection: exact sums, proportional shares, and nothing that a layer does not have."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert, ExpertLayer, ExpertParallel
from cpsr.experts.moetion import Moetion, allocation
from cpsr.experts.policies import OVERDUE_ROUNDS, Budget, Load
from tests.engines.moe.mixtures import (
    load,
    loads,
    longest_wait,
    mixture,
    mixtures,
    most_at_risk_first,
    selections,
)

SIZE = 10
RISKS_AND_EXPERTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 64)), min_size=1, max_size=12)


def counts(risks: list[int], experts: list[int], budget_bytes: float) -> list[int]:
    found = allocation(risks, experts, [SIZE] * len(experts), Budget(snapshot_bytes=budget_bytes))
    return [int(count) for count in found]


def test_layers_share_in_proportion_to_their_risk() -> None:
    assert counts([600, 300, 100], [64, 64, 64], 100) == [6, 3, 1]


def test_the_bytes_of_unequal_experts_are_kept() -> None:
    found = allocation([100, 100], [4, 4], [10, 40], Budget(snapshot_bytes=99))
    assert found.tolist() == [2, 1]  # 10 + 40 + 10, and the next 40 do not fit


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


@given(st.data(), st.integers(1, 200), st.integers(0, 200))
def test_the_remote_selection_is_part_of_the_local_one(data: st.DataObject, remote: int, more: int) -> None:
    layers = data.draw(mixtures())
    popularity, policy = data.draw(loads(layers)), Moetion(layers)
    here = policy.select(0, popularity, Budget(snapshot_bytes=remote + more))
    there = policy.select(0, popularity, Budget(snapshot_bytes=remote))
    assert set(there) <= set(here)


def test_what_other_ranks_have_at_risk_does_not_count() -> None:
    """Of the first layer rank 1 owns the experts with little at risk, of the second those with much."""
    layers = mixture(4, 4, ranks=2)
    found = Moetion(layers).select(0, load([90, 90, 1, 1], [0, 0, 9, 9]), Budget(snapshot_bytes=20))
    assert found == (Expert(0, 0), Expert(0, 1), Expert(1, 2), Expert(1, 3))


def test_a_budget_below_one_expert_saves_the_one_at_most_risk() -> None:
    budget = Budget(snapshot_bytes=5)
    assert Moetion(mixture(4, 4)).select(0, load([1, 2, 3, 4], [0, 90, 0, 0]), budget) == (Expert(1, 1),)


def expert_by_expert(layers: Sequence[ExpertLayer], popularity: Load, budget: Budget) -> list[Expert]:
    """One rank's selection where nothing is overdue: each place to the layer with the highest average."""
    first = [most_at_risk_first(popularity, i) for i in range(len(layers))]
    own = [[index for index in first[i] if index in layer.owned] for i, layer in enumerate(layers)]
    risks = [sum(popularity.unsaved_tokens[i][index] for index in indices) for i, indices in enumerate(own)]
    oldest = [max(popularity.ages[i][index] for index in indices) for i, indices in enumerate(own)]
    counts, taken = [0] * len(layers), 0
    while left := [i for i in range(len(layers)) if counts[i] < len(own[i])]:
        best = min(left, key=lambda i: (-risks[i] / (counts[i] + 1), counts[i], -oldest[i], i))
        taken += layers[best].expert_bytes
        if any(counts) and taken > budget.snapshot_bytes:
            break
        counts[best] += 1
    return [Expert(i, index) for i, indices in enumerate(own) for index in indices[: counts[i]]]


@given(st.data(), st.integers(1, 200))
def test_all_ranks_at_once_select_what_each_selects_by_itself(data: st.DataObject, snapshot_bytes: int) -> None:
    sizes = st.integers(1, 40)
    layers = [replace(layer, expert_bytes=data.draw(sizes)) for layer in data.draw(mixtures())]
    popularity, budget = data.draw(loads(layers)), Budget(snapshot_bytes=snapshot_bytes)
    size = layers[0].expert_parallel.size
    ranks = [[replace(layer, expert_parallel=ExpertParallel(size, rank)) for layer in layers] for rank in range(size)]
    expected = [expert_by_expert(own, popularity, budget) for own in ranks]
    found = Moetion(layers).select(0, popularity, budget)
    assert list(found) == [expert for own in expected for expert in own]


@pytest.mark.parametrize("places", [1, 2, 3, 6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_to_which_nothing_is_routed_are_saved_again(ranks: int, places: int) -> None:
    """Of a layer, of a rank's part of one, and of a layer that gets no place at all."""
    layers = mixture(8, 4, 4, ranks=ranks)
    tokens = [[100.0, 50.0] + [0.0] * 6, [1.0] * 4, [0.0] * 4]
    budget = Budget(snapshot_bytes=places * SIZE)
    saved = selections(Moetion(layers), layers, tokens, budget, steps=600)
    assert longest_wait(saved, layers) <= OVERDUE_ROUNDS * (8 // ranks) * -(-3 // places) + 16 // ranks
    assert all(len(chosen) == min(16, ranks * places) for chosen in saved)
