"""Skew: the ends of its range, what does not change it, and the paper's figures."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.experts.skew import dirichlet_concentration, skew

COUNTS = st.lists(st.integers(0, 10**6), min_size=2, max_size=64)


def test_the_ends() -> None:
    assert skew([7] * 64) == 0
    assert skew([0, 0, 12, 0]) == pytest.approx(1)
    assert skew([3, 1]) == pytest.approx(0.25)  # (9/16 + 1/16 - 1/2) / (1/2)


@given(COUNTS)
def test_it_lies_between_them_and_knows_neither_order_nor_unit(counts: list[int]) -> None:
    found = skew(counts)
    assert 0 <= found <= 1 + 1e-12
    assert skew(sorted(counts)) == pytest.approx(found, abs=1e-12)
    assert skew([0.125 * count for count in counts]) == pytest.approx(found, abs=1e-12)


@given(COUNTS, st.data())
def test_tokens_that_move_to_a_more_popular_expert_raise_it(counts: list[int], data: st.DataObject) -> None:
    low, high = min(counts), max(counts)
    moved = data.draw(st.integers(0, low))
    after = sorted(counts)
    after[0], after[-1] = low - moved, high + moved
    assert skew(after) >= skew(counts) - 1e-12


@pytest.mark.parametrize("counts", [[0, 0, 0], [5], [0]])
def test_where_the_formula_says_nothing_there_is_none(counts: list[int]) -> None:
    assert skew(counts) == 0


def test_counts_whose_squares_overflow() -> None:
    assert skew([1e200, 1e200]) == 0


@pytest.mark.parametrize("counts", [[], [1, -1], [1, numpy.nan], [[1, 2], [3, 4]]])
def test_what_are_no_counts_is_refused(counts: list[float]) -> None:
    with pytest.raises(ValueError, match="skew needs"):
        skew(counts)


@pytest.mark.parametrize(("target", "alpha"), [(0.25, 0.0469), (0.5, 0.0156), (0.75, 0.0052), (0.99, 0.000158)])
def test_the_papers_concentrations_for_64_experts(target: float, alpha: float) -> None:
    assert dirichlet_concentration(target, 64) == pytest.approx(alpha, rel=0.005)  # three digits are printed


def test_draws_have_the_skew_on_average() -> None:
    alpha = dirichlet_concentration(0.25, 64)
    draws = numpy.random.default_rng(0).dirichlet([alpha] * 64, size=4000)
    found = [skew(draw) for draw in draws]
    error = numpy.std(found) / len(found) ** 0.5
    assert abs(numpy.mean(found) - 0.25) < 4 * error


@pytest.mark.parametrize(("target", "experts"), [(0, 8), (1, 8), (0.5, 1), (numpy.nan, 8)])
def test_a_skew_that_no_distribution_has_is_refused(target: float, experts: int) -> None:
    with pytest.raises(ValueError, match="needs a skew"):
        dirichlet_concentration(target, experts)
