"""The policies of PEC: turns, the most unsaved tokens first, K that doubles; and what all policies refuse."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import per_expert, zeros
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import OVERDUE_ROUNDS, Budget, DynamicK, Load, LoadAware, Policy, Sequential, overdue
from cpsr.experts.saving import policy_named
from cpsr.experts.tokens import TokenHistory
from tests.engines.moe.mixtures import (
    load,
    loads,
    longest_wait,
    mixture,
    mixtures,
    no_load,
    selections,
)


def test_the_papers_order_with_one_expert_on_each_rank() -> None:
    """A layer's experts follow each other, and a layer begins one rank further on than the layer before."""
    policy = Sequential(layers := mixture(4, 4, 4, ranks=4))
    found = [policy.select(step, no_load(layers), Budget(experts_per_layer=1)) for step in range(4)]
    assert [[expert.index for expert in step] for step in found] == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]


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


def chosen(layers: tuple[ExpertLayer, ...], popularity: Load, count: int) -> list[tuple[int, int]]:
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


@given(st.data(), st.integers(1, 6))
def test_every_layer_saves_its_number(data: st.DataObject, count: int) -> None:
    layers = data.draw(mixtures())
    found = chosen(layers, data.draw(loads(layers)), count)
    assert len(set(found)) == len(found)
    by_layer = Counter(layer for layer, _ in found)
    assert [by_layer[place] for place in range(len(layers))] == [min(count, layer.experts) for layer in layers]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_in_unequal_layers_on_any_ranks_every_expert_has_its_turn(count: int, ranks: int) -> None:
    """With few places on a rank, the overdue experts of several layers wait for one another."""
    layers = mixture(8, 4, 12, ranks=ranks)
    tokens = [[100.0, 90.0] + [0.0] * (layer.experts - 2) for layer in layers]
    saved = selections(LoadAware(layers), layers, tokens, Budget(experts_per_layer=count), steps=400)
    assert longest_wait(saved, layers) <= OVERDUE_ROUNDS * -(-12 // count) + 24


@given(st.data(), st.integers(1, 6))
def test_what_is_overdue_goes_first_where_its_rank_has_room(data: st.DataObject, count: int) -> None:
    layers = data.draw(mixtures())
    young = data.draw(loads(layers))
    popularity = Load(young.unsaved_tokens, tuple(60 * ages for ages in young.ages))
    found = chosen(layers, popularity, count)
    by_layer = Counter(layer for layer, _ in found)
    assert [by_layer[place] for place in range(len(layers))] == [min(count, layer.experts) for layer in layers]
    limit = -(-len(found) // layers[0].expert_parallel.size)
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


def test_k_doubles_until_what_is_lost_and_at_risk_is_within_the_limit() -> None:
    """Of 2,000 tokens so far 100 may be lost: as many as four experts have unsaved. Of 28,000 it is six, or 1,400."""
    layers = mixture(8)
    tokens = tuple(map(numpy.array, [[900.0, 800, 700, 600, 40, 30, 20, 10]]))
    policy = DynamicK(layers, LoadAware(layers), 0.05)

    def saved(lost: float, run: float, interval: float = 0.0) -> int:
        risk = Load(tokens, zeros(layers), interval, run, lost)
        return len(policy.select(0, risk, Budget(experts_per_layer=1)))

    assert [saved(0, run) for run in (1999, 2000, 28000, 44000)] == [8, 4, 2, 1]
    assert saved(1, 44000) == 2
    assert saved(0, 2000, interval=1) == 8
    assert len(policy.select(0, Load(tokens, zeros(layers)), Budget(experts_per_layer=3))) == 3


@given(st.data(), st.integers(1, 6), st.floats(0, 0.2), st.integers(0, 5))
def test_k_is_the_least_of_its_doubles_that_is_within_the_limit(
    data: st.DataObject, count: int, limit: float, interval: int
) -> None:
    """Also where some experts are overdue, or on a rank that is full: then not the most tokens are saved."""
    layers = data.draw(mixtures())
    young = data.draw(loads(layers))
    ages = tuple(data.draw(st.sampled_from([1, 20, 60])) * one for one in young.ages)
    tokens, most = young.unsaved_tokens, max(layer.experts for layer in layers)
    run = data.draw(st.floats(1, 40)) * sum(float(one.sum()) for one in tokens)
    popularity = Load(tokens, ages, interval, run, limit * run * data.draw(st.floats(0, 0.5)))
    least = min(count, most)
    expected = LoadAware(layers).select(0, popularity, Budget(experts_per_layer=least))
    while least < most:
        saved = sum(float(tokens[one.layer][one.index]) for one in expected)
        if popularity.lost_tokens + sum(float(one.sum()) for one in tokens) - saved + interval <= limit * run:
            break
        least = min(2 * least, most)
        expected = LoadAware(layers).select(0, popularity, Budget(experts_per_layer=least))
    assert DynamicK(layers, LoadAware(layers), limit).select(0, popularity, Budget(experts_per_layer=count)) == expected


def run_of(
    layers: tuple[ExpertLayer, ...], limit: float, failing: Sequence[bool], tokens: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[float], list[int]]:
    """The portion of lost tokens after each checkpoint, and how many experts each has saved; a job's own bookkeeping.

    Args:
        failing: by checkpoint, whether the run goes back to it.
        tokens: by checkpoint, for each layer, routed since the one before.
    """
    history, policy, lost = TokenHistory(layers), DynamicK(layers, LoadAware(layers), limit), 0.0
    taken = numpy.zeros(len(history.experts), dtype=numpy.int64)
    portions, numbers, whole = list[float](), list[int](), True
    for step, (fails, routed) in enumerate(zip(failing, tokens, strict=True), 1):
        history.count(routed)
        history.reach(step)
        load = Load(history.unsaved_tokens, history.ages, history.interval_tokens, history.run_tokens, lost)
        chosen = history.experts if whole else policy.select(step, load, Budget(experts_per_layer=1))
        history.begun(step, chosen)
        numbers.append(len(set(chosen)))
        taken[[history.experts.index(expert) for expert in chosen]] = step
        whole = fails  # the first checkpoint of a life holds all
        if fails:
            missed, _ = history.restored(taken, step)
            lost += sum(float(layer.sum()) for layer in missed)
        portions.append(lost / max(history.run_tokens, 1.0))
    return portions, numbers


@given(st.data(), st.floats(0, 0.2), st.lists(st.booleans(), min_size=1, max_size=25))
def test_failures_never_take_more_than_the_limit_of_a_run(
    data: st.DataObject, limit: float, failing: list[bool]
) -> None:
    layers = mixture(8, 3)
    of_layer = [st.lists(st.integers(0, 50), min_size=layer.experts, max_size=layer.experts) for layer in layers]
    tokens = [[data.draw(one) for one in of_layer] for _ in failing]
    portions, _ = run_of(layers, limit, failing, tokens)
    assert max(portions) <= limit * (1 + 1e-9)


def test_a_long_run_with_many_failures_stays_below_five_percent_and_saves_few_experts() -> None:
    """3,000 checkpoints, of which one in a hundred is gone back to; popularity drifts."""
    generator, layers = numpy.random.default_rng(5), mixture(16, 16)
    weights = generator.gamma(0.5, size=(2, 16)) + 0.01
    tokens = []
    for _ in range(3000):
        weights *= numpy.exp(0.05 * generator.normal(size=weights.shape))
        tokens.append([generator.multinomial(4096, own / own.sum()).tolist() for own in weights])
    portions, numbers = run_of(layers, 0.05, (generator.random(3000) < 0.01).tolist(), tokens)
    assert 0 < portions[-1] <= max(portions) <= 0.05
    assert numpy.mean(numbers) < 16, "half of all experts"


POLICIES = ("sequential", "load_aware", "dynamic_k", "moetion")


@pytest.mark.parametrize("name", POLICIES)
def test_experts_of_all_ranks_whichever_rank_asks(name: str) -> None:
    selections: list[list[Expert]] = []
    for rank in range(2):
        layers = mixture(4, 2, ranks=2, rank=rank)
        policy = policy_named(name, layers, 0.05)
        budget = Budget(snapshot_bytes=10) if name == "moetion" else Budget(experts_per_layer=1)
        popularity = load([9, 1, 2, 3], [7, 5])
        selections.append(sorted(policy.select(0, popularity, budget), key=str))
    first, second = selections
    assert first == second
    assert {mixture(4, 2, ranks=2)[one.layer].owner(one.index) for one in first} == {0, 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2]], "1 layers were given, and the model has 2"),
        ([[1, 2], [1, 2]], r"layer 'blocks.1' have shape \(2,\), not \(3,\)"),
        ([[1, 2], [1, -1, 2]], "'blocks.1' must be finite and not negative"),
        ([[1, numpy.nan], [1, 1, 2]], "'blocks.0' must be finite and not negative"),
        ([[1, 2], [1, numpy.inf, 2]], "'blocks.1' must be finite and not negative"),
    ],
)
def test_counts_that_do_not_fit_are_refused(values: Sequence[Sequence[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        per_expert(mixture(2, 3), values, "tokens")


@pytest.mark.parametrize("make", [LoadAware, Moetion])
@pytest.mark.parametrize(
    ("popularity", "message"),
    [
        (load([1, 2, 3]), "unsaved tokens of 1 layers were given"),
        (load([1, 2, 3], [1, 2], ages=[[0, numpy.nan, 0], [0, 0]]), "ages of layer 'blocks.0' must be finite"),
    ],
)
def test_policies_refuse_what_does_not_fit_their_layers(
    make: Callable[[Sequence[ExpertLayer]], Policy], popularity: Load, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(mixture(3, 2)).select(0, popularity, Budget(experts_per_layer=1))


def test_the_oldest_is_overdue_from_so_many_rounds_on() -> None:
    ages = numpy.array([[OVERDUE_ROUNDS * 3 - 1, 0, 1], [5, OVERDUE_ROUNDS * 3, OVERDUE_ROUNDS * 3]])
    assert overdue(ages, [3, 3]).tolist() == [[False] * 3, [False, True, False]]
    assert overdue(ages[1], 4).tolist() == [False] * 3
