"""Budgets: what a link moves, and the K that its bytes hold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.sequential import Sequential
from cpsr.experts.sharding import expert_bytes_by_rank
from tests.engines.moe.mixtures import mixture, mixtures, no_load


def test_what_is_not_of_experts_goes_first() -> None:
    budget = Budget(10e9, non_expert_bytes=4e9)
    assert budget.expert_bytes == 6e9


@pytest.mark.parametrize(
    ("snapshot_bytes", "non_expert"), [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), (1, math.nan)]
)
def test_what_was_not_measured_is_refused(snapshot_bytes: float, non_expert: float) -> None:
    with pytest.raises(ConfigError, match="positive number of bytes"):
        Budget(snapshot_bytes, non_expert)


@pytest.mark.parametrize("count", [0, -1])
def test_no_experts_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Budget(experts_per_layer=count)


def test_experts_by_number_go_before_bytes() -> None:
    assert Budget(snapshot_bytes=1, experts_per_layer=3).experts_in_each(mixture(8, 4)) == 3
    assert Budget(experts_per_layer=100).experts_in_each(mixture(8, 4)) == 8


def test_without_a_limit_all_are_saved() -> None:
    assert Budget().experts_in_each(mixture(8, 4)) == 8


def test_a_budget_below_one_operator_still_saves_one() -> None:
    budget = Budget(snapshot_bytes=100, non_expert_bytes=95)
    assert budget.experts_in_each(mixture(8)) == 1
    assert Budget(snapshot_bytes=100, non_expert_bytes=200).expert_bytes == 0


def test_a_model_without_experts_saves_none() -> None:
    assert Budget().experts_in_each(()) == 0
    assert Budget(experts_per_layer=2).experts_in_each(()) == 0


@given(st.data())
def test_by_bytes_it_is_the_largest_number_that_fits_the_busiest_rank(data: st.DataObject) -> None:
    layers: tuple[ExpertLayer, ...] = data.draw(mixtures())
    budget = Budget(snapshot_bytes=data.draw(st.integers(1, 400)), non_expert_bytes=data.draw(st.integers(0, 100)))

    def busiest(count: int, step: int) -> int:
        chosen = Sequential(layers).select(step, no_load(layers), Budget(experts_per_layer=count))
        return max(expert_bytes_by_rank(layers, chosen))

    count, steps = budget.experts_in_each(layers), range(3)
    most = max(layer.experts for layer in layers)
    assert count == 1 or all(busiest(count, step) <= budget.expert_bytes for step in steps)
    assert count == most or not all(busiest(count + 1, step) <= budget.expert_bytes for step in steps)
