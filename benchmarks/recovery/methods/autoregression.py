"""Ridge autoregression on the velocities of one tensor: each from the ones before it, by a few scalars."""

import itertools
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from cpsr.predictor import prior
from cpsr.predictor.gram import gram
from cpsr.predictor.obstacles import too_far, too_few
from cpsr.predictor.protocol import History, HistoryEntry, Target
from cpsr.predictor.series import Series, distinct_times
from cpsr.predictor.series_predictor import Fit, SeriesPredictor, newest_row

__all__ = ["RidgeAutoregression", "autoregression", "continued_row", "not_growing"]

# The history is kept for this long by default; an autoregression estimates more than a slope and wants all of it.
WINDOW_ITERATIONS = 400
# Noise of single checkpoints makes consecutive velocities opposed; a few of them together average it out.
MAX_ORDER = 4
# Against the mean squared velocity. Elements are many and coefficients few: it settles what the series leaves open.
RIDGE = 1e-2

Matrix = NDArray[numpy.float64]


class RidgeAutoregression(SeriesPredictor):
    """Per-tensor ridge autoregression on velocities (a `StatePredictor`).

    The velocity between consecutive checkpoints is displacement over cumulative learning rate. The order is half the
    number of velocities, at most 4. A forecast reads the window twice: for the Gram matrix and for damaged values. On
    several ranks each slice of a tensor gets coefficients of its own.
    """

    name = "ridge-ar"

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        fitted = points if len(points) < prior.MIN_CHECKPOINTS else _window(points)
        return too_few(fitted, prior.MIN_CHECKPOINTS) or too_far(target, fitted)

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        places = tuple(range(len(points) - len(_window(points)), len(points)))
        return Fit(newest_row(len(points)), places, settings={"window_iterations": WINDOW_ITERATIONS, "ridge": RIDGE})

    def _operator_row(self, history: History, operator: str, series: Series, fit: Fit, target: Target) -> Fit:
        places = distinct_times(series.points, fit.used())
        if len(places) < prior.MIN_CHECKPOINTS:
            return fit
        products = gram(history, operator, [series.indices[place] for place in places]).numpy()
        if not (numpy.isfinite(products).all() and products.trace() > 0):
            return fit  # never moved, or damaged: the check that follows finds where
        times = [series.points[place].time for place in places]
        gaps = numpy.diff(times)
        coefficients = autoregression(products / numpy.outer(gaps, gaps), min(MAX_ORDER, len(gaps) // 2), RIDGE)
        row = numpy.zeros(len(series.points))
        row[places] = continued_row(times, not_growing(coefficients), target.time)
        return Fit(tuple(row.tolist()))


def autoregression(products: Matrix, order: int, ridge: float) -> Matrix:
    """Coefficients `a` of `v_k = sum_i a_i v_(k-i)`, least squares over all elements and velocities.

    Minimises the mean over k of `|v_k - sum_i a_i v_(k-i)|^2`, plus `ridge * m * |a|^2`. Here m is the mean squared
    norm of all velocities. So `ridge` has no unit, and a tensor that has only begun to move gets finite coefficients.

    Args:
        products: Gram matrix of n velocities, `(n, n)`, not all zero.
        order: number of coefficients, below n.
        ridge: positive.

    Returns:
        `(order,)`, the newest velocity's coefficient first.
    """
    count = len(products)
    normal, right = numpy.zeros((order, order)), numpy.zeros(order)
    for newest in range(order, count):
        before = [newest - 1 - lag for lag in range(order)]
        normal += products[numpy.ix_(before, before)]
        right += products[before, newest]
    normal += ridge * (count - order) * products.trace() / count * numpy.eye(order)
    return numpy.asarray(numpy.linalg.solve(normal, right), dtype=numpy.float64)


def not_growing(coefficients: Matrix) -> Matrix:
    """The coefficients with growing modes scaled back: `a_i / r^i`, with r the largest root where that is above 1.

    Repeated over several intervals, a growing velocity is no forecast but an explosion.
    """
    companion = numpy.eye(len(coefficients), k=-1)
    companion[0] = coefficients
    radius = max(1.0, float(numpy.abs(numpy.linalg.eigvals(companion)).max()))
    return numpy.asarray(coefficients / radius ** numpy.arange(1, len(coefficients) + 1), dtype=numpy.float64)


def continued_row(times: Sequence[float], coefficients: Matrix, target_time: float) -> Matrix:
    """Coefficients over the snapshots of the newest one moved on to `target_time` by the autoregression.

    It steps by the mean gap of `times` (on an even grid the one it was fitted for), the last time by what is left.

    Args:
        times: strictly ascending, more of them than coefficients.
        coefficients: the newest velocity's first.
        target_time: not before the newest time.

    Returns:
        One float per time; they sum to 1.
    """
    snapshots = numpy.eye(len(times))
    velocities = [
        (snapshots[k + 1] - snapshots[k]) / (newer - older)
        for k, (older, newer) in enumerate(itertools.pairwise(times))
    ]
    step = (times[-1] - times[0]) / (len(times) - 1)
    left = target_time - times[-1]
    row: Matrix = snapshots[-1].copy()
    while left > 0.0:
        velocities.append(coefficients @ numpy.stack(velocities[: -len(coefficients) - 1 : -1]))
        row += velocities[-1] * min(step, left)
        left -= step
    return row


def _window(points: Sequence[HistoryEntry]) -> Sequence[HistoryEntry]:
    """The last 400 iterations, and at least three snapshots."""
    return points[prior.start_of_three(points, WINDOW_ITERATIONS) :]
