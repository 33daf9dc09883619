"""How a recovered run follows the one that never failed: its lag after a while, and the transient before it.

The lag is no measure of what a failure costs in the end: a lower effective rate for a while looks like a lead. That
is `end_cost`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import scipy  # its parts are loaded at their first use: a restart does not wait for them
from numpy.typing import NDArray

from cpsr.fitter.curve import LossCurve

__all__ = ["SLOPE_STANDARD_ERRORS", "Lag", "LagBeyondError", "StraightLine", "Transient", "paired_lag", "transient"]

# Half a window: a spline with such knots follows how the loss bends, not the noise of single evaluations.
KNOT_ITERATIONS = 100
# Evaluations per stretch between knots, so that each coefficient rests on several.
POINTS_PER_KNOT = 4
CUBIC = 3
MIN_WINDOW_POINTS = 5
# The recovered curve must fill the window up to this share at each end.
WINDOW_SLACK = 0.15
# A slope differs from zero at three of its standard errors.
SLOPE_STANDARD_ERRORS = 3.0
# The best shift is looked for among this many, then refined.
GRID_SHIFTS = 101
# Minimiser's precision, far below any standard error met.
SHIFT_TOLERANCE_ITERATIONS = 1e-3
# A transient is over only if this many evaluations in a row, to the end of the data, show it.
SETTLED_POINTS = 3

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class StraightLine:
    """The line of least squares, `intercept + slope * place`.

    Attributes:
        slope: of the line.
        intercept: its value at 0.
        slope_error: standard error of the slope, of noise that is independent and equal for all points.
    """

    slope: float
    intercept: float
    slope_error: float

    @classmethod
    def through(cls, places: _Array, values: _Array) -> "StraightLine":
        """Fit the line.

        Args:
            places: of the points, `(points,)`; at least three of them differ.
            values: there, `(points,)`.
        """
        middle = float(places.mean())
        (slope, level), covariance = numpy.polyfit(places - middle, values, 1, cov=True)
        return cls(float(slope), float(level - slope * middle), float(numpy.sqrt(covariance[0, 0])))


class LagBeyondError(ValueError):
    """The recovered run lies further behind or ahead than was looked for.

    Attributes:
        bound_iterations: the end of what was looked for on that side: the lag is at least as far from zero.
    """

    def __init__(self, message: str, bound_iterations: float) -> None:
        super().__init__(message)
        self.bound_iterations = bound_iterations


@dataclass(frozen=True)
class Lag:
    """How far a recovered run is behind in a window after the failure.

    Attributes:
        iterations: the lag; positive is behind the fault-free run.
        standard_error: of `iterations`, by jackknife over validation chunks; NaN with one chunk.
        local_iterations: cross-check by the gap over the slope; it agrees where the curve is nearly straight.
        gap_nats: mean paired loss gap over the window, recovered minus fault-free.
        gap_standard_error: of `gap_nats`, by the same jackknife.
        slope_nats_per_iteration: mean descent of the smoothed fault-free loss over the window, positive.
        points: evaluations of the recovered run in the window.
        window: first and last iteration of the window, counted from the failure.
    """

    iterations: float
    standard_error: float
    local_iterations: float
    gap_nats: float
    gap_standard_error: float
    slope_nats_per_iteration: float
    points: int
    window: tuple[int, int]


@dataclass(frozen=True)
class Transient:
    """What passes after a recovery.

    Attributes:
        gap_nats: paired loss gap right at injection.
        gap_standard_error: of `gap_nats`, by jackknife over validation chunks; NaN with one chunk.
        iterations: until the paired gap is gone and stays so; None if it is not within the data (a lag that persists
            keeps a gap open).
        tolerance_nats: what counted as gone.
    """

    gap_nats: float
    gap_standard_error: float
    iterations: int | None
    tolerance_nats: float


def paired_lag(
    recovered: LossCurve,
    faultfree: LossCurve,
    failure_iteration: int,
    window: tuple[int, int] = (60, 160),
    max_lag_iterations: int = 200,
) -> Lag:
    """Shift in iterations that best aligns the recovered curve with the smoothed fault-free one.

    Both curves are means over the chunks. The lag is the `s` that minimises the squared difference of
    `L_recovered(f + r)` and `L_faultfree(f + r - s)` over `r` in the window. The fault-free curve is smoothed by a
    least-squares cubic spline.

    The standard error covers which validation data the losses were measured on, with the pairing of both curves
    kept. It does **not** cover the noise of training (another seed, other batches, another failure point): repeat the
    recovery at several failure points for that.

    Args:
        recovered: losses after resuming; iterations count as in the fault-free run (resuming at f).
        faultfree: losses of the run that never failed, on the same chunks. It has at least the recovered curve's
            iterations in the window, and those as far around them as the lag reaches.
        failure_iteration: f.
        window: first and last r; the transient lies before it.
        max_lag_iterations: largest lag looked for, either way.

    Raises:
        LagBeyondError: the best shift lies at the edge of what is looked for, or of what the fault-free curve covers.
        ValueError: points are missing, chunks differ, or the curve is too flat to measure time by.
    """
    first, last = window
    if not 0 <= first < last or max_lag_iterations < 1:
        raise ValueError(f"window {window} must ascend from 0 or later, max_lag_iterations be 1 or more")
    inside = _window_points(recovered, faultfree, failure_iteration, window)
    gaps = inside.losses - faultfree.at(inside.iterations)
    begin, end = failure_iteration + first, failure_iteration + last
    around = faultfree.between(begin - max_lag_iterations, end + max_lag_iterations)
    spline = _spline(around)
    # One knot further to both sides: training noise hides the slope of a short stretch that falls steadily.
    _refuse_flat(faultfree.between(begin - KNOT_ITERATIONS, end + KNOT_ITERATIONS), begin)

    bounds = (
        max(float(inside.iterations[-1] - around.iterations[-1]), -float(max_lag_iterations)),
        min(float(inside.iterations[0] - around.iterations[0]), float(max_lag_iterations)),
    )

    def lag_of(chunks: _Array) -> float:
        return _best_shift(spline, chunks, inside, bounds)

    count = gaps.shape[1]
    everything = numpy.full(count, 1.0 / count)
    lag = lag_of(everything)
    _refuse_beyond(lag, bounds, around, max_lag_iterations)
    descent = -spline(inside.iterations, 1) @ everything
    return Lag(
        iterations=lag,
        standard_error=_jackknife(lag_of, count),
        local_iterations=float(numpy.mean(gaps @ everything) / numpy.mean(descent)),
        gap_nats=float(gaps.mean()),
        gap_standard_error=_jackknife(lambda chunks: float(numpy.mean(gaps @ chunks)), count),
        slope_nats_per_iteration=float(numpy.mean(descent)),
        points=len(inside.iterations),
        window=window,
    )


def transient(
    recovered: LossCurve, faultfree: LossCurve, failure_iteration: int, tolerance_nats: float = 0.01
) -> Transient:
    """Loss gap right at injection, and iterations until the paired gap is gone and stays so.

    Gone: the gap is at most `tolerance_nats` at that evaluation and at every later one in the data, three
    at least.

    Raises:
        ValueError: the recovered curve has no point at the failure iteration, the fault-free curve lacks one of the
            recovered curve's iterations, or chunks differ.
    """
    after = recovered.between(failure_iteration, float(recovered.iterations[-1]))
    if not len(after.iterations) or after.iterations[0] != failure_iteration:
        raise ValueError(f"the recovered curve has no point right at injection (iteration {failure_iteration})")
    _same_chunks(recovered, faultfree)
    gaps = after.losses - faultfree.at(after.iterations)
    mean_gaps = gaps.mean(axis=1)
    open_at = numpy.flatnonzero(mean_gaps > tolerance_nats)
    settled = int(open_at[-1]) + 1 if open_at.size else 0
    gone = len(mean_gaps) - settled >= SETTLED_POINTS
    return Transient(
        gap_nats=float(mean_gaps[0]),
        gap_standard_error=_jackknife(lambda chunks: float(gaps[0] @ chunks), gaps.shape[1]),
        iterations=int(after.iterations[settled] - failure_iteration) if gone else None,
        tolerance_nats=tolerance_nats,
    )


def _same_chunks(recovered: LossCurve, faultfree: LossCurve) -> None:
    if recovered.losses.shape[1] != faultfree.losses.shape[1]:
        raise ValueError(
            f"the curves have {recovered.losses.shape[1]} and {faultfree.losses.shape[1]} validation chunks; "
            "a paired comparison needs the same ones"
        )


def _window_points(
    recovered: LossCurve, faultfree: LossCurve, failure_iteration: int, window: tuple[int, int]
) -> LossCurve:
    _same_chunks(recovered, faultfree)
    first, last = window
    inside = recovered.between(failure_iteration + first, failure_iteration + last)
    if len(inside.iterations) < MIN_WINDOW_POINTS:
        raise ValueError(
            f"the recovered curve has {len(inside.iterations)} points {first} to {last} iterations after "
            f"{failure_iteration}; {MIN_WINDOW_POINTS} are needed"
        )
    slack = WINDOW_SLACK * (last - first)
    covered = inside.iterations[0] - failure_iteration, inside.iterations[-1] - failure_iteration
    if covered[0] > first + slack or covered[1] < last - slack:
        raise ValueError(f"the recovered curve covers {covered[0]} to {covered[1]} of the window {first} to {last}")
    return inside


def _spline(curve: LossCurve) -> "scipy.interpolate.BSpline":
    """Least-squares cubic spline of every chunk at once; linear in the losses, so means of it are splines of means."""
    times = curve.iterations.astype(numpy.float64)
    needed = 2 * (CUBIC + 1)
    if len(times) < needed:
        raise ValueError(f"the fault-free curve has {len(times)} points around the window; {needed} are needed")
    stretches = max(1, min(int((times[-1] - times[0]) / KNOT_ITERATIONS), len(times) // POINTS_PER_KNOT - 1))
    # Knots at quantiles of the points: also where evaluations are uneven every stretch has its share.
    inner = numpy.quantile(times, numpy.linspace(0.0, 1.0, stretches + 1)[1:-1])
    knots = numpy.concatenate([[times[0]] * (CUBIC + 1), inner, [times[-1]] * (CUBIC + 1)])
    return scipy.interpolate.make_lsq_spline(times, curve.losses, knots, k=CUBIC)


def _refuse_flat(curve: LossCurve, begin: int) -> None:
    if len(curve.iterations) < MIN_WINDOW_POINTS:
        raise ValueError(f"the fault-free curve has {len(curve.iterations)} points in the window from {begin}")
    fit = StraightLine.through(curve.iterations.astype(numpy.float64), curve.losses.mean(axis=1))
    if not -fit.slope > SLOPE_STANDARD_ERRORS * fit.slope_error or fit.slope == 0.0:
        raise ValueError(
            f"the fault-free curve is flat from iteration {begin}: it falls by {-fit.slope:.2e} +- "
            f"{fit.slope_error:.1e} nats an iteration: a gap cannot be expressed in iterations; compare gaps in "
            "nats, or lengthen the window"
        )


def _refuse_beyond(lag: float, bounds: tuple[float, float], around: LossCurve, max_lag_iterations: int) -> None:
    if bounds[0] + 1.0 < lag < bounds[1] - 1.0:
        return
    raise LagBeyondError(
        f"the best shift ({lag:.1f} iterations) lies at the edge of the range ({bounds[0]:.0f} to "
        f"{bounds[1]:.0f}): the fault-free curve covers iterations {around.iterations[0]} to {around.iterations[-1]} "
        f"of what was asked for, with max_lag_iterations = {max_lag_iterations}",
        min(bounds, key=lambda bound: abs(bound - lag)),
    )


def _best_shift(
    spline: "scipy.interpolate.BSpline", chunks: _Array, inside: LossCurve, bounds: tuple[float, float]
) -> float:
    target = inside.losses @ chunks
    mean = scipy.interpolate.BSpline(spline.t, spline.c @ chunks, spline.k)

    def misfit(shift: float) -> float:
        return float(numpy.mean((target - mean(inside.iterations - shift)) ** 2))

    grid = numpy.linspace(*bounds, GRID_SHIFTS)
    best = int(numpy.argmin([misfit(shift) for shift in grid]))
    near = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, GRID_SHIFTS - 1)])
    return float(
        scipy.optimize.minimize_scalar(
            misfit, bounds=near, method="bounded", options={"xatol": SHIFT_TOLERANCE_ITERATIONS}
        ).x
    )


def _jackknife(statistic: Callable[[_Array], float], count: int) -> float:
    """Standard error of `statistic`, a function of chunk weights, leaving out one chunk at a time."""
    if count < 2:
        return float("nan")
    values = []
    for left_out in range(count):
        weights = numpy.full(count, 1.0 / (count - 1))
        weights[left_out] = 0.0
        values.append(statistic(weights))
    spread = numpy.asarray(values) - numpy.mean(values)
    return float(numpy.sqrt((count - 1) / count * numpy.sum(spread**2)))
