"""The lag of a recovery: its loss gap soon after the restart, over the slope of the run's own loss.

It tells the end cost to some 27 iterations (`cpsr.fitter.end_cost`), and no more.
"""

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from cpsr.fitter.lag import SLOPE_STANDARD_ERRORS
from cpsr.fitter.straight_line import StraightLine

__all__ = ["SLOPE_LOSSES_MAX", "SLOPE_LOSSES_MIN", "measure_unpaired"]

# The slope is local: from at most this many iterations, and at least the minimum; its own error decides whether it
# differs from zero.
SLOPE_LOSSES_MAX = 400
SLOPE_LOSSES_MIN = 100
# Losses from before half of a run's age bend the fitted course: with them the slope at iteration 300 came out 2.4 times
# too steep, without them at most 1.2 times, on eight runs.
OLDEST_SHARE = 0.5
# Fewer losses after a recovery than this are not evaluated.
AFTER_LOSSES_MIN = 10
# A higher autocorrelation of the noise would leave almost no independent points.
AUTOCORRELATION_MAX = 0.9

_Array = NDArray[numpy.float64]


def _recent(iterations: Sequence[int], losses: Sequence[float]) -> tuple[_Array, _Array]:
    """The losses from half of the newest iteration on: a young run's loss curve bends too much before."""
    times = numpy.asarray(iterations, dtype=numpy.float64)
    values = numpy.asarray(losses, dtype=numpy.float64)
    recent = times > OLDEST_SHARE * times[-1] if len(times) else numpy.zeros(0, dtype=bool)
    return times[recent], values[recent]


def measure_unpaired(
    before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]
) -> tuple[float, float] | None:
    """Lag of a real recovery from training losses alone: `after` against the course of `before`, continued.

    Args:
        before: iterations (positive, ascending) and losses in nats before the failure.
        after: iterations and losses after it, once the transient is over.

    Returns:
        Lag and standard error in iterations, that of the continued course included. None with fewer than 100 losses
        before or 10 after, with a loss that is not finite, or without a significant slope.
    """
    times, values = _recent([at for at, _ in before], [loss for _, loss in before])
    if len(times) < SLOPE_LOSSES_MIN or len(after) < AFTER_LOSSES_MIN:
        return None
    later, losses = (numpy.array(column, dtype=numpy.float64) for column in zip(*after, strict=True))
    if not (numpy.isfinite(values).all() and numpy.isfinite(losses).all()):
        return None
    place, there = numpy.log(times), float(numpy.log(later).mean())
    fit = StraightLine.through(place, values)
    residuals = values - (fit.intercept + fit.slope * place)
    course_error = fit.slope_error * _inflation(residuals)
    at = float(later.mean())
    slope, slope_error = -fit.slope / at, course_error / at
    if not slope > SLOPE_STANDARD_ERRORS * slope_error:
        return None
    gap = float(losses.mean()) - (fit.intercept + fit.slope * there)
    error = math.hypot(
        _standard_error(losses), _standard_error(residuals), course_error * (there - float(place.mean()))
    )
    lag = gap / slope
    return float(lag), math.hypot(error, lag * slope_error) / slope


def _standard_error(values: _Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) * _inflation(values - values.mean())


def _inflation(residuals: _Array) -> float:
    """Factor on the error of a mean for noise that is correlated between iterations."""
    scatter = float(residuals @ residuals)
    if scatter == 0.0:
        return 1.0
    correlation = min(max(float(residuals[1:] @ residuals[:-1]) / scatter, 0.0), AUTOCORRELATION_MAX)
    return math.sqrt((1.0 + correlation) / (1.0 - correlation))
