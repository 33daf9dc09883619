import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.live.expectations import INTERVALS_ITERATIONS, predictable
from cpsr.planner.recovery_curve import OBSERVATIONS_MAX, CostObservation


def seen(interval: float, cost: float, horizon: float = 30.0, error: float = 0.0) -> CostObservation:
    return CostObservation(horizon, interval, cost, error)


def bound(*costs: CostObservation, longest: int = 200) -> int | None:
    return predictable(longest, costs).interval_iterations


BAD, GOOD = 45.0, 5.0  # beside a horizon of 30


def test_lags_above_the_horizon_lower_it_below_the_interval_that_they_were_measured_at() -> None:
    """Four of four: the Beta posterior of their share is above a half with 1 - 1/2^5 = 97%; three leave 6%."""
    assert bound(*[seen(140, BAD)] * 3) == 200
    assert bound(*[seen(140, BAD)] * 4) == 100, "140 is in the class above 100 and up to 150"
    assert bound(*[seen(150, BAD)] * 4) == 100
    assert bound(*[seen(151, BAD)] * 4) == 150


def test_good_lags_hold_it() -> None:
    assert bound(*[seen(140, BAD)] * 4, *[seen(140, GOOD)] * 4) == 200
    assert bound(*[seen(140, GOOD)] * 4) == 200
    assert bound(*[seen(140, BAD)] * 4, seen(190, GOOD), seen(200, GOOD)) == 200, "over longer intervals as well"


def test_bad_lags_over_shorter_intervals_are_evidence_against_longer_ones() -> None:
    assert bound(*[seen(50, BAD)] * 2, *[seen(140, BAD)] * 2) == 100
    assert bound(*[seen(50, BAD)] * 4) == 35


def test_a_rough_measurement_counts_by_how_sure_its_side_is() -> None:
    assert bound(*[seen(140, BAD, error=1.0)] * 4) == 100
    assert bound(*[seen(140, BAD, error=50.0)] * 4) == 200
    assert bound(*[seen(140, BAD, error=50.0)] * 20) == 100
    assert bound(*[seen(140, 30.0, error=50.0)] * 60) == 200, "on the horizon: neither"


def test_it_comes_back_as_measurements_pass() -> None:
    bad, good = [seen(140, BAD)] * 4, [seen(90, GOOD)] * OBSERVATIONS_MAX
    assert bound(*bad, *good[:60]) == 100
    assert bound(*bad, *good) == 200


LAGS = st.lists(st.builds(seen, st.floats(1, 600), st.floats(-500, 500), st.floats(0, 200), st.floats(0, 100)))


@given(LAGS, st.sampled_from(INTERVALS_ITERATIONS), st.floats(1, 600))
def test_a_recovery_without_use_never_raises_it_and_one_of_use_never_lowers_it(
    costs: list[CostObservation], longest: int, interval: float
) -> None:
    costs = costs[: OBSERVATIONS_MAX - 1]  # or the oldest is forgotten
    before = bound(*costs, longest=longest) or 0
    worse = bound(*costs, seen(interval, BAD), longest=longest) or 0
    better = bound(*costs, seen(interval, GOOD), longest=longest) or 0
    assert worse <= before <= better <= longest


@pytest.mark.parametrize(("share", "at_most"), [(0.2, 0.02), (0.5, 0.2)])
def test_how_often_it_is_lowered_though_most_recoveries_are_of_use(share: float, at_most: float) -> None:
    """Looked at after each of 30 recoveries. At a half, the worst case, one run of five has four of the first ones."""
    draw = random.Random(3)
    lowered = 0
    for _ in range(100):
        costs = [seen(140, BAD if draw.random() < share else GOOD) for _ in range(30)]
        lowered += any(bound(*costs[:count]) != 200 for count in range(1, 31))
    assert lowered / 100 <= at_most
