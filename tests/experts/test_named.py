"""Policies and measures by name, over all ranks."""

import numpy
import pytest

from cpsr.engines.moe.measures import Routed
from cpsr.engines.moe.operators import Expert, Operator
from cpsr.engines.moe.popularity import OVERDUE_ROUNDS
from cpsr.experts.budget import Budget
from cpsr.experts.each_rank import as_on_each_rank
from cpsr.experts.named import measure_named, policy_named
from tests.engines.moe.mixtures import load, longest_wait, mixture, no_load, selections

POLICIES = ("sequential", "load_aware", "dynamic_k", "moetion", "window")


@pytest.mark.parametrize("name", POLICIES)
def test_experts_of_all_ranks_whichever_rank_asks(name: str) -> None:
    selections: list[list[Operator]] = []
    for rank in range(2):
        layers = mixture(4, 2, ranks=2, rank=rank)
        policy = policy_named(name, layers, 1, 0.05)
        budget = Budget(snapshot_bytes=10) if name in ("moetion", "window") else Budget(experts_per_layer=1)
        popularity = load([9, 1, 2, 3], [7, 5])
        selections.append(sorted(policy.select(0, popularity, budget), key=str))
    first, second = selections
    assert first == second
    assert {mixture(4, 2, ranks=2)[one.layer].owner(one.index) for one in first if isinstance(one, Expert)} == {0, 1}


def test_each_rank_saves_what_its_own_link_takes() -> None:
    layers = mixture(4, 2, ranks=2)
    chosen = policy_named("moetion", layers, 1, 0.05).select(0, load([9, 8, 1, 0], [0, 0]), Budget(snapshot_bytes=20))
    assert set(chosen) == {Expert(0, 0), Expert(0, 1), Expert(0, 2), Expert(0, 3)}


@pytest.mark.parametrize("name", ["load_aware", "dynamic_k", "moetion"])
def test_by_popularity_experts_without_tokens_have_their_turn_too(name: str) -> None:
    layers = mixture(4)
    budget = Budget(snapshot_bytes=10) if name == "moetion" else Budget(experts_per_layer=1)
    saved = selections(policy_named(name, layers, 1, 0.05), layers, [[100, 50, 0, 0]], budget, steps=200)
    assert longest_wait(saved, layers) <= OVERDUE_ROUNDS * 4 + 4


def test_a_window_ends_when_every_expert_of_every_rank_was_saved() -> None:
    layers = mixture(4, 2, ranks=2)
    policy, popularity = policy_named("window", layers, 1, 0.05), load([9, 1, 2, 3], [7, 5])
    steps = [policy.select(step, popularity, Budget(snapshot_bytes=10)) for step in range(3)]
    assert sorted(map(len, steps)) == [2, 2, 2]
    assert len({one for step in steps for one in step}) == 6
    assert Expert(0, 1) in steps[0]  # the least popular of its rank
    assert Expert(0, 0) in steps[2]


def test_a_budget_smaller_than_an_expert_saves_one_of_each_rank() -> None:
    layers = mixture(4, 2, ranks=2)
    for name in ("moetion", "window"):
        policy = policy_named(name, layers, 1, 0.05)
        chosen = [policy.select(step, no_load(layers), Budget(snapshot_bytes=1)) for step in range(3)]
        assert [len(one) for one in chosen] == [2, 2, 2]


def test_layers_as_every_rank_has_them() -> None:
    layers = mixture(4, 6, ranks=2, rank=1)
    first, second = as_on_each_rank(layers)
    assert [layer.owned for layer in first] == [range(2), range(3)]
    assert second == layers
    assert as_on_each_rank(()) == [()]


def test_measures() -> None:
    layers = mixture(2, 4)
    routed = Routed([[3, 1], [8, 0, 0, 0]], [[2.5, 1.5], [5, 1, 1, 1]])
    scores = {}
    for name in ("hard", "soft", "decayed", "capacity"):
        measure = measure_named(name, layers, (1.0, 2.0), routed)
        measure.observe(routed)
        scores[name] = [layer.tolist() for layer in measure.scores]
    assert scores["hard"] == [[3, 1], [8, 0, 0, 0]]
    assert scores["soft"] == [[2.5, 1.5], [5, 1, 1, 1]]
    assert scores["decayed"] == [pytest.approx([0.03, 0.01]), pytest.approx([0.08, 0, 0, 0])]
    assert scores["capacity"] == [[1.5, 0.5], [2, 0, 0, 0]]  # 2 tokens each, and twice 2


def test_capacities_where_the_first_iteration_routed_nothing() -> None:
    layers = mixture(2)
    measure = measure_named("capacity", layers, (1.0,), Routed([[0, 0]]))
    measure.observe(Routed([[4, 0]]))
    assert numpy.isfinite(measure.scores[0]).all()


@pytest.mark.parametrize("name", ["none", "other"])
def test_names_that_there_are_not(name: str) -> None:
    layers = mixture(2)
    with pytest.raises(ValueError, match=name):
        policy_named(name, layers, 1, 0.05)
    with pytest.raises(ValueError, match=name):
        measure_named(name, layers, (1.0,), Routed([[1, 1]]))
