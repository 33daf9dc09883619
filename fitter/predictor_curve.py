"""How the predictor's error falls with the checkpoints that it has seen."""

from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike

from cpsr.fitter.families import Array, Exponential

__all__ = ["POINTS_MIN", "PredictorCurve", "fit_predictor_curve"]

POINTS_MIN = 4  # two coefficients, and as many points to estimate their noise


@dataclass(frozen=True, eq=False)
class PredictorCurve:
    """`exp(-tau1 n + tau2)`: the predictor's error after n checkpoints (the paper's Eq. 8, with `n = t / T_c`).

    Attributes:
        tau1_per_checkpoint: zero where learning does not help, negative where the error grows.
        tau2: logarithm of the error at n = 0.
        covariance: `(2, 2)` of tau1 and tau2.
        rmse_log: root of the mean square of all errors about the curve, of their logarithms.
        first_count: least n among the backtests.
        last_count: largest of them.
        points: number of backtests.
    """

    tau1_per_checkpoint: float
    tau2: float
    covariance: Array
    rmse_log: float
    first_count: float
    last_count: float
    points: int

    def at(self, counts: ArrayLike) -> Array:
        """Expected errors after so many checkpoints, float64 in the shape of `counts`."""
        return numpy.exp(self.tau2 - self.tau1_per_checkpoint * numpy.asarray(counts, dtype=numpy.float64))

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return {
            "tau1_per_checkpoint": self.tau1_per_checkpoint,
            "tau2": self.tau2,
            "covariance": self.covariance.tolist(),
            "rmse_log": self.rmse_log,
            "first_count": self.first_count,
            "last_count": self.last_count,
            "points": self.points,
        }


def fit_predictor_curve(counts: ArrayLike, errors: ArrayLike) -> PredictorCurve:
    """Fit the curve to backtests by Huber's regression on the logarithm of the error.

    Args:
        counts: `(points,)` checkpoints that each backtest rested on, in any order; at least 4, not all alike.
        errors: `(points,)` mean squared errors (the paper's Eq. 9), positive.

    Raises:
        ValueError: shapes do not fit, points are too few, counts are all alike or not finite, or an error is not
            finite or not positive.

    Source: CPSR, Eq. 8 and 9.
    """
    places = numpy.asarray(counts, dtype=numpy.float64)
    values = numpy.asarray(errors, dtype=numpy.float64)
    if places.ndim != 1 or places.shape != values.shape:
        raise ValueError(f"expected counts and errors of one shape (points,), got {places.shape} and {values.shape}")
    if len(places) < POINTS_MIN:
        raise ValueError(
            f"it needs {POINTS_MIN} checkpoints that were predicted as a check; there are {len(places)} so far"
        )
    wrong = numpy.flatnonzero(~(numpy.isfinite(places) & numpy.isfinite(values) & (values > 0)))
    if wrong.size:
        raise ValueError(
            f"backtest {wrong[0]} has the error {values[wrong[0]]} after {places[wrong[0]]} checkpoints: only finite, "
            "positive errors have an exponential curve; leave the others out"
        )
    if numpy.ptp(places) == 0:
        raise ValueError(
            f"all {len(places)} checkpoints that were predicted as a check rest on {places[0]:g} others each"
        )
    order = numpy.argsort(places, kind="stable")
    places, values = places[order], values[order]
    curve = Exponential()
    coefficients, covariance = curve.fit(places, values, numpy.ones_like(places))
    residuals = numpy.log(values) - (coefficients[1] - coefficients[0] * places)
    return PredictorCurve(
        tau1_per_checkpoint=float(coefficients[0]),
        tau2=float(coefficients[1]),
        covariance=covariance,
        rmse_log=float(numpy.sqrt(numpy.mean(residuals**2))),
        first_count=float(places[0]),
        last_count=float(places[-1]),
        points=len(places),
    )
