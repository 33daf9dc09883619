"""Medians, ratios and their bootstrap intervals."""

import numpy
import pytest

from cpsr.benchmarks.harness.intervals import median_interval, median_ratio_interval


def test_a_95_percent_interval_holds_the_median_and_covers_the_true_one_about_that_often() -> None:
    draw = numpy.random.default_rng(1)
    samples = [draw.normal(3.0, 1.0, 30).tolist() for _ in range(100)]
    intervals = [median_interval(one) for one in samples]
    assert [one.value for one in intervals] == [pytest.approx(numpy.median(one)) for one in samples]
    assert 88 <= sum(interval.low <= 3.0 <= interval.high for interval in intervals) <= 100
    assert median_interval([2.0]).high == 2.0


def test_rounds_stay_together() -> None:
    # Every round is ten times slower or not; on both sides of the ratio, so that it does not move at all.
    slowness = [1.0, 10.0] * 15
    estimate = median_ratio_interval([2 * value for value in slowness], slowness)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))
    # Of medians, and not the median of ratios.
    assert median_ratio_interval([2.0, 4.0, 9.0], [1.0, 4.0, 2.0]).value == pytest.approx(4.0 / 2.0)
