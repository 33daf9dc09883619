"""Tokens that failures take from experts, and experts that make up for them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.account import LostTokens, Recovering
from cpsr.experts.policies import Budget, Sequential
from tests.engines.moe.mixtures import mixture, no_load
from tests.experts.ledger import Ledger

LAYERS = mixture(2, 3)


def test_two_failures_by_hand() -> None:
    account = LostTokens(LAYERS)
    account.add([[5, 0], [1, 1, 1]])
    account.add([[0, 5], [0, 0, 1]])
    assigned = [100, 200]
    assert account.by_layer(assigned).tolist() == [0.1, 0.02]
    assert account.portion(assigned) == pytest.approx(14 / 300)


@pytest.mark.parametrize("assigned", [[100], [1, 100], [math.nan, 100], [math.inf, 100], [math.inf, math.inf]])
def test_tokens_that_cannot_be_of_the_whole_run_are_refused(assigned: list[float]) -> None:
    account = LostTokens(LAYERS)
    account.add([[5, 0], [1, 1, 1]])
    with pytest.raises(ValueError, match="layers"):
        account.portion(assigned)


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
)
def test_failures_of_a_run_that_saves_in_turn(count: int, gaps: list[int], tokens: list[int]) -> None:
    """Going back to the last snapshot, an expert loses what came between its own snapshot and that one."""
    layers = mixture(8)
    ledger, account, policy = Ledger(layers), LostTokens(layers), Sequential(layers)
    step, expected = 0, 0.0
    for gap in gaps:
        last_saved = dict.fromkeys(range(8), step)
        for _ in range(gap):
            step += 1
            ledger.observe([tokens])
            chosen = policy.select(step, no_load(layers), Budget(experts_per_layer=count))
            ledger.saved(chosen)
            last_saved |= {expert.index: step for expert in chosen}
        account.add(ledger.tokens)
        ledger.tokens[0][:] = 0  # every expert is what its snapshot holds
        expected += sum((step - last) * tokens[index] for index, last in last_saved.items())
    assigned = step * sum(tokens)
    assert account.portion([assigned]) == pytest.approx(expected / assigned if assigned else 0)
    if count == 8:
        assert expected == 0


def test_a_checkpoint_brings_the_account_back() -> None:
    account, back = LostTokens(LAYERS), LostTokens(LAYERS)
    account.add([[5, 0], [1, 1, 1]])
    back.load_state_dict(account.state_dict())
    assert back.portion([100, 200]) == 8 / 300
    with pytest.raises(ValueError, match="lost tokens"):
        back.load_state_dict(LostTokens(mixture(2, 2)).state_dict())
    assert back.portion([100, 200]) == 8 / 300


TWO = mixture(2, 1)


def test_an_expert_recovers_until_the_fraction_of_its_tokens_is_what_it_lost() -> None:
    recovering = Recovering(TWO, fraction=0.1)
    assert recovering.in_layers == (False, False)
    recovering.lost([[0, 10], [3]])
    assert recovering.in_layers == (True, True)
    recovering.observe([[500, 50], [30]])
    assert recovering.state_dict() == [[0, 5], [0]]
    assert recovering.in_layers == (True, False)
    recovering.lost([[0, 1], [0]])
    recovering.observe([[0, 59], [0]])
    assert recovering.in_layers == (True, False)
    recovering.observe([[0, 2], [0]])
    assert recovering.in_layers == (False, False)


def test_without_more_capacity_nothing_recovers() -> None:
    recovering = Recovering(TWO, fraction=0)
    recovering.lost([[1, 10], [3]])
    recovering.load_state_dict([[1.0, 10.0], [3.0]])
    assert recovering.in_layers == (False, False)


def test_a_checkpoint_brings_it_back() -> None:
    recovering, back = Recovering(TWO), Recovering(TWO)
    recovering.lost([[0, 10], [3]])
    back.load_state_dict(recovering.state_dict())
    assert back.state_dict() == recovering.state_dict()
    with pytest.raises(ValueError, match="tokens to make up"):
        back.load_state_dict([[1.0], [1.0]])
    assert back.in_layers == (True, True)
