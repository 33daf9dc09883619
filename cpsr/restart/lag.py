"""The lag of a recovery: its loss gap soon after the restart, over the slope of the run's own loss.

It tells the end cost to some 27 iterations (`cpsr.fitter.end_cost`), and no more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.fitter.lag import SLOPE_STANDARD_ERRORS
from cpsr.fitter.straight_line import StraightLine

__all__ = ["SLOPE_LOSSES_MAX", "SLOPE_LOSSES_MIN", "RehearsedLag", "measure_lag", "measure_unpaired"]

# The slope is local: from at most this many iterations, and at least the minimum; its own error decides whether it
# differs from zero.
SLOPE_LOSSES_MAX = 400
SLOPE_LOSSES_MIN = 100
# The first half of a rehearsal is the transient, the second shows what lasts.
WINDOW_FRACTION = 0.5
# The first tenth shows the gap right at injection.
FIRST_FRACTION = 0.1
# Losses from before half of a run's age bend the fitted course: with them the slope at iteration 300 came out 2.4 times
# too steep, without them at most 1.2 times, on eight runs.
OLDEST_SHARE = 0.5
# Fewer losses after a recovery than this are not evaluated.
AFTER_LOSSES_MIN = 10
# A higher autocorrelation of the noise would leave almost no independent points.
AUTOCORRELATION_MAX = 0.9

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class RehearsedLag:
    """Measurements of a rehearsal.

    Attributes:
        gap_nats: mean paired gap over the second half, rehearsed minus fault-free.
        gap_standard_error_nats: of `gap_nats`, from the spread of the iterations' gaps.
        first_gap_nats: mean paired gap over the first tenth.
        slope_nats_per_iteration: descent of the run's own loss there; negative where it rises.
        slope_standard_error: of that.
        lag_iterations: gap over slope, positive is behind; None where the slope does not differ from zero, or the
            gap is not finite (a loss of the run itself was not).
        standard_error_iterations: of `lag_iterations`.
        points: iterations in `gap_nats`.
    """

    gap_nats: float
    gap_standard_error_nats: float
    first_gap_nats: float
    slope_nats_per_iteration: float
    slope_standard_error: float
    lag_iterations: float | None
    standard_error_iterations: float | None
    points: int

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        gap = f"{self.gap_nats:+.4f} +- {self.gap_standard_error_nats:.4f} nats"
        if self.lag_iterations is None or self.standard_error_iterations is None:
            slope = f"{self.slope_nats_per_iteration:.1e} +- {self.slope_standard_error:.1e} nats an iteration"
            return f"{gap}; the lag is unknown: the loss falls by {slope}"
        lag = f"{self.lag_iterations:+.1f} +- {self.standard_error_iterations:.1f} iterations"
        return f"lag over its last {self.points} iterations: {lag} ({gap})"


def _recent(iterations: Sequence[int], losses: Sequence[float]) -> tuple[_Array, _Array]:
    """The losses from half of the newest iteration on: a young run's loss curve bends too much before."""
    times = numpy.asarray(iterations, dtype=numpy.float64)
    values = numpy.asarray(losses, dtype=numpy.float64)
    recent = times > OLDEST_SHARE * times[-1] if len(times) else numpy.zeros(0, dtype=bool)
    return times[recent], values[recent]


def measure_lag(gaps: Sequence[float], iterations: Sequence[int], losses: Sequence[float], at: float) -> RehearsedLag:
    """Lag of a rehearsal from its paired gaps and the run's training losses.

    The error covers the noise of the batches (with what each gap shares with the one before) and that of the slope. It
    does not cover how the lag differs from one failure point to another: that needs more rehearsals.

    Args:
        gaps: mean loss of each rehearsed iteration minus the known one, oldest first, in nats; at least 4.
        iterations: positive, ascending, of the run's own training losses around there.
        losses: those losses, in nats.
        at: iteration at which the slope is wanted: the middle of the second half.
    """
    first = max(1, round(FIRST_FRACTION * len(gaps)))
    late = numpy.asarray(gaps[math.floor(WINDOW_FRACTION * len(gaps)) :], dtype=numpy.float64)
    gap, gap_error = float(late.mean()), _standard_error(late)
    slope, slope_error = _descent(iterations, losses, at)
    known = slope > SLOPE_STANDARD_ERRORS * slope_error and math.isfinite(gap)
    lag = gap / slope if known else None
    return RehearsedLag(
        gap_nats=gap,
        gap_standard_error_nats=gap_error,
        first_gap_nats=float(numpy.mean(gaps[:first])),
        slope_nats_per_iteration=slope,
        slope_standard_error=slope_error,
        lag_iterations=lag,
        standard_error_iterations=None if lag is None else math.hypot(gap_error, lag * slope_error) / slope,
        points=len(late),
    )


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


def _descent(iterations: Sequence[int], losses: Sequence[float], at: float) -> tuple[float, float]:
    """Descent at an iteration and its standard error; (0, infinity) where there are too few losses.

    Fitted as `a + b log(iteration)`, which has as few parameters as a line. It bends as loss curves do early in
    training, where a line's slope over the past would be too steep for the present.
    """
    recent, values = _recent(iterations, losses)
    if len(values) < SLOPE_LOSSES_MIN:
        return 0.0, math.inf
    times = numpy.log(recent)
    fit = StraightLine.through(times, values)
    residuals = values - (fit.intercept + fit.slope * times)
    return -fit.slope / at, fit.slope_error * _inflation(residuals) / at


def _standard_error(values: _Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) * _inflation(values - values.mean())


def _inflation(residuals: _Array) -> float:
    """Factor on the error of a mean for noise that is correlated between iterations."""
    scatter = float(residuals @ residuals)
    if scatter == 0.0:
        return 1.0
    correlation = min(max(float(residuals[1:] @ residuals[:-1]) / scatter, 0.0), AUTOCORRELATION_MAX)
    return math.sqrt((1.0 + correlation) / (1.0 - correlation))
