import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.prior import choose, expected_lag_fraction, gain
from cpsr.predictor.protocol import HistoryEntry, Target

PEAK = 1e-3
RUN = 3000


def cosine(iteration: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * iteration / RUN))


def series(newest: int, interval: int, count: int = 100) -> list[HistoryEntry]:
    times = [0.0]
    for iteration in range(newest):
        times.append(times[-1] + cosine(iteration))
    iterations = range(max(newest - (count - 1) * interval, newest % interval), newest + 1, interval)
    return [HistoryEntry(i, times[i], cosine(i)) for i in iterations]


def target(iteration: int) -> Target:
    return Target(iteration, sum(cosine(i) for i in range(iteration)), PEAK)


def test_mid_training_takes_the_full_gain_from_the_checkpoint() -> None:
    chosen = choose(target(1542), series(1500, 50))
    assert chosen.window_iterations == 300
    assert (chosen.gain, chosen.base) == (2.0, 0.0)
    assert chosen.expected_lag_fraction == pytest.approx(0.18)


def test_a_quarter_in_at_interval_50_still_takes_the_full_gain() -> None:
    assert choose(target(792), series(750, 50)).gain == pytest.approx(2.0)


def test_a_quarter_in_and_far_ahead_steps_less() -> None:
    chosen = choose(target(830), series(750, 100, count=8))
    assert 1.0 <= chosen.gain <= 1.6
    assert chosen.expected_lag_fraction == pytest.approx(0.39, abs=0.05)
    assert choose(target(780), series(700, 100, count=8)).gain <= 1.5


def test_decayed_learning_rate_moves_to_the_line_with_less_gain() -> None:
    late = choose(target(2740), series(2700, 50))
    assert (late.gain, late.base) == (1.5, 1.0)
    between = choose(target(2340), series(2300, 50))
    assert 0.0 < between.base < 1.0
    assert 1.5 < between.gain < 2.0


def test_the_window_is_iterations_and_not_a_count() -> None:
    for interval in (20, 50, 100):
        assert choose(target(1510), series(1500, interval)).window_iterations == 300


def test_the_window_stretches_to_three_checkpoints() -> None:
    chosen = choose(target(1620), series(1600, 400))
    assert chosen.window_iterations == 800
    assert chosen.expected_lag_fraction == 1.0  # half the run's age: recomputing costs the same


def test_a_run_that_never_had_a_learning_rate_counts_as_not_decayed() -> None:
    entries = [HistoryEntry(i, 0.0, 0.0) for i in (100, 200, 300)]
    assert choose(Target(310, 0.0, 0.0), entries).base == 0.0


shares = st.floats(0, 20)


@given(shares, shares, shares, shares, st.floats(0, 1), st.floats(0, 1))
def test_gain_never_increases_and_stays_in_range(
    youth: float, more_youth: float, reach: float, more_reach: float, decayed: float, more_decayed: float
) -> None:
    before = gain(youth, reach, min(decayed, more_decayed))
    after = gain(youth + more_youth, reach + more_reach, max(decayed, more_decayed))
    assert 0.0 <= after <= before <= 2.0


@given(shares, shares, shares, shares, shares, shares)
def test_expected_lag_never_decreases(
    a: float, b: float, c: float, more_a: float, more_b: float, more_c: float
) -> None:
    before = expected_lag_fraction(a, b, c)
    after = expected_lag_fraction(a + more_a, b + more_b, c + more_c)
    assert 0.18 <= before <= after <= 1.0


@given(st.floats(0, 2), st.floats(0, 2), st.floats(-1e-6, 1e-6))
def test_gain_has_no_jumps(youth: float, reach: float, step: float) -> None:
    assert abs(gain(youth, reach, 0.3) - gain(abs(youth + step), abs(reach + step), 0.3)) < 1e-4


@given(
    st.lists(st.integers(0, 100_000), min_size=3, max_size=20, unique=True).map(sorted),
    st.integers(0, 50_000),
    st.floats(0, 1e-2),
    st.floats(0, 1e-2),
)
def test_every_history_gets_finite_settings(iterations: list[int], horizon: int, rate: float, peak: float) -> None:
    entries = [HistoryEntry(i, i * rate, rate) for i in iterations]
    failure = iterations[-1] + horizon
    chosen = choose(Target(failure, failure * rate, peak), entries)
    assert 0.0 <= chosen.gain <= 2.0
    assert 0.0 <= chosen.base <= 1.0
    assert 0.18 <= chosen.expected_lag_fraction <= 1.0
    assert chosen.window_iterations >= iterations[-1] - iterations[-3]
    later = choose(Target(failure + 10, (failure + 10) * rate, peak), entries)
    assert later.gain <= chosen.gain
