from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.live.rank_costs import RankCosts, second_moment_share

COSTS = RankCosts(100, 3, 0.02, 0.2, 1000, 1e-6)


def test_every_rank_counts_by_its_weights() -> None:
    other = replace(COSTS, parameters=3000, mean_second_moment=5e-6)
    assert second_moment_share([COSTS, other]) == pytest.approx((1000 * 1e-6 + 3000 * 5e-6) / 4000 / 1e-6)
    assert second_moment_share([other, COSTS]) == pytest.approx(4 / 5)


def test_ranks_that_keep_none_are_left_out() -> None:
    none = replace(COSTS, parameters=10**9, mean_second_moment=None)
    assert second_moment_share([COSTS, none, replace(COSTS, mean_second_moment=3e-6)]) == pytest.approx(2)


@pytest.mark.parametrize("own", [None, 0.0, float("nan"), float("inf")])
def test_there_is_no_share_of_what_the_first_rank_does_not_have(own: float | None) -> None:
    assert second_moment_share([replace(COSTS, mean_second_moment=own), COSTS]) is None


@pytest.mark.parametrize("other", [float("nan"), float("inf")])
def test_a_moment_that_is_no_number_makes_no_share(other: float) -> None:
    assert second_moment_share([COSTS, replace(COSTS, mean_second_moment=other)]) is None


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-20, 1e20)), min_size=1, max_size=8))
def test_the_first_ranks_own_times_the_share_is_the_mean_of_all(ranks: list[tuple[int, float]]) -> None:
    costs = [replace(COSTS, parameters=parameters, mean_second_moment=moment) for parameters, moment in ranks]
    share = second_moment_share(costs)
    assert share is not None
    moments = [moment for _, moment in ranks]
    assert min(moments) * (1 - 1e-9) <= share * moments[0] <= max(moments) * (1 + 1e-9)
