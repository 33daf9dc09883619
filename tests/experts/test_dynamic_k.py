"""Dynamic-K: when K doubles, and where it ends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.dynamic_k import DynamicK
from cpsr.experts.sequential import Sequential
from tests.experts.mixtures import mixture, no_load

LAYERS = mixture(8, 6)


def dynamic(count: int = 1, limit: float = 0.05) -> DynamicK:
    return DynamicK(LAYERS, Sequential(LAYERS), count, limit)


def test_it_doubles_when_what_is_charged_to_the_current_number_passes_the_limit() -> None:
    policy, numbers = dynamic(), []
    for portion in (0.03, 0.02, 0.001, 0.04, 0.02, 0.4, 0.9, 0.9):
        policy.recovered(portion)
        numbers.append(policy.experts_per_layer)
    assert numbers == [1, 1, 2, 2, 4, 8, 8, 8]


def test_it_selects_that_many_whatever_the_budget() -> None:
    policy = dynamic(count=3)
    for budget in (Budget(), Budget(snapshot_bytes=1), Budget(experts_per_layer=8)):
        assert len(policy.select(0, no_load(LAYERS), budget)) == 6
    policy.recovered(0.06)
    assert len(policy.select(1, no_load(LAYERS), Budget())) == 12
    policy.recovered(0.06)
    assert len(policy.select(2, no_load(LAYERS), Budget())) == 8 + 6


@given(st.lists(st.floats(0, 1)), st.integers(1, 20), st.floats(0, 1))
def test_it_never_falls_and_never_exceeds_the_largest_layer(portions: list[float], count: int, limit: float) -> None:
    policy = dynamic(count, limit)
    numbers = [policy.experts_per_layer]
    for portion in portions:
        policy.recovered(portion)
        numbers.append(policy.experts_per_layer)
        assert policy.charged <= limit or policy.experts_per_layer == 8
    assert numbers == sorted(numbers)
    assert numbers[0] == min(count, 8)
    assert numbers[-1] <= 8


@given(st.lists(st.floats(0, 0.01), max_size=100))
def test_a_limit_divided_by_the_doublings_keeps_the_whole_run_below_it(portions: list[float]) -> None:
    """But for what the last recovery under each number took beyond it."""
    policy, lost = dynamic(limit=0.05 / 3), 0.0
    for portion in portions:
        if policy.experts_per_layer < 8:  # nothing is lost where all experts are saved
            lost += portion
        policy.recovered(portion)
    assert lost <= 0.05 + 3 * 0.01 + 1e-12


@pytest.mark.parametrize(("count", "limit"), [(0, 0.05), (-1, 0.05), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_a_number_or_a_limit_that_makes_no_sense_is_refused(count: int, limit: float) -> None:
    with pytest.raises(ConfigError, match="Dynamic-K needs"):
        dynamic(count, limit)


@pytest.mark.parametrize("portion", [-0.1, 1.1, math.nan])
def test_what_is_no_portion_is_refused(portion: float) -> None:
    policy = dynamic()
    with pytest.raises(ValueError, match="between 0 and 1"):
        policy.recovered(portion)
    assert policy.charged == 0


def test_a_checkpoint_brings_the_number_and_its_charge_back() -> None:
    policy, back = dynamic(), dynamic()
    for portion in (0.06, 0.03):
        policy.recovered(portion)
    back.load_state_dict(policy.state_dict())
    assert (back.experts_per_layer, back.charged) == (2, 0.03)
    more = dynamic(count=4)
    more.load_state_dict(policy.state_dict())
    assert (more.experts_per_layer, more.charged) == (4, 0.0), "a configured number that is larger holds"
