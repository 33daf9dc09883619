"""Medians, ratios and their bootstrap intervals."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.harness.intervals import median_interval, median_ratio_interval

SAMPLES = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40)


@given(SAMPLES)
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    estimate = median_interval(samples)
    assert estimate.value == pytest.approx(numpy.median(samples))
    assert min(samples) <= estimate.low <= estimate.high <= max(samples)
    assert estimate == median_interval(samples)


def test_a_95_percent_interval_covers_the_true_median_about_that_often() -> None:
    draw = numpy.random.default_rng(1)
    intervals = [median_interval(draw.normal(3.0, 1.0, 30).tolist()) for _ in range(100)]
    covered = sum(interval.low <= 3.0 <= interval.high for interval in intervals)
    assert 88 <= covered <= 100


def test_rounds_stay_together() -> None:
    # Every round is ten times slower or not; on both sides of the ratio, so that it does not move at all.
    slowness = [1.0, 10.0] * 15
    estimate = median_ratio_interval([2 * value for value in slowness], slowness)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))
    # Of medians, and not the median of ratios.
    assert median_ratio_interval([2.0, 4.0, 9.0], [1.0, 4.0, 2.0]).value == pytest.approx(4.0 / 2.0)


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])
    with pytest.raises(ValueError, match="not paired"):
        median_ratio_interval([1.0, 2.0], [1.0])
