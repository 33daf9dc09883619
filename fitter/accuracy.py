"""How the predictor's error falls with the checkpoints that it has seen."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike

from cpsr.fitter.loss_fit import robust_line

__all__ = ["POINTS_MIN", "AccuracyCurve", "fit_accuracy"]

POINTS_MIN = 4  # two coefficients, and as many points to estimate their noise


@dataclass(frozen=True)
class AccuracyCurve:
    """`exp(-tau1 n + tau2)`: the predictor's error after n checkpoints (the paper's Eq. 8, with `n = t / T_c`).

    Attributes:
        tau1_per_checkpoint: zero where learning does not help, negative where the error grows.
        tau2: logarithm of the error at n = 0.
        rmse_log: root of the mean square of all errors about the curve, of their logarithms.
        points: number of checkpoints that were predicted as a check.
    """

    tau1_per_checkpoint: float
    tau2: float
    rmse_log: float
    points: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return asdict(self)


def fit_accuracy(counts: ArrayLike, errors: ArrayLike) -> AccuracyCurve:
    """Fit the curve by Huber's line through the logarithms of the errors.

    Args:
        counts: `(points,)` checkpoints that each prediction rested on, in any order; at least 4, not all alike.
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
    if not numpy.all(numpy.isfinite(places) & numpy.isfinite(values) & (values > 0)):
        raise ValueError("only finite, positive errors have an exponential curve; leave the others out")
    width = float(numpy.ptp(places))
    if width == 0:
        raise ValueError(f"all {len(places)} checkpoints that were predicted as a check rest on {places[0]:g} others")
    logarithms, middle = numpy.log(values), float(places.mean())
    slope, level = robust_line((places - middle) / width, logarithms)
    tau1 = -slope / width
    tau2 = level + tau1 * middle
    rmse = float(numpy.sqrt(numpy.mean((logarithms - (tau2 - tau1 * places)) ** 2)))
    return AccuracyCurve(tau1, tau2, rmse, len(places))
