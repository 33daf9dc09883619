"""The training-loss curve, fitted online: how fast the loss falls now, and how much single losses scatter."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

__all__ = ["POINTS_MIN", "Array", "LossFit", "fit_loss", "pair_slopes"]

Array = NDArray[numpy.float64]

POINTS_MIN = 10
# Losses from before half of a run's age bend the curve. The newest half forecast the next 200 iterations of a real run
# to 0.176 nats at eight places, as did the best of three forms of curve with four half-lives each (2026-11-27).
OLDEST_SHARE = 0.5
# At most this many bins are fitted: a line gains nothing from more, and their pairs are 33,000.
BINS_MAX = 256
BAND_SHARE = 0.95  # of single losses


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
    """Fit the curve by Theil's line through the logarithms of the newest half of the losses.

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
    logarithms = numpy.log(medians)
    alpha1 = -float(numpy.median(pair_slopes(binned, logarithms)))
    alpha2 = float(numpy.median(logarithms + alpha1 * binned))
    count, off = len(places), numpy.abs(values - numpy.exp(alpha2 - alpha1 * places))
    # Squares about a line of two coefficients: 1 - 2 / count of the noise where it was fitted, 1 + 2 / count elsewhere.
    band = math.sqrt((count + 2) / (count - 2)) * float(numpy.quantile(off, BAND_SHARE, method="higher"))
    return LossFit(alpha1, alpha2, band, int(places[0]), int(places[-1]), count)


def pair_slopes(places: Array, values: Array) -> Array:
    """Slopes of the lines through all pairs of points at two places, whose median is Theil's slope.

    Args:
        places: `(points,)`.
        values: `(points,)`.
    """
    first, second = numpy.triu_indices(len(places), 1)
    apart = places[first] != places[second]
    first, second = first[apart], second[apart]
    return numpy.asarray((values[second] - values[first]) / (places[second] - places[first]))


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
