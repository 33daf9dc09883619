"""Accounts of lost tokens: the papers' formulas over sequences of failures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.budget import Budget
from cpsr.experts.lost_tokens import HARMLESS_MEAN_FRACTION, LostTokens, MomentaryLoss
from cpsr.experts.sequential import Sequential
from tests.engines.moe.mixtures import mixture, no_load
from tests.experts.ledger import Ledger

LAYERS = mixture(2, 3)


def test_two_failures_by_hand() -> None:
    account = LostTokens(LAYERS)
    account.add([[5, 0], [1, 1, 1]])
    account.add([[0, 5], [0, 0, 1]])
    assigned = [100, 200]
    assert account.failures == 2
    assert account.by_layer(assigned).tolist() == [0.1, 0.02]
    assert account.portion(assigned) == pytest.approx(14 / 300)
    assert account.momentary(assigned).total == pytest.approx(0.12)
    assert account.momentary(assigned).mean == pytest.approx(0.06)


def test_the_sum_grows_with_the_layers_and_the_mean_does_not() -> None:
    """3% in each of 24 layers, which is harmless by the paper's Table 1, is 72% by its Eq. 6."""
    account = LostTokens(mixture(*[2] * 24))
    account.add([[2, 1]] * 24)
    found = account.momentary([100] * 24)
    assert found.total == pytest.approx(0.72)
    assert found.mean == pytest.approx(HARMLESS_MEAN_FRACTION)


@pytest.mark.parametrize(
    ("lost", "harmless"),
    [
        ([30.0, 30.0], True),
        ([31.0, 31.0], False),  # 3.1% of the tokens, and of each layer's
        ([70.0, 0.0], False),  # 3.5% of the tokens, and of the layers' in the mean
        ([0.0, 0.0], True),
    ],
)
def test_what_is_harmless_by_both_papers(lost: list[float], harmless: bool) -> None:
    account = LostTokens(mixture(1, 1))
    account.add([[tokens] for tokens in lost])
    assert account.is_harmless([1000, 1000]) == harmless


def test_layers_of_different_load_keep_to_the_portion_too() -> None:
    """8% of all tokens, and 2.7% of the layers' in the mean."""
    account = LostTokens(mixture(1, 1, 1))
    account.add([[80], [0], [0]])
    assert not account.is_harmless([998, 1, 1])


def test_before_anything_was_trained_nothing_is_lost() -> None:
    account = LostTokens(LAYERS)
    assert account.portion([0, 0]) == 0
    assert account.momentary([0, 0]) == MomentaryLoss(0, 0)
    account.add([[0, 0], [1, 0, 0]])
    assert account.by_layer([0, 4]).tolist() == [0, 0.25]


def test_a_model_without_layers_of_experts_loses_nothing() -> None:
    account = LostTokens(())
    account.add([])
    assert account.portion([]) == 0
    assert account.momentary([]) == MomentaryLoss(0, 0)


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
    assert (back.failures, back.portion([100, 200])) == (1, 8 / 300)
    with pytest.raises(ValueError, match="lost tokens"):
        back.load_state_dict(LostTokens(mixture(2, 2)).state_dict())
    assert back.failures == 1
