"""Load-aware selection: the most unsaved tokens under equal work of all ranks."""

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.layers import ExpertLayer, ExpertParallel
from cpsr.engines.moe.popularity import OVERDUE_ROUNDS, Popularity
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.load_aware import LoadAware
from tests.engines.moe.mixtures import (
    load,
    loads,
    longest_wait,
    mixture,
    mixtures,
    most_at_risk_first,
    no_load,
    selections,
)


def chosen(layers: tuple[ExpertLayer, ...], popularity: Popularity, count: int) -> list[tuple[int, int]]:
    found = LoadAware(layers).select(0, popularity, Budget(experts_per_layer=count))
    return [(expert.layer, expert.index) for expert in found]


def test_one_rank_saves_the_most_loaded_of_each_layer() -> None:
    assert chosen(mixture(4, 3), load([1, 9, 3, 5], [2, 0, 2]), 2) == [(0, 1), (0, 3), (1, 0), (1, 2)]


def test_a_rank_that_is_full_leaves_the_next_expert_to_another() -> None:
    """Both layers are most loaded on rank 0; the layer with less to lose there saves on rank 1."""
    assert chosen(mixture(4, 4, ranks=2), load([9, 8, 1, 0], [7, 6, 2, 3]), 1) == [(0, 0), (1, 3)]


def test_a_layer_is_never_left_short() -> None:
    """Greedily, layers 0 and 1 fill rank 1, and layer 2 lacks one that only rank 1 has left."""
    layers = mixture(4, 4, 2, ranks=2)
    found = chosen(layers, load([0, 0, 9, 9], [0, 0, 9, 9], [5, 5]), 2)
    assert Counter(layer for layer, _ in found) == {0: 2, 1: 2, 2: 2}
    assert Counter(layers[layer].owner(index) for layer, index in found) == {0: 3, 1: 3}


def test_without_any_tokens_the_oldest_go_first() -> None:
    assert chosen(mixture(4), load([0, 0, 0, 0], ages=[[1, 3, 2, 3]]), 2) == [(0, 1), (0, 3)]


def test_a_model_without_experts() -> None:
    assert LoadAware(()).select(0, no_load(()), Budget(experts_per_layer=1)) == ()


def test_groups_of_different_sizes_are_refused() -> None:
    layers = [ExpertLayer("a", 4, 1, ExpertParallel(2)), ExpertLayer("b", 4, 1, ExpertParallel(4))]
    with pytest.raises(ConfigError, match="one expert-parallel group"):
        LoadAware(layers)


@given(st.data(), st.integers(1, 6))
def test_every_layer_saves_its_number_and_no_rank_more_than_its_part(data: st.DataObject, count: int) -> None:
    layers = data.draw(mixtures())
    found = chosen(layers, data.draw(loads(layers)), count)
    assert len(set(found)) == len(found)
    by_layer = Counter(layer for layer, _ in found)
    assert [by_layer[place] for place in range(len(layers))] == [min(count, layer.experts) for layer in layers]
    by_rank = Counter(layers[layer].owner(index) for layer, index in found)
    assert max(by_rank.values()) <= -(-len(found) // layers[0].expert_parallel.size)


@given(st.data(), st.integers(1, 6))
def test_on_each_rank_it_is_the_layers_most_loaded_that_are_saved(data: st.DataObject, count: int) -> None:
    layers = data.draw(mixtures())
    popularity = data.draw(loads(layers))
    found = set(chosen(layers, popularity, count))
    for place, layer in enumerate(layers):
        for rank in range(layer.expert_parallel.size):
            order = [index for index in most_at_risk_first(popularity, place) if layer.owner(index) == rank]
            saved = [(place, index) in found for index in order]
            assert saved == sorted(saved, reverse=True)


@given(st.data())
def test_against_the_best_that_there_is(data: st.DataObject) -> None:
    """Greedy selection under two such limits saves at least half of the best; here no layer can be left short."""
    layers = mixture(2, 2, 2, ranks=2)
    popularity = data.draw(loads(layers))

    def tokens(experts: Iterable[tuple[int, int]]) -> float:
        return sum(float(popularity.unsaved_tokens[layer][index]) for layer, index in experts)

    allowed = [indices for indices in product(range(2), repeat=3) if len(set(indices)) == 2]  # 3 on a rank are too many
    best = max(tokens(enumerate(indices)) for indices in allowed)
    assert tokens(chosen(layers, popularity, 1)) >= best / 2


def test_experts_to_which_nothing_is_routed_are_saved_again() -> None:
    layers = mixture(4)
    saved = selections(LoadAware(layers), layers, [[100, 50, 0, 0]], Budget(experts_per_layer=1), steps=200)
    assert longest_wait(saved, layers) <= OVERDUE_ROUNDS * 4 + 4
    assert [len(chosen) for chosen in saved] == [1] * 200
    # Popularity still decides in most snapshots.
    assert sum(expert.index < 2 for chosen in saved for expert in chosen) > 160


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_in_unequal_layers_on_any_ranks_every_expert_has_its_turn(count: int, ranks: int) -> None:
    """With few places on a rank, the overdue experts of several layers wait for one another."""
    layers = mixture(8, 4, 12, ranks=ranks)
    tokens = [[100.0, 90.0] + [0.0] * (layer.experts - 2) for layer in layers]
    saved = selections(LoadAware(layers), layers, tokens, Budget(experts_per_layer=count), steps=400)
    assert longest_wait(saved, layers) <= OVERDUE_ROUNDS * -(-12 // count) + 24


def test_only_the_oldest_of_those_that_are_overdue_goes_before_popular_ones() -> None:
    ages = [[0, OVERDUE_ROUNDS * 2, OVERDUE_ROUNDS * 2 + 1, OVERDUE_ROUNDS * 2 + 1]]
    assert chosen(mixture(4), load([9, 0, 0, 0], ages=ages), 2) == [(0, 2), (0, 0)]
    ages = [[0, OVERDUE_ROUNDS * 2 - 1, OVERDUE_ROUNDS * 2 - 1, 0]]
    assert chosen(mixture(4), load([9, 0, 0, 1], ages=ages), 2) == [(0, 0), (0, 3)]


@given(st.data(), st.integers(1, 6))
def test_what_is_overdue_goes_first_where_its_rank_has_room_and_all_limits_hold(
    data: st.DataObject, count: int
) -> None:
    layers = data.draw(mixtures())
    young = data.draw(loads(layers))
    popularity = Popularity(young.scores, young.unsaved_tokens, tuple(60 * ages for ages in young.ages))
    found = chosen(layers, popularity, count)
    by_layer = Counter(layer for layer, _ in found)
    assert [by_layer[place] for place in range(len(layers))] == [min(count, layer.experts) for layer in layers]
    by_rank = Counter(layers[layer].owner(index) for layer, index in found)
    limit = -(-len(found) // layers[0].expert_parallel.size)
    assert max(by_rank.values()) <= limit
    overdue = []
    for place, layer in enumerate(layers):
        ages = popularity.ages[place].tolist()
        if max(ages) >= OVERDUE_ROUNDS * -(-layer.experts // min(count, layer.experts)):
            overdue.append((-max(ages), place, ages.index(max(ages))))
    room = [limit] * layers[0].expert_parallel.size
    for _, place, index in sorted(overdue):
        if room[rank := layers[place].owner(index)]:
            room[rank] -= 1
            assert (place, index) in found
