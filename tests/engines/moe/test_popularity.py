"""Popularity: what is refused, shares, who is overdue."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import OVERDUE_ROUNDS, Popularity, overdue, per_expert, shares
from cpsr.experts.budget import Budget
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.policy import Policy
from tests.engines.moe.mixtures import load, loads, mixture, mixtures


def test_numbers_are_copied() -> None:
    given_by_caller = numpy.array([1.0, 2.0])
    taken = per_expert(mixture(2), [given_by_caller], "tokens")
    given_by_caller[0] = 9
    assert taken[0].tolist() == [1, 2]


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


def test_shares_of_a_layer_to_which_nothing_was_routed_are_equal() -> None:
    found = shares((numpy.array([0.0, 0.0, 0.0, 0.0]), numpy.array([0.0, 3.0, 1.0])))
    assert [layer.tolist() for layer in found] == [[0.25] * 4, [0, 0.75, 0.25]]


@given(st.data())
def test_shares_of_a_layer_are_a_whole(data: st.DataObject) -> None:
    layers: tuple[ExpertLayer, ...] = data.draw(mixtures())
    for part in shares(data.draw(loads(layers)).scores):
        assert part.sum() == pytest.approx(1)
        assert (part >= 0).all()


@pytest.mark.parametrize("make", [LoadAware, Moetion, partial(Moetion, every_rank=True)])
@pytest.mark.parametrize(
    ("popularity", "message"),
    [
        (load([1, 2, 3]), "unsaved tokens of 1 layers were given"),
        (load([1, 2, 3], [1]), "unsaved tokens of layer 'blocks.1' have shape"),
        (load([1, numpy.nan, 3], [1, 2]), "unsaved tokens of layer 'blocks.0' must be finite"),
        (load([1, 2, 3], [1, 2], ages=[[0, 0, 0], [0, 0, 0]]), "ages of layer 'blocks.1' have shape"),
        (load([1, 2, 3], [1, 2], ages=[[0, numpy.nan, 0], [0, 0]]), "ages of layer 'blocks.0' must be finite"),
    ],
)
def test_policies_refuse_what_does_not_fit_their_layers(
    make: Callable[[Sequence[ExpertLayer]], Policy], popularity: Popularity, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(mixture(3, 2)).select(0, popularity, Budget(experts_per_layer=1))


def test_the_oldest_is_overdue_from_so_many_rounds_on() -> None:
    ages = numpy.array([[OVERDUE_ROUNDS * 3 - 1, 0, 1], [5, OVERDUE_ROUNDS * 3, OVERDUE_ROUNDS * 3]])
    assert overdue(ages, [3, 3]).tolist() == [[False] * 3, [False, True, False]]
    assert overdue(ages[1], 4).tolist() == [False] * 3
