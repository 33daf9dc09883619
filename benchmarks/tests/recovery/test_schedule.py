"""What the schedules of the learning rate promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.recovery.schedule import SCHEDULES, WARM_UP_ITERATIONS, Schedule, scheduled_rate

LENGTH, PEAK = 1000, 2e-3


@given(st.sampled_from(SCHEDULES), st.integers(0, 2 * LENGTH))
def test_a_rate_is_between_nothing_and_the_peak(schedule: Schedule, iteration: int) -> None:
    assert 0.0 <= scheduled_rate(schedule, PEAK, iteration, LENGTH) <= PEAK


@given(st.sampled_from(SCHEDULES), st.integers(WARM_UP_ITERATIONS, LENGTH - 1))
def test_after_the_warm_up_it_never_rises(schedule: Schedule, iteration: int) -> None:
    now, then = (scheduled_rate(schedule, PEAK, at, LENGTH) for at in (iteration, iteration + 1))
    assert then <= now


@pytest.mark.parametrize(("schedule", "share"), [("constant", 1.0), ("cosine", 0.0), ("cosine10", 0.1), ("wsd", 0.0)])
def test_where_it_ends(schedule: Schedule, share: float) -> None:
    assert scheduled_rate(schedule, PEAK, LENGTH, LENGTH) == pytest.approx(share * PEAK)


def test_wsd_stays_until_the_last_fifth() -> None:
    rates = [scheduled_rate("wsd", PEAK, at, LENGTH) for at in (100, 799, 900)]
    assert rates == pytest.approx([PEAK, PEAK, PEAK / 2])
