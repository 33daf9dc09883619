"""Every method that recovery is measured against, by name and behind one interface."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy

from cpsr.benchmarks.recovery.methods.autoregression import RidgeAutoregression
from cpsr.predictor import prior
from cpsr.predictor.denoise import bands
from cpsr.predictor.line import LinePredictor, line_coefficients
from cpsr.predictor.obstacles import too_far, too_few
from cpsr.predictor.protocol import HistoryEntry, StatePredictor, Target
from cpsr.predictor.series import Series, distinct_times
from cpsr.predictor.series_predictor import Fit, SeriesPredictor, newest_row

__all__ = ["BASELINES", "ORACLE", "RECOMPUTE", "LineValue", "PlainLine"]

RECOMPUTE = "recompute"
"""Exactly the newest checkpoint, and every iteration since trained again: no prediction, costs the horizon."""
ORACLE = "oracle"
"""The true state at the failure, which only a measurement has: no prediction, the floor of all methods."""

# The mean that looks best at injection and lies furthest behind.
MEAN_CHECKPOINTS = 3
BANDS_WINDOW_ITERATIONS = 300


class Stale(SeriesPredictor):
    """The newest checkpoint as it is: the data since is skipped, its progress lost."""

    name = "stale"

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        return too_few(points, 1) or too_far(target, points, extrapolates=False)

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        return Fit(newest_row(len(points)))


class Secant(SeriesPredictor):
    """The last two checkpoints extrapolated, at most one interval ahead."""

    name = "secant"

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        return too_few(points, 2) or too_far(target, points[-2:])

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        last = line_coefficients([point.time for point in points[-2:]], target.time, gain=1.0, base=0.0)
        return Fit((0.0,) * (len(points) - 2) + last)


class MeanOfRecent(SeriesPredictor):
    """The mean of the last three checkpoints."""

    name = "mean-3"

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        few = too_few(points, MEAN_CHECKPOINTS)
        return few or too_far(target, points[-MEAN_CHECKPOINTS:], extrapolates=False)

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        return Fit((0.0,) * (len(points) - MEAN_CHECKPOINTS) + (1.0 / MEAN_CHECKPOINTS,) * MEAN_CHECKPOINTS)


class DenoisedBands(SeriesPredictor):
    """FDD alone: the low band extrapolated and the mid band continued, over 300 iterations, at least 3 checkpoints."""

    name = "fdd"

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        return too_few(points, prior.MIN_CHECKPOINTS) or too_far(target, points[_bands_start(points) :])

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        places = distinct_times(points, range(_bands_start(points), len(points)))
        split = bands([points[place].time for place in places])
        row = numpy.zeros(len(points))
        row[places] = split.baseline_at(target.time) + split.mid_at(target.time)
        return Fit(tuple(row.tolist()))


def _bands_start(points: Sequence[HistoryEntry]) -> int:
    return prior.start_of_three(points, BANDS_WINDOW_ITERATIONS)


class PlainLine(LinePredictor):
    """The line with one reach for all operators."""

    def _factor(self, operator: str, series: Series) -> float:
        return 1.0


class LineValue(PlainLine):
    """The line from its own value at the checkpoint, in place of the checkpoint's weights."""

    _base = 1.0


def _line(window_iterations: int) -> Callable[..., StatePredictor]:
    """The plain line over a fixed window: its own value at the failure."""
    return partial(LineValue, window_iterations, 1.0, name=f"line-w{window_iterations}")


BASELINES: dict[str, Callable[..., StatePredictor]] = {
    "stale": Stale,
    "secant": Secant,
    "line-w100": _line(100),
    "line-w200": _line(200),
    "line-w300": _line(300),
    "line-w400": _line(400),
    "line-x2": partial(PlainLine, 300, 2.0, name="line-x2"),
    "line-1.5": partial(LineValue, 300, 1.5, name="line-1.5"),
    "line-base": partial(LineValue, 300, 0.0, name="line-base"),
    "mean-3": MeanOfRecent,
    "ridge-ar": RidgeAutoregression,
    "fdd": DenoisedBands,
    "line-one-reach": partial(PlainLine, name="line-one-reach"),
    "line": LinePredictor,
}
"""Name of a method -> makes its predictor, of the same `name`; optional keywords as of `SeriesPredictor`."""
