"""MoEvement's policy: windows that save every operator once, the popular ones late."""

import itertools
from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert, Gate, NonExpert, Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.moevement import MoEvement, OperatorBytes
from tests.engines.moe.mixtures import load, loads, mixture

SIZE = OperatorBytes(active=12, frozen=2)
LAYER: dict[Operator, OperatorBytes] = {
    NonExpert("attention"): SIZE,
    Gate(0): SIZE,
    **{Expert(0, index): SIZE for index in range(4)},
}
TWO = Budget(snapshot_bytes=2 * 12 + 4 * 2)


def test_the_papers_example_with_the_least_popular_first() -> None:
    """Six operators in a window of three; gates and non-expert parts, which every token passes, at its end."""
    policy, seen, frozen = MoEvement(LAYER), [], []
    for step in range(10, 13):
        seen.append(policy.select(step, load([3, 1, 4, 2]), TWO))
        frozen.append(len(policy.frozen))
    assert seen == [
        (Expert(0, 1), Expert(0, 3)),
        (Expert(0, 0), Expert(0, 2)),
        (NonExpert("attention"), Gate(0)),
    ]
    assert frozen == [4, 2, 0]


def test_experts_that_nothing_is_routed_to_have_their_turn_too() -> None:
    policy = MoEvement(LAYER)
    found = [policy.select(step, load([0, 0, 0, 0]), TWO) for step in range(3)]
    assert found[0] == (Expert(0, 0), Expert(0, 1))
    assert Counter(operator for step in found for operator in step) == dict.fromkeys(LAYER, 1)


def order_after(*tokens: list[float]) -> list[int]:
    """Experts in the order of the last window, when each window has other tokens."""
    policy, everything = MoEvement(LAYER), Budget()
    for step, layer in enumerate(tokens):
        found = policy.select(step, load(layer), everything)
    return [operator.index for operator in found if isinstance(operator, Expert)]


def test_the_order_stays_until_a_quarter_of_the_experts_is_a_tenth_off() -> None:
    before = [240.0, 250.0, 250.0, 260.0]
    assert order_after(before) == [0, 1, 2, 3]
    # All shares stay within a tenth, also where tokens add up.
    assert order_after(before, [260, 250, 250, 240]) == [0, 1, 2, 3]
    assert order_after(before, [2600, 2500, 2500, 2400]) == [0, 1, 2, 3]
    # One of four, which is a quarter.
    assert order_after([101, 100, 300, 500], [85, 100, 310, 505]) == [0, 1, 2, 3]
    assert order_after([101, 100, 300, 500]) == [1, 0, 2, 3]


def test_little_more_than_a_tenth_is_a_change_and_little_less_is_none() -> None:
    before = [200.0, 202.0, 298.0, 300.0]
    assert order_after(before, [222, 202, 287, 289]) == [1, 0, 2, 3]  # a share of 20% becomes 22.2%
    assert order_after(before, [218, 202, 289, 291]) == [0, 1, 2, 3]  # 21.8%


def test_a_slow_drift_is_measured_from_the_last_ordering() -> None:
    """Each window is less than a tenth off the one before; the fourth is off the first."""
    drift = [[100.0 * 1.05**window, 110.0, 200.0, 300.0] for window in range(5)]
    assert order_after(*drift[:2]) == [0, 1, 2, 3]
    assert order_after(*drift) == [1, 0, 2, 3]


def test_an_expert_that_comes_into_use_has_changed() -> None:
    assert order_after([5, 5, 5, 0], [1, 5, 5, 4]) == [0, 3, 1, 2]


def test_the_same_step_is_the_same_selection() -> None:
    policy = MoEvement(LAYER)
    first = policy.select(0, load([3, 1, 4, 2]), TWO)
    assert policy.select(0, load([3, 1, 4, 2]), TWO) == first
    assert policy.select(1, load([3, 1, 4, 2]), TWO) != first


def test_a_window_ends_as_it_began() -> None:
    """A budget that changes on the way holds from the next window on."""
    policy, popularity = MoEvement(LAYER), load([3, 1, 4, 2])
    found = [policy.select(0, popularity, TWO)]
    found += [policy.select(step, popularity, Budget()) for step in range(1, 4)]
    assert [len(step) for step in found] == [2, 2, 2, 6]


def test_no_operators() -> None:
    policy = MoEvement({})
    assert policy.select(0, Popularity((), (), ()), TWO) == ()
    assert policy.frozen == ()
    assert policy.window is None


def test_a_budget_below_one_operator_is_reported_not_to_fit() -> None:
    policy = MoEvement(LAYER)
    assert len(policy.select(0, load([3, 1, 4, 2]), Budget(snapshot_bytes=1))) == 1
    assert policy.window is not None
    assert (policy.window.window, policy.window.fits) == (6, False)


@given(st.data(), st.integers(20, 200))
def test_every_window_saves_every_operator_once(data: st.DataObject, snapshot_bytes: int) -> None:
    layers = mixture(3, 5)
    operators: dict[Operator, OperatorBytes] = {
        Expert(place, index): OperatorBytes(data.draw(st.integers(2, 30)), 1)
        for place, layer in enumerate(layers)
        for index in range(layer.experts)
    }
    policy = MoEvement(operators | {Gate(0): SIZE, NonExpert("norm"): SIZE})
    steps = itertools.count()
    for _ in range(3):
        saved: Counter[Operator] = Counter()
        while not saved or policy.frozen:
            saved.update(policy.select(next(steps), data.draw(loads(layers)), Budget(snapshot_bytes)))
        assert saved == dict.fromkeys([*operators, Gate(0), NonExpert("norm")], 1)


@pytest.mark.parametrize("tokens", [[3, 1], [3, 1, 4, numpy.nan], [3, 1, 4, -2]])
def test_scores_that_do_not_fit_are_refused(tokens: list[float]) -> None:
    with pytest.raises(ValueError, match="scores"):
        MoEvement(LAYER).select(0, load(tokens), TWO)
