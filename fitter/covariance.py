"""Covariance of robustly fitted coefficients."""

import numpy
from numpy.typing import NDArray

__all__ = ["GAUSSIAN_MAD", "sandwich"]

# Standard deviation of a Gaussian over the median of its absolute values.
GAUSSIAN_MAD = 1.4826
# Residuals that follow each other more closely than this leave too few independent points to count them.
AUTOCORRELATION_MAX = 0.95
# Directions that the points do not determine at all (a relative curvature below it) count as known: a forecast from
# them is as good as any other, and their variance has no finite estimate.
RANK_TOLERANCE = 1e-12


def sandwich(
    jacobian: NDArray[numpy.float64], scores: NDArray[numpy.float64], curvatures: NDArray[numpy.float64]
) -> NDArray[numpy.float64]:
    """Covariance of an M-estimate, `(coefficients, coefficients)`.

    `H^-1 G H^-1` with `H = J' diag(curvatures) J` and `G = J' diag(scores^2) J`. It holds whatever the distribution of
    the noise and however it changes (P. J. Huber, 1967). Where neighbouring scores resemble each other, G grows by
    `(1 + r) / (1 - r)`, r their correlation: a first-order autoregression has that many fewer independent points.

    Args:
        jacobian: `(points, coefficients)`, in the order of time.
        scores: `(points,)` derivative of each point's cost by its residual, weights included.
        curvatures: `(points,)` second derivative of the same.
    """
    points, coefficients = jacobian.shape
    bread = jacobian.T @ (curvatures[:, None] * jacobian)
    meat = jacobian.T @ ((scores**2)[:, None] * jacobian)
    # In units of their own size, since an iteration's coefficient is a million times smaller than a level's.
    sizes = numpy.sqrt(numpy.maximum(numpy.diag(bread), numpy.finfo(numpy.float64).tiny))
    inverse = numpy.linalg.pinv(bread / numpy.outer(sizes, sizes), rcond=RANK_TOLERANCE, hermitian=True)
    inverse /= numpy.outer(sizes, sizes)
    correction = points / max(points - coefficients, 1)
    covariance = inverse @ meat @ inverse * correction * _correlated(scores)
    return numpy.asarray((covariance + covariance.T) / 2)


def _correlated(scores: NDArray[numpy.float64]) -> float:
    power = float(scores @ scores)
    if power <= 0.0:
        return 1.0
    correlation = min(max(float(scores[1:] @ scores[:-1]) / power, 0.0), AUTOCORRELATION_MAX)
    return (1 + correlation) / (1 - correlation)
