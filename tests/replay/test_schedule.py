"""Every operator has one turn, in the same order in every life; a window is as short as its budget allows."""

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


@given(st.lists(st.integers(0, 1000), min_size=0, max_size=30), st.integers(1, 12))
def test_each_operator_has_one_turn_in_the_order_of_the_units(sizes: list[int], iterations: int) -> None:
    units = {f"h.{place}": (f"h.{place}.w", f"h.{place}.b") for place in range(len(sizes))}
    turns = schedule(units, sizes, iterations)
    assert len(turns) == iterations
    assert [name for turn in turns for name in turn] == [name for names in units.values() for name in names]


@given(st.lists(st.integers(12, 400), min_size=1, max_size=20), st.floats(1, 10_000))
def test_a_larger_budget_needs_no_longer_window(sizes: list[int], budget: float) -> None:
    frozen = [size // 6 for size in sizes]
    turns, _ = sparse_window(sizes, frozen, budget)
    assert len(sparse_window(sizes, frozen, 2 * budget)[0]) <= len(turns) <= len(sizes)
    assert sparse_window(sizes, frozen, float(sum(sizes)))[0] == [list(range(len(sizes)))]
