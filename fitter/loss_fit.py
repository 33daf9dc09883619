"""The training-loss curve, fitted online: which form it has, how fast it falls now, and how sure that is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import scipy  # its parts are loaded at their first use: a restart does not wait for them
from numpy.typing import ArrayLike, NDArray

from cpsr.fitter.families import Array, Exponential, Family, PowerLaw, StretchedExponential

__all__ = ["POINTS_MIN", "LossFit", "fit_loss"]

# Four coefficients on eight points, and two points more to be judged by.
TRAINED_POINTS_MIN = 8
HELD_OUT_POINTS_MIN = 2
POINTS_MIN = TRAINED_POINTS_MIN + HELD_OUT_POINTS_MIN
# Length of the next phase relative to those so far, by default.
SPAN_FRACTION = 0.2
# A point this many spans back counts half; None is all points alike. The longest first: on equal terms more data win.
HALF_LIVES_SPANS: tuple[float | None, ...] = (None, 2.0, 0.5, 0.25)
# Fitted are at most so many bins: a curve of four coefficients gains nothing from more, and the fit stays short.
BINS_MAX = 256
# The noise of single losses is taken from at most so many of them.
NOISE_POINTS_MAX = 20_000
# Noise is measured where the band will be read: its 95% quantile, in units of a Gaussian's standard deviation.
NOISE_QUANTILE = 0.95
# What grows in proportion to time is, halfway through a span, half of what it is at the end.
DRIFT_OF_MEDIAN = 2.0
FAMILIES: tuple[Callable[[int, int], Family], ...] = (
    lambda first, length: Exponential(),
    lambda first, length: PowerLaw(first, length),
    lambda first, length: StretchedExponential(first, length),
)


@dataclass(frozen=True, eq=False)
class LossFit:
    """A fitted loss curve.

    Attributes:
        family: `exponential`, `power_law` or `stretched_exponential`.
        coefficients: by name, with their units.
        covariance: `(coefficients, coefficients)`, in their order.
        noise_nats: standard deviation of single losses about the curve, of the recent ones above all.
        rmse_nats: root of the mean square of the last span's losses about the curve.
        held_out_rmse_nats: the same about the curve that was fitted to all before that span.
        held_out_iterations: length of that span.
        drift_nats: how far the family is expected to miss the curve one span ahead: what it missed by the end of the
            last one.
        half_life_spans: a point this many spans back counted half; None: all alike.
        first_iteration: of the losses.
        last_iteration: of the losses.
        points: number of losses.
        degrees_of_freedom: independent points, by their weights, less the coefficients.
    """

    family: str
    coefficients: Mapping[str, float]
    covariance: Array
    noise_nats: float
    rmse_nats: float
    held_out_rmse_nats: float
    held_out_iterations: int
    drift_nats: float
    half_life_spans: float | None
    first_iteration: int
    last_iteration: int
    points: int
    degrees_of_freedom: float
    _curve: Family = field(repr=False)

    def at(self, iterations: ArrayLike) -> Array:
        """Expected losses in nats, float64 in the shape of `iterations`."""
        places = numpy.asarray(iterations, dtype=numpy.float64)
        return self._curve.value(places.ravel(), self._values()).reshape(places.shape)

    def band(self, iterations: ArrayLike, confidence: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper bound, in nats, of single losses; each in the shape of `iterations`.

        By Student's t, from the noise of single losses and what is unknown of the coefficients. Beyond the last
        iteration, how far the family strays from the run adds to it, in proportion to the distance. Of the next span
        and of recent losses it holds its share; of those that were given little weight it may hold less.

        Raises:
            ValueError: `confidence` does not lie between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, not be {confidence}")
        places = numpy.asarray(iterations, dtype=numpy.float64)
        jacobian = self._curve.jacobian(places.ravel(), self._values())
        unknown = numpy.einsum("ij,jk,ik->i", jacobian, self.covariance, jacobian)
        quantile = float(scipy.special.stdtrit(self.degrees_of_freedom, (1 + confidence) / 2))
        ahead = numpy.maximum(places - self.last_iteration, 0.0) / self.held_out_iterations
        variances = numpy.maximum(unknown, 0.0).reshape(places.shape) + self.noise_nats**2
        half = quantile * numpy.sqrt(variances + (self.drift_nats * ahead) ** 2)
        return self.at(places) - half, self.at(places) + half

    @property
    def alpha1_per_iteration(self) -> float:
        """Decay of the exponential that touches the curve at the last iteration (the paper's Eq. 11).

        Zero where the loss stands still, negative where it rises.
        """
        return -self._curve.slope(float(self.last_iteration), self._values()) / float(self.at(self.last_iteration))

    @property
    def alpha2(self) -> float:
        """Logarithm, at iteration 0, of the same exponential."""
        level = numpy.log(float(self.at(self.last_iteration)))
        return float(level) + self.alpha1_per_iteration * self.last_iteration

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return {
            "family": self.family,
            "coefficients": dict(self.coefficients),
            "covariance": self.covariance.tolist(),
            "alpha1_per_iteration": self.alpha1_per_iteration,
            "alpha2": self.alpha2,
            "noise_nats": self.noise_nats,
            "rmse_nats": self.rmse_nats,
            "held_out_rmse_nats": self.held_out_rmse_nats,
            "held_out_iterations": self.held_out_iterations,
            "drift_nats": self.drift_nats,
            "half_life_spans": self.half_life_spans,
            "first_iteration": self.first_iteration,
            "last_iteration": self.last_iteration,
            "points": self.points,
            "degrees_of_freedom": self.degrees_of_freedom,
        }

    def _values(self) -> Array:
        return numpy.array(list(self.coefficients.values()))


def fit_loss(iterations: ArrayLike, losses: ArrayLike, span_iterations: int | None = None) -> LossFit:
    """Fit the loss curve, with the family and the weight of the past that forecast the last span best.

    The candidates, three families with four half-lives each, are fitted to all but the last span. They are judged by
    their mean absolute error on it: a spike there counts once, not squared. The simplest of those within one standard
    error of the best is fitted again to everything.

    However long the run, at most 256 bins are fitted, medians of as many consecutive losses each: 0.1 s on one core
    for a million iterations (and once 0.3 s more, to import scipy's parts). RMSE and noise are those of single losses,
    the noise of 20,000 at most, evenly spaced.

    Args:
        iterations: `(points,)` ascending without repeats, at least 10.
        losses: `(points,)` in nats, finite and positive.
        span_iterations: what the curve is to forecast, usually the length of a phase; by default a fifth of the
            iterations covered, and never more than half of them.

    Raises:
        ValueError: the shapes do not fit, points are too few, do not ascend, or a loss is not finite or not positive.

    Source: CPSR, sections III-C and V-B (its Eq. 11 is the first family).
    """
    places, values = _checked(iterations, losses)
    covered = float(places[-1] - places[0])
    span = min(SPAN_FRACTION * covered if span_iterations is None else span_iterations, covered / 2)
    if span <= 0:
        raise ValueError(f"span_iterations must be positive, not {span_iterations}")
    split = int(numpy.searchsorted(places, places[-1] - span, side="right"))
    split = min(max(split, TRAINED_POINTS_MIN), len(places) - HELD_OUT_POINTS_MIN)
    before, after = _binned(places[:split], values[:split]), _binned(places[split:], values[split:])
    candidates = [_Candidate.fitted(family, before, span, life) for family in FAMILIES for life in HALF_LIVES_SPANS]
    candidates = [candidate for candidate in candidates if candidate.sound(after[0])]
    chosen = candidates[_simplest(numpy.array([candidate.errors(after) for candidate in candidates]))]
    final = _Candidate.fitted(chosen.make, _binned(places, values), span, chosen.half_life_spans)
    weights = _weights(places, span, final.half_life_spans)
    missed = values[split:] - chosen.at(places[split:])
    return LossFit(
        family=final.family.name,
        coefficients=dict(zip(final.family.names, final.coefficients.tolist(), strict=True)),
        covariance=final.covariance,
        noise_nats=_noise(values - final.at(places), weights, len(final.coefficients)),
        rmse_nats=_rmse(values[split:] - final.at(places[split:])),
        held_out_rmse_nats=_rmse(missed),
        held_out_iterations=max(round(places[-1] - places[split - 1]), 1),
        drift_nats=DRIFT_OF_MEDIAN * abs(float(numpy.median(missed))),
        half_life_spans=final.half_life_spans,
        first_iteration=int(places[0]),
        last_iteration=int(places[-1]),
        points=len(places),
        degrees_of_freedom=max(_independent(weights) - len(final.coefficients), 1.0),
        _curve=final.family,
    )


@dataclass(frozen=True)
class _Candidate:
    """One family with one weight of the past, fitted."""

    make: Callable[[int, int], Family]
    family: Family
    half_life_spans: float | None
    coefficients: Array
    covariance: Array

    @classmethod
    def fitted(
        cls,
        make: Callable[[int, int], Family],
        points: tuple[Array, Array],
        span: float,
        half_life_spans: float | None,
    ) -> "_Candidate":
        places, values = points
        family = make(int(places[0]), max(round(places[-1] - places[0]), 1))
        coefficients, covariance = family.fit(places, values, _weights(places, span, half_life_spans))
        return cls(make, family, half_life_spans, coefficients, covariance)

    def at(self, places: Array) -> Array:
        return self.family.value(places, self.coefficients)

    def errors(self, points: tuple[Array, Array]) -> Array:
        return numpy.abs(points[1] - self.at(points[0]))

    def sound(self, places: Array) -> bool:
        """Whether the curve can be a loss there: the exponential always is."""
        values = self.at(places)
        return bool(numpy.all(numpy.isfinite(values)) and numpy.all(values > 0)) or isinstance(self.family, Exponential)


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


def _weights(places: Array, span: float, half_life_spans: float | None) -> Array:
    if half_life_spans is None:
        return numpy.ones_like(places)
    # Never zero: what is forgotten keeps the fit determined where nothing else does.
    return numpy.asarray(numpy.exp2(numpy.maximum(-(places[-1] - places) / (span * half_life_spans), -40.0)))


def _simplest(errors: NDArray[numpy.float64]) -> int:
    """Index of the first candidate whose error on the held-out points is the best's, give or take a standard error."""
    means = errors.mean(axis=1)
    best = int(numpy.argmin(means))
    differences = errors - errors[best]
    allowed = differences.std(axis=1, ddof=1) / numpy.sqrt(errors.shape[1])
    return int(numpy.flatnonzero(means <= means[best] + allowed)[0])


def _noise(residuals: Array, weights: Array, coefficients: int) -> float:
    step = -(-len(residuals) // NOISE_POINTS_MAX)
    sizes, shares = numpy.abs(residuals[::-step]), weights[::-step]
    order = numpy.argsort(sizes)
    reached = numpy.cumsum(shares[order]) / shares.sum()
    quantile = sizes[order][min(int(numpy.searchsorted(reached, NOISE_QUANTILE)), len(sizes) - 1)]
    independent = _independent(weights)
    correction = independent / max(independent - coefficients, 1.0)
    return float(quantile / scipy.special.ndtri((1 + NOISE_QUANTILE) / 2) * numpy.sqrt(correction))


def _independent(weights: Array) -> float:
    return float(weights.sum() ** 2 / (weights @ weights))


def _rmse(residuals: Array) -> float:
    return float(numpy.sqrt(numpy.mean(residuals**2)))
