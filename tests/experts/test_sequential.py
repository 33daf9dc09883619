"""Sequential selection: everyone has a turn, and no rank has more to do than another."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Expert
from cpsr.experts.budget import Budget
from cpsr.experts.sequential import Sequential
from tests.engines.moe.mixtures import mixture, mixtures, no_load


def test_the_papers_order_with_one_expert_on_each_rank() -> None:
    """A layer's experts follow each other, and a layer begins one rank further on than the layer before."""
    policy = Sequential(layers := mixture(4, 4, 4, ranks=4))
    found = [policy.select(step, no_load(layers), Budget(experts_per_layer=1)) for step in range(4)]
    assert [[expert.index for expert in step] for step in found] == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]


def test_with_several_experts_on_a_rank_the_ranks_take_turns() -> None:
    policy = Sequential(layers := mixture(8, ranks=2))
    found = [policy.select(step, no_load(layers), Budget(experts_per_layer=1))[0].index for step in range(8)]
    assert found == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_small_layer_is_saved_whole() -> None:
    chosen = Sequential(layers := mixture(2, 8)).select(3, no_load(layers), Budget(experts_per_layer=4))
    assert [expert.index for expert in chosen if expert.layer == 0] in ([0, 1], [1, 0])
    assert sum(expert.layer == 1 for expert in chosen) == 4


def test_a_model_without_experts() -> None:
    assert Sequential(()).select(0, no_load(()), Budget(experts_per_layer=1)) == ()


@given(mixtures(), st.integers(1, 6), st.integers(0, 1000))
def test_each_expert_has_its_turn_in_every_round(layers: tuple[ExpertLayer, ...], count: int, first: int) -> None:
    policy, budget = Sequential(layers), Budget(experts_per_layer=count)
    for place, layer in enumerate(layers):
        rounds = -(-layer.experts // count)
        saved = [
            expert for step in range(first, first + rounds) for expert in policy.select(step, no_load(layers), budget)
        ]
        assert {expert for expert in saved if expert.layer == place} == {
            Expert(place, index) for index in range(layer.experts)
        }


@given(mixtures(), st.integers(1, 6), st.integers(0, 1000))
def test_ranks_save_equally_many_to_within_one(layers: tuple[ExpertLayer, ...], count: int, step: int) -> None:
    chosen = Sequential(layers).select(step, no_load(layers), Budget(experts_per_layer=count))
    assert len(set(chosen)) == len(chosen) == sum(min(count, layer.experts) for layer in layers)
    ranks = Counter(layers[expert.layer].owner(expert.index) for expert in chosen)
    numbers = [ranks[rank] for rank in range(layers[0].expert_parallel.size)]
    assert max(numbers) - min(numbers) <= 1
