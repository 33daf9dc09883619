"""Every operator has one turn, in the same order in every life; a window is as short as its budget allows."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.replay.schedule import has_shifted, schedule, sparse_window, units_of
from cpsr.state.shard import OperatorState, ParamSlice, Shard


def shard_of(*names: str) -> Shard:
    return Shard({name: OperatorState(name, ParamSlice(torch.zeros(2), (2,)), {}, 0) for name in names})


def test_experts_come_first_and_layers_from_the_back() -> None:
    shard = shard_of("embed.weight", "h.0.attn.weight", "h.0.experts.1.w", "h.1.attn.weight", "h.1.attn.bias", "head.w")
    units = units_of(shard, {"h.0.experts.1.w": "00000-00001"})
    assert list(units.items()) == [
        ("00000-00001", ("h.0.experts.1.w",)),
        ("head", ("head.w",)),
        ("h.1", ("h.1.attn.weight", "h.1.attn.bias")),
        ("h.0", ("h.0.attn.weight",)),
        ("embed", ("embed.weight",)),
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_popular_experts_come_last_and_equal_ones_in_the_models_order(tokens: list[int]) -> None:
    names = [f"h.experts.{place}.{kind}" for place in range(len(tokens)) for kind in ("w", "b")]
    experts = {name: name.split(".")[2] for name in names}
    popularity = {name: float(tokens[int(expert)]) for name, expert in experts.items()}
    units = list(units_of(shard_of("embed.w", *names), experts, popularity))
    assert units[:-1] == [str(place) for place in sorted(range(len(tokens)), key=lambda place: (tokens[place], place))]
    assert units[-1] == "embed"
    assert units[:-1] == list(units_of(shard_of(*names), experts, {**popularity, "another": 1.0}))


def test_turns_change_where_a_quarter_of_the_experts_moves_by_more_than_a_tenth() -> None:
    even = {str(place): 10.0 for place in range(8)}
    assert has_shifted({}, even)
    assert not has_shifted(even, {})
    assert not has_shifted(even, dict.fromkeys(even, 100.0))
    assert not has_shifted(even, {**even, "0": 10.5, "1": 9.5})
    assert has_shifted(even, {**even, "0": 12.0, "1": 8.0})
    assert not has_shifted(dict.fromkeys(even, 0.0), dict.fromkeys(even, 0.0))
    assert has_shifted(dict.fromkeys(even, 0.0), even)


# Active and frozen bytes: an operator's whole state holds at least what its weights for the forward pass take.
OPERATORS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (max(pair), min(pair))), min_size=1, max_size=9
)


def window_of(operators: Sequence[tuple[int, int]], snapshot_bytes: float) -> tuple[list[list[int]], float]:
    active, frozen = zip(*operators, strict=True)
    return sparse_window(active, frozen, snapshot_bytes)


def as_printed(operators: int, active_bytes: int, frozen_bytes: int, snapshot_bytes: float) -> tuple[int, int]:
    """`FindWindowSize`, but down to one operator."""
    active = operators
    while active > 1 and active_bytes * active + frozen_bytes * (operators - active) > snapshot_bytes:
        active -= 1
    return math.ceil(operators / active), active


def divisions(operators: int) -> Iterator[list[range]]:
    """All ways to cut a sequence into parts that follow each other."""
    for cuts in range(2 ** (operators - 1)):
        edges = [0, *(place + 1 for place in range(operators - 1) if cuts >> place & 1), operators]
        yield [range(first, last) for first, last in pairwise(edges)]


def snapshot_bytes(operators: Sequence[tuple[int, int]], active: Sequence[int]) -> int:
    """What has its turn, whole, and the compute weights of what comes later."""
    later = operators[active[-1] + 1 :] if active else []
    return sum(operators[place][0] for place in active) + sum(weights for _, weights in later)


def scheduled(operators: Sequence[tuple[int, int]], iterations: int) -> list[list[int]]:
    """Places of the operators of each turn; each is a unit of its own."""
    active, frozen = zip(*operators, strict=True)
    turns = schedule({f"h.{place}": (str(place),) for place in range(len(operators))}, active, frozen, iterations)
    return [[int(name) for name in turn] for turn in turns]


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 50), st.integers(1, 5000))
def test_equal_operators_need_no_longer_window_than_the_algorithms(
    count: int, more: int, frozen: int, budget: int
) -> None:
    turns, largest = window_of([(frozen + more, frozen)] * count, budget)
    window, active = as_printed(count, frozen + more, frozen, budget)
    assert len(turns[0]) == active
    assert largest <= max(budget, (frozen + more) * active + frozen * (count - active))
    assert len(turns) <= window
    if not frozen:
        assert len(turns) == window


@given(OPERATORS, st.integers(1, 120))
def test_every_operator_has_one_turn_and_no_division_that_fits_is_shorter(
    operators: list[tuple[int, int]], budget: int
) -> None:
    turns, largest = window_of(operators, budget)
    assert [place for step in turns for place in step] == list(range(len(operators)))
    sizes = [snapshot_bytes(operators, step) for step in turns]
    assert largest == max(sizes)
    assert all(len(step) == 1 for step, size in zip(turns, sizes, strict=True) if size > budget)
    fitting = [
        len(parts)
        for parts in divisions(len(operators))
        if all(snapshot_bytes(operators, part) <= budget for part in parts)
    ]
    assert (largest <= budget) == bool(fitting)
    if fitting:
        assert len(turns) == min(fitting)


@given(st.lists(OPERATORS.map(lambda listed: listed[0]), min_size=1, max_size=40), st.integers(1, 800))
def test_the_schedule_of_a_window_keeps_the_budget_that_the_window_was_found_for(
    operators: list[tuple[int, int]], budget: int
) -> None:
    """Also where another rank needs more iterations; and no snapshot has no operator while there are as many."""
    turns, largest = window_of(operators, budget)
    for iterations in range(len(turns), len(turns) + 4):
        scheduled_turns = scheduled(operators, iterations)
        assert len(scheduled_turns) == iterations
        assert [place for turn in scheduled_turns for place in turn] == list(range(len(operators)))
        assert max(snapshot_bytes(operators, turn) for turn in scheduled_turns) <= max(budget, largest)
        assert sum(not turn for turn in scheduled_turns) == max(0, iterations - len(operators))


@given(OPERATORS, st.integers(1, 9))
def test_no_other_schedule_has_a_smaller_largest_snapshot(operators: list[tuple[int, int]], iterations: int) -> None:
    found = max(snapshot_bytes(operators, turn) for turn in scheduled(operators, iterations))
    largest = [
        max(snapshot_bytes(operators, part) for part in parts)
        for parts in divisions(len(operators))
        if len(parts) <= iterations
    ]
    assert found == min(largest)


def test_a_rank_without_operators_has_turns_without_any() -> None:
    assert schedule({}, [], [], 3) == ((), (), ())


def test_a_large_operator_does_not_set_the_window_of_small_ones() -> None:
    """An embedding that takes a snapshot for itself, among a hundred experts of which ten fit into one."""
    experts = [(11, 1)] * 100
    turns, largest = window_of([*experts[:50], (101, 1), *experts[50:]], 201)
    assert largest <= 201
    assert len(turns) == 9


def test_the_papers_example_of_a_sparse_window() -> None:
    """moevement, Figure 6: six operators in three iterations, 55% less a snapshot, 12 bytes a parameter against 2."""
    operators = [(12, 2)] * 6
    turns, largest = window_of(operators, 40)
    assert len(turns) == 3
    assert largest <= 40
    assert scheduled(operators, 3) == [[0, 1], [2, 3], [4, 5]]
    largest = max(snapshot_bytes(operators, turn) for turn in scheduled(operators, 3))
    assert largest == 32
    assert int(100 * (1 - largest / (6 * 12))) == 55
