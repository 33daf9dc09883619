"""Dynamic-K: when K doubles, and where it ends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.dynamic_k import DynamicK
from cpsr.experts.lost_tokens import LostTokens
from cpsr.experts.sequential import Sequential
from tests.engines.moe.mixtures import mixture, no_load

LAYERS = mixture(8, 6)


def dynamic(count: int = 1, limit: float = 0.05) -> DynamicK:
    return DynamicK(LAYERS, Sequential(LAYERS), count, limit)


def test_it_doubles_when_what_was_lost_under_it_passes_the_limit_of_all_tokens() -> None:
    policy, numbers, assigned = dynamic(), [], 0
    for lost in (30, 60, 100, 150, 60, 900, 900):
        assigned += 1000
        policy.recovered(lost, assigned)
        numbers.append(policy.experts_per_layer)
    # 3% of 1,000; 90 of 2,000 are 4.5%; 190 of 3,000 are 6.3%; 150 of 4,000; 210 of 5,000; 1,110 of 6,000; 900 of 7,000
    assert numbers == [1, 1, 2, 2, 2, 4, 8]


def test_an_early_failure_weighs_no_more_than_its_tokens() -> None:
    """4% of 10,000 tokens and 1.2% of 100,000 are 1.6% of 100,000: pec, Eq. 4."""
    policy = dynamic(limit=0.05)
    policy.recovered(400, 10_000)
    assert policy.charged == 0.04
    policy.recovered(1_200, 100_000)
    assert (policy.charged, policy.experts_per_layer) == (0.016, 1)


def test_as_the_account_of_lost_tokens_counts_them() -> None:
    policy, account = dynamic(limit=1), LostTokens(LAYERS)
    assigned = 0
    for lost in (3, 0, 40):
        assigned += 100
        account.add([[lost] * 8, [0] * 6])
        policy.recovered(8 * lost, 4 * assigned)
        assert policy.charged == account.portion([3 * assigned, assigned])


def test_it_selects_that_many_whatever_the_budget() -> None:
    policy = dynamic(count=3)
    for budget in (Budget(), Budget(snapshot_bytes=1), Budget(experts_per_layer=8)):
        assert len(policy.select(0, no_load(LAYERS), budget)) == 6
    policy.recovered(6, 100)
    assert len(policy.select(1, no_load(LAYERS), Budget())) == 12
    policy.recovered(6, 100)
    assert len(policy.select(2, no_load(LAYERS), Budget())) == 8 + 6


@given(st.lists(st.floats(0, 1)), st.integers(1, 20), st.floats(0, 1))
def test_it_never_falls_and_never_exceeds_the_largest_layer(portions: list[float], count: int, limit: float) -> None:
    policy = dynamic(count, limit)
    numbers, assigned = [policy.experts_per_layer], 0
    for portion in portions:
        assigned += 100
        policy.recovered(100 * portion, assigned)
        numbers.append(policy.experts_per_layer)
        assert policy.charged <= limit or policy.experts_per_layer == 8
    assert numbers == sorted(numbers)
    assert numbers[0] == min(count, 8)
    assert numbers[-1] <= 8


@given(st.lists(st.floats(0, 10), max_size=100))
def test_a_limit_divided_by_the_doublings_keeps_the_whole_run_below_it(losses: list[float]) -> None:
    """But for what the last recovery under each number took beyond it."""
    policy, lost, assigned = dynamic(limit=0.05 / 3), 0.0, 0
    for tokens in losses:
        assigned += 1000
        if policy.experts_per_layer < 8:  # nothing is lost where all experts are saved
            lost += tokens
        policy.recovered(tokens, assigned)
        assert lost <= 0.05 * assigned + 3 * 10 + 1e-9


def test_nothing_is_charged_before_anything_was_routed() -> None:
    policy = dynamic(limit=0)
    policy.recovered(0, 0)
    assert (policy.charged, policy.experts_per_layer) == (0, 1)


@pytest.mark.parametrize(("count", "limit"), [(0, 0.05), (-1, 0.05), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_a_number_or_a_limit_that_makes_no_sense_is_refused(count: int, limit: float) -> None:
    with pytest.raises(ConfigError, match="Dynamic-K needs"):
        dynamic(count, limit)


@pytest.mark.parametrize(
    ("lost", "assigned"), [(-1, 100), (101, 100), (math.nan, 100), (1, math.nan), (0, math.inf), (math.inf, math.inf)]
)
def test_tokens_that_cannot_be_lost_are_refused(lost: float, assigned: float) -> None:
    policy = dynamic()
    with pytest.raises(ValueError, match="of those assigned"):
        policy.recovered(lost, assigned)
    assert policy.charged == 0


def test_a_checkpoint_brings_the_number_and_its_charge_back() -> None:
    policy, back = dynamic(), dynamic()
    policy.recovered(60, 1000)
    policy.recovered(60, 2000)
    back.load_state_dict(policy.state_dict())
    assert (back.experts_per_layer, back.charged) == (2, 0.03)
    back.recovered(30, 3000)
    assert (back.experts_per_layer, back.charged) == (2, 0.03)
    more = dynamic(count=4)
    more.load_state_dict(policy.state_dict())
    assert (more.experts_per_layer, more.charged) == (4, 0.0), "a configured number that is larger holds"


def test_a_checkpoint_without_the_tokens_brings_the_number_back_and_charges_nothing() -> None:
    back = dynamic()
    back.load_state_dict({"experts_per_layer": 2, "charged": 0.03})
    assert (back.experts_per_layer, back.charged) == (2, 0.0)
