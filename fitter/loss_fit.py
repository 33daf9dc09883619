"""The training-loss curve, fitted online: how fast the loss falls now, and how much single losses scatter."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

__all__ = ["POINTS_MIN", "Array", "LossFit", "fit_loss", "robust_line"]

Array = NDArray[numpy.float64]

POINTS_MIN = 10
# Losses from before half of a run's age bend the curve. The newest half forecast the next 200 iterations of a real run
# to 0.175 nats at eight places; the best of three forms of curve with four half-lives each, to 0.176 (2026-11-27).
OLDEST_SHARE = 0.5
# At most this many bins are fitted: a line gains nothing from more, and the fit stays short.
BINS_MAX = 256
BAND_SHARE = 0.95  # of single losses
# Huber's constant: 95% as efficient as least squares on Gaussian noise, and deaf to spikes.
HUBER_EPSILON = 1.35
HUBER_ITERATIONS_MAX = 1000
HUBER_TOLERANCE = 1e-8  # of the scale of the noise: a line that moves by less has converged
# Points closer to a line than this, relative to it, have no scale of noise.
EXACT_FIT = 1e-9


@dataclass(frozen=True)
class LossFit:
    """The exponential through the newest losses, `exp(-alpha1 t + alpha2)` (the paper's Eq. 11).

    Attributes:
        alpha1_per_iteration: zero where the loss stands still, negative where it rises.
        alpha2: logarithm of the loss at iteration 0.
        band_nats: half the width of the band about the curve that holds 95% of single losses.
        first_iteration: of the fitted losses.
        last_iteration: of the fitted losses.
        points: number of them.
    """

    alpha1_per_iteration: float
    alpha2: float
    band_nats: float
    first_iteration: int
    last_iteration: int
    points: int

    def at(self, iterations: ArrayLike) -> Array:
        """Expected losses in nats, float64 in the shape of `iterations`."""
        return numpy.exp(self.alpha2 - self.alpha1_per_iteration * numpy.asarray(iterations, dtype=numpy.float64))

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return asdict(self)


def fit_loss(iterations: ArrayLike, losses: ArrayLike) -> LossFit:
    """Fit the curve by Huber's line through the logarithms of the newest half of the losses.

    However long the run, at most 256 bins are fitted, medians of as many consecutive losses each.

    Args:
        iterations: `(points,)` ascending without repeats, at least 10.
        losses: `(points,)` in nats, finite and positive.

    Raises:
        ValueError: the shapes do not fit, points are too few, do not ascend, or a loss is not finite or not positive.

    Source: CPSR, section III-C and Eq. 11.
    """
    places, values = _checked(iterations, losses)
    first = int(numpy.searchsorted(places, OLDEST_SHARE * places[-1], side="right"))
    first = min(first, len(places) - POINTS_MIN)
    places, values = places[first:], values[first:]
    binned, medians = _binned(places, values)
    end, width = float(places[-1]), float(numpy.ptp(binned))
    slope, level = robust_line((binned - end) / width, numpy.log(medians))
    alpha1 = -slope / width
    alpha2 = level + alpha1 * end
    count, off = len(places), numpy.abs(values - numpy.exp(alpha2 - alpha1 * places))
    # Squares about a line of two coefficients: 1 - 2 / count of the noise where it was fitted, 1 + 2 / count elsewhere.
    band = math.sqrt((count + 2) / (count - 2)) * float(numpy.quantile(off, BAND_SHARE, method="higher"))
    return LossFit(alpha1, alpha2, band, int(places[0]), int(end), count)


def robust_line(places: Array, values: Array) -> tuple[float, float]:
    """Slope and level at 0 of Huber's line; places take at least two values.

    Args:
        places: `(points,)`, about 1 in size.
        values: `(points,)`.
    """
    slope, level = numpy.polyfit(places, values, 1)
    exact = EXACT_FIT * (1 + float(numpy.abs(values).max()))
    for _ in range(HUBER_ITERATIONS_MAX):
        off = numpy.abs(values - level - slope * places)
        scale = _huber_scale(off)
        if scale <= exact:  # all points lie on the line, or so many that the others are spikes
            break
        before, weights = (slope, level), HUBER_EPSILON * scale / numpy.maximum(off, HUBER_EPSILON * scale)
        slope, level = numpy.polyfit(places, values, 1, w=numpy.sqrt(weights))
        if max(abs(slope - before[0]), abs(level - before[1])) <= HUBER_TOLERANCE * scale:
            break
    return float(slope), float(level)


def _huber_scale(off: Array) -> float:
    """The scale of the noise that minimises Huber's loss at these distances from a line; 0 if half of them are 0.

    The loss of scale s is the sum over all distances of s + s h(distance / s), where h squares what is below epsilon
    and continues along its tangent.

    Source: P. J. Huber, Robust Statistics, 1981, section 7.7: a convex loss of line and scale together.
    """
    distances, count = numpy.sort(off), len(off)
    # With the `near` smallest ones below epsilon, the derivative is zero at this square of s.
    near = numpy.arange(1, count + 1)
    divisors = count - (count - near) * HUBER_EPSILON**2
    squares = numpy.cumsum(distances**2) / numpy.where(divisors > 0, divisors, numpy.nan)
    limits = (HUBER_EPSILON * numpy.sqrt(squares), numpy.append(distances[1:], numpy.inf))
    fits = numpy.flatnonzero((distances <= limits[0]) & (limits[0] <= limits[1]))
    return float(math.sqrt(squares[fits[0]])) if fits.size else 0.0


def _checked(iterations: ArrayLike, losses: ArrayLike) -> tuple[Array, Array]:
    places = numpy.asarray(iterations, dtype=numpy.float64)
    values = numpy.asarray(losses, dtype=numpy.float64)
    if places.ndim != 1 or places.shape != values.shape:
        raise ValueError(f"expected iterations and losses of one shape (points,), got {places.shape}, {values.shape}")
    if len(places) < POINTS_MIN:
        raise ValueError(f"it needs {POINTS_MIN} losses, and there are {len(places)} so far")
    if not numpy.all(numpy.diff(places) > 0) or not numpy.all(numpy.isfinite(places)):
        raise ValueError("iterations of a loss curve must be finite and ascend without repeats")
    wrong = numpy.flatnonzero(~(numpy.isfinite(values) & (values > 0)))
    if wrong.size:
        raise ValueError(
            f"the loss at iteration {places[wrong[0]]:.0f} is {values[wrong[0]]} ({wrong.size} of {len(values)} such): "
            "only finite, positive losses have an exponential curve; leave the others out"
        )
    return places, values


def _binned(places: Array, values: Array) -> tuple[Array, Array]:
    """Medians of groups of consecutive points, alike in size; the newest point is in the last one."""
    size = -(-len(places) // BINS_MAX)
    if size == 1:
        return places, values
    ragged = len(places) % size  # the oldest, fewer than a bin holds
    shape = (-1, size)
    return places[ragged:].reshape(shape).mean(axis=1), numpy.median(values[ragged:].reshape(shape), axis=1)
