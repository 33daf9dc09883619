"""Medians and their bootstrap intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

__all__ = ["Estimate", "median_interval", "median_ratio_interval"]

CONFIDENCE = 0.95
RESAMPLES = 10_000  # the bounds then move by less than 1% of the interval's width from seed to seed
SEED = 0  # the same samples give the same interval


@dataclass(frozen=True)
class Estimate:
    """A median with the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> Estimate:
    """The median and its percentile bootstrap interval.

    Raises:
        ValueError: there are no samples.
    """
    values = numpy.asarray(samples, dtype=float)
    return _bootstrap(values.size, lambda rows: numpy.median(values[rows], axis=-1))


def median_ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The ratio of two medians and its percentile bootstrap interval.

    Rounds are drawn, not values: what slowed a whole round down stays on both sides of the ratio.

    Args:
        numerators: one value a round.
        denominators: one value for each of the same rounds.

    Raises:
        ValueError: there are no samples, or not as many on both sides.
    """
    above, below = numpy.asarray(numerators, dtype=float), numpy.asarray(denominators, dtype=float)
    if above.size != below.size:
        raise ValueError(f"{above.size} numerators and {below.size} denominators are not paired")
    return _bootstrap(above.size, lambda rows: numpy.median(above[rows], axis=-1) / numpy.median(below[rows], axis=-1))


def _bootstrap(size: int, statistic: Callable[[NDArray[numpy.intp]], NDArray[numpy.float64]]) -> Estimate:
    if not size:
        raise ValueError("no samples")
    rows = numpy.random.default_rng(SEED).integers(size, size=(RESAMPLES, size))
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(statistic(rows), [tail, 1 - tail])
    return Estimate(float(statistic(numpy.arange(size))), float(low), float(high))
