"""A known lag is measured within its error, and is unknown where the loss does not fall."""

import math
from collections.abc import Iterable

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.restart.lag import SLOPE_LOSSES_MIN, RehearsedLag, measure_lag

AT, POINTS, NOISE = 2000, 60, 0.02


def curve(iterations: Iterable[float], scale: float) -> list[float]:
    return [3.0 - scale * math.log(iteration) for iteration in iterations]


def rehearsed(lag: float, seed: int, scale: float = 0.5, correlated: float = 0.0) -> RehearsedLag:
    """Losses `3 - scale log(t)`; the rehearsed run is at t what the other was at t - lag."""
    random = numpy.random.default_rng(seed)
    past = numpy.arange(AT - 399, AT + 1)
    again = numpy.arange(AT - POINTS + 1, AT + 1)
    noise = random.normal(0.0, NOISE, POINTS)
    for place in range(1, POINTS):
        noise[place] += correlated * noise[place - 1]
    gaps = numpy.subtract(curve(again - lag, scale), curve(again, scale)) + noise
    losses = numpy.add(curve(past, scale), random.normal(0.0, NOISE, len(past)))
    return measure_lag(gaps.tolist(), past.tolist(), losses.tolist(), AT - POINTS / 4)


@pytest.mark.parametrize("correlated", [0.0, 0.6])
@pytest.mark.parametrize("lag", [-15.0, 0.0, 40.0])
def test_a_known_lag_is_found_within_its_error(lag: float, correlated: float) -> None:
    found = [rehearsed(lag, seed, correlated=correlated) for seed in range(200)]
    lags = numpy.array([item.lag_iterations for item in found], dtype=float)
    errors = numpy.array([item.standard_error_iterations for item in found], dtype=float)
    assert abs(lags.mean() - lag) < 4 * lags.std() / math.sqrt(len(lags)) + 0.02 * abs(lag)
    # Two of its errors cover what they should, for noise that follows itself too (30 points show that only so well).
    covered = numpy.mean(numpy.abs(lags - lag) < 2 * errors)
    assert covered > (0.9 if correlated == 0.0 else 0.8)
    assert found[0].points == POINTS // 2
    assert found[0].slope_nats_per_iteration == pytest.approx(0.5 / (AT - POINTS / 4), rel=0.5)


def test_the_lag_is_unknown_where_the_loss_is_flat_or_rises() -> None:
    for scale in (0.0, -0.5):
        found = rehearsed(10.0, seed=1, scale=scale)
        assert found.lag_iterations is None
        assert found.standard_error_iterations is None
        assert "the lag is unknown" in found.sentence
        assert math.isfinite(found.gap_nats)


def test_the_lag_is_unknown_from_too_few_losses() -> None:
    count = SLOPE_LOSSES_MIN - 1
    past = numpy.arange(1, count + 1)
    found = measure_lag([0.1] * 8, past.tolist(), curve(past, 1.0), 90.0)
    assert found.lag_iterations is None
    assert found.slope_standard_error == math.inf


def test_the_lag_is_unknown_where_a_loss_of_the_run_itself_was_not_finite() -> None:
    past = numpy.arange(100, 300)
    found = measure_lag([0.1] * 7 + [math.nan], past.tolist(), curve(past, 1.0), 280.0)
    assert found.lag_iterations is None
    assert math.isnan(found.gap_nats)


@given(st.lists(st.floats(-5.0, 5.0), min_size=8, max_size=80))
def test_the_gap_is_that_of_the_second_half(gaps: list[float]) -> None:
    past = numpy.arange(100, 300)
    found = measure_lag(gaps, past.tolist(), curve(past, 1.0), 280.0)
    late = gaps[len(gaps) // 2 :]
    assert found.gap_nats == pytest.approx(sum(late) / len(late), abs=1e-9)
    assert found.points == len(late)
    assert found.lag_iterations == pytest.approx(found.gap_nats * 280.0, abs=1e-6)  # the curve has no noise
