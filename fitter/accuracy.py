"""How the predictor's error at a fixed horizon falls with the checkpoints that it has seen."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from cpsr.fitter.loss_fit import pair_slopes

__all__ = ["AccuracyCurve", "Backtest", "fit_accuracy"]

Array = NDArray[numpy.float64]

# Stretches whose horizons differ by less than this factor are compared with each other.
LIKE_HORIZONS = 1.5
# The error grows about as the variance of a random walk does: as the horizon to the power of 0.8 to 1.3, measured.
HORIZON_EXPONENT = 1.0
# Backtests from before half of the run's age tell how it learned then, but a line needs so many points.
OLDEST_SHARE = 0.5
POINTS_WANTED = 10
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Backtest:
    """How far off the prediction of a known checkpoint was.

    Attributes:
        iteration: of the checkpoint.
        checkpoints: that were learned by then.
        horizon_iterations: from the newest one that was seen.
        mean_square_error: of the weights (the paper's Eq. 9), positive.
    """

    iteration: int
    checkpoints: int
    horizon_iterations: int
    mean_square_error: float


@dataclass(frozen=True)
class AccuracyCurve:
    """`exp(-tau1 n + tau2)`: the predictor's error after n checkpoints (the paper's Eq. 8, with `n = t / T_c`).

    Attributes:
        tau1_per_checkpoint: zero where learning does not help, negative where the error grows.
        tau1_low_per_checkpoint: lower end of its 95% interval.
        tau1_high_per_checkpoint: upper end.
        tau2: logarithm of the error at n = 0.
        points: stretches of training whose errors were compared.
    """

    tau1_per_checkpoint: float
    tau1_low_per_checkpoint: float
    tau1_high_per_checkpoint: float
    tau2: float
    points: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return asdict(self)


def fit_accuracy(backtests: Iterable[Backtest], horizon_iterations: int) -> AccuracyCurve:
    """Fit the curve to the errors at one horizon.

    The error of a checkpoint at that horizon lies between its backtests. Where the interval is longer, the nearest
    horizon stands for it: its errors are compared with those at like horizons alone. Backtests of neighbouring
    checkpoints share most of their horizon, so a stretch of its length counts as one point, the median of its errors.
    The slope is Theil's, the median over all pairs of points, with Sen's 95% interval, whose variance is summed over
    the horizons. A few predictions that failed move neither, and the noise need not be Gaussian.

    Args:
        backtests: in any order, with positive and finite errors.
        horizon_iterations: for which the backtests were made, or the nearest to it.

    Raises:
        ValueError: there are too few at like horizons yet.

    Source: CPSR, Eq. 8 and 9; P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63,
    1968; R. M. Hirsch et al., "Techniques of trend analysis for monthly water quality data", WRR 18(1), 1982.
    """
    points = _points(backtests, horizon_iterations)
    slopes, variance = [numpy.zeros(0)], 0.0
    for like in numpy.unique(points[:, 2]):
        counts, errors, _ = points[points[:, 2] == like].T
        slopes.append(pair_slopes(counts, errors))  # a rank with other slices counts its checkpoints again
        variance += len(counts) * (len(counts) - 1) * (2 * len(counts) + 5) / 18
    ordered = numpy.sort(numpy.concatenate(slopes))
    beyond = round((len(ordered) - NORMAL_95 * math.sqrt(variance)) / 2)
    if beyond < 1:
        raise ValueError(f"{len(points)} stretches of {horizon_iterations} iterations are too few for an interval yet")
    slope, low, high = float(numpy.median(ordered)), float(ordered[beyond - 1]), float(ordered[-beyond])
    tau2 = float(numpy.median(points[:, 1] - slope * points[:, 0]))
    return AccuracyCurve(-slope, -high, -low, tau2, len(points))


def _points(backtests: Iterable[Backtest], horizon: int) -> Array:
    """One row for each stretch of the newest half: checkpoints, logarithm of the error, and number of its horizon."""
    of_checkpoints: Mapping[int, list[Backtest]] = defaultdict(list)
    for one in backtests:
        of_checkpoints[one.iteration].append(one)
    stretches: Mapping[int, list[tuple[float, float, float]]] = defaultdict(list)
    for iteration, ones in of_checkpoints.items():
        stretches[iteration // horizon].append((ones[0].checkpoints, *_at_the_horizon(ones, horizon)))
    ordered = sorted(stretches)
    recent = [place for place in ordered if place >= OLDEST_SHARE * ordered[-1]]
    kept = max(recent, ordered[-POINTS_WANTED:], key=len)
    points = numpy.array([numpy.median(stretches[place], axis=0) for place in kept]).reshape(-1, 3)
    points[:, 2] = (points[:, 2] / math.log(LIKE_HORIZONS)).round()
    return points


def _at_the_horizon(ones: Sequence[Backtest], horizon: int) -> tuple[float, float]:
    """Logarithm of a checkpoint's error at the horizon, and how far, in logarithms, the nearest horizon is."""
    known = sorted((math.log(one.horizon_iterations / horizon), one.mean_square_error) for one in ones)
    distances, errors = numpy.array(known).T
    nearest = min(max(0.0, distances[0]), distances[-1])
    return float(numpy.interp(nearest, distances, numpy.log(errors)) - HORIZON_EXPONENT * nearest), float(nearest)
