"""Medians and their bootstrap intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy import stats

__all__ = ["CONFIDENCE", "Estimate", "median_interval", "median_ratio_interval", "median_sum_interval"]

CONFIDENCE = 0.95
RESAMPLES = 10_000  # the bounds then move by less than 1% of the interval's width from seed to seed
SEED = 0  # the same samples give the same interval


@dataclass(frozen=True)
class Estimate:
    """A median, or a figure made of some, with the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> Estimate:
    """The median and its percentile bootstrap interval.

    Raises:
        ValueError: there are no samples.
    """
    return median_ratio_interval(samples, [1.0] * len(samples))


def median_ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The ratio of two medians and its percentile bootstrap interval.

    Rounds are drawn, not values: what slowed a whole round down stays on both sides of the ratio.

    Args:
        numerators: one value a round.
        denominators: one value for each of the same rounds.

    Raises:
        ValueError: there are no samples, or not as many on both sides.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators and {len(denominators)} denominators are no paired samples")
    return _interval(numerators, denominators, _ratio, paired=True)


def median_sum_interval(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The sum of the medians of two independent samples, and its percentile bootstrap interval.

    Raises:
        ValueError: one is empty.
    """
    if not first or not second:
        raise ValueError(f"{len(first)} and {len(second)} samples have no two medians")
    return _interval(first, second, _sum, paired=False)


def _interval(first: Sequence[float], second: Sequence[float], of: Callable[..., Any], *, paired: bool) -> Estimate:
    value = float(of(first, second))
    if len(first) == len(second) == 1:
        return Estimate(value, value, value)
    found = stats.bootstrap(
        (first, second),
        of,
        paired=paired,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=numpy.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


def _sum(first: Any, second: Any, axis: int = -1) -> Any:
    return numpy.median(first, axis=axis) + numpy.median(second, axis=axis)


def _ratio(above: Any, below: Any, axis: int = -1) -> Any:
    return numpy.median(above, axis=axis) / numpy.median(below, axis=axis)
