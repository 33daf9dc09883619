"""The training-loss curve, fitted online: which form it has, how fast it falls now, and how sure that is."""

import importlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import scipy  # its parts are loaded at their first use: a restart does not wait for them
from numpy.typing import ArrayLike, NDArray

__all__ = ["POINTS_MIN", "Array", "LossFit", "fit_loss", "robust_line"]

Array = NDArray[numpy.float64]

# Four coefficients on eight points, and two points more to be judged by.
TRAINED_POINTS_MIN = 8
HELD_OUT_POINTS_MIN = 2
POINTS_MIN = TRAINED_POINTS_MIN + HELD_OUT_POINTS_MIN
# Length of the next phase relative to those so far, by default.
SPAN_FRACTION = 0.2
# A point this many spans back counts half; None is all points alike. The longest first: on equal terms more data win.
HALF_LIVES_SPANS: tuple[float | None, ...] = (None, 2.0, 0.5, 0.25)
# At most this many bins are fitted: a curve of four coefficients gains nothing from more, and the fit stays short.
BINS_MAX = 256
# The noise of single losses is taken from at most this many of them.
NOISE_POINTS_MAX = 20_000
# Noise is measured where the band will be read: its 95% quantile, in units of a Gaussian's standard deviation.
NOISE_QUANTILE = 0.95
# What grows in proportion to time is, halfway through a span, half of what it is at the end.
DRIFT_OF_MEDIAN = 2.0
# Standard deviation of a Gaussian over the median of its absolute values.
GAUSSIAN_MAD = 1.4826
# Huber's constant: 95% as efficient as least squares on Gaussian noise, and deaf to spikes.
HUBER_EPSILON = 1.35
HUBER_ITERATIONS = 1000
# Points closer to a line than this, relative to it, have no scale of noise for Huber's estimator to find.
EXACT_FIT = 1e-9
# The polish starts next to the optimum; where coefficients are hardly distinguishable, more steps change no forecast.
EVALUATIONS_MAX = 120
SMALLEST = 1e-12


def _import_without_draws(name: str) -> None:
    """Import a module that draws a random number when it is imported, and leave Python's generator as it was."""
    before = random.getstate()
    importlib.import_module(name)
    random.setstate(before)


# scikit-learn imports it at its own first use. In the planner's thread that would be in the middle of the training,
# whose random states would differ from then on.
_import_without_draws("rich.style")


@dataclass(frozen=True)
class _Family:
    """One form of curve over ages: iterations since the first loss, in units of the iterations that the losses cover.

    Attributes:
        name: for the journal.
        coefficients: their names; a fitted curve has their values in this order.
        curve: values at ages, from the coefficients.
        shape: what scale and offset are applied to, by its own two coefficients; None of the exponential.
        grid: values of these two to start from.
        limits: their least and greatest values.
    """

    name: str
    coefficients: tuple[str, ...]
    curve: Callable[[Array, Array], Array]
    shape: Callable[[Array, Any, Any], Array] | None = None
    grid: tuple[Array, Array] = (numpy.empty(0), numpy.empty(0))
    limits: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))

    def fit(self, ages: Array, losses: Array, weights: Array) -> tuple[Array, Array]:
        """Coefficients, and the inverse of the weighted sum of products of their derivatives."""
        if self.shape is None:
            # The paper's Eq. 11: a line through the logarithms.
            slope, level = robust_line(ages, numpy.log(losses), weights)
            found = numpy.array([-slope, level])
        else:
            found = self._polished(ages, losses, numpy.sqrt(weights))
        jacobian = numpy.sqrt(weights)[:, None] * self.derivatives(ages, found)
        return found, numpy.asarray(numpy.linalg.pinv(jacobian.T @ jacobian, hermitian=True), dtype=numpy.float64)

    def derivatives(self, ages: Array, coefficients: Array) -> Array:
        """Derivatives of the curve by its coefficients, `(points, coefficients)`."""
        columns = []
        for place, value in enumerate(coefficients.tolist()):
            step = numpy.zeros_like(coefficients)
            step[place] = 1e-6 * max(abs(value), 1e-3)
            rise = self.curve(ages, coefficients + step) - self.curve(ages, coefficients - step)
            columns.append(rise / (2 * step[place]))
        return numpy.stack(columns, axis=1)

    def _polished(self, ages: Array, losses: Array, roots: Array) -> Array:
        """The robust fit next to the best start: deviations beyond the noise count at their size, not its square."""
        found = self._start(ages, losses, roots**2)
        (low, high), (lowest, highest) = self.limits
        exact = EXACT_FIT * float(numpy.abs(losses).max())
        # Twice: the start is off by its grid, most where the curve is steep, and measured by the median those points
        # would count as spikes and never be met.
        for typical in (numpy.mean, numpy.median):
            deviations = numpy.abs(roots * (losses - self.curve(ages, found)))
            found = scipy.optimize.least_squares(
                lambda coefficients: roots * (self.curve(ages, coefficients) - losses),
                found,
                bounds=([-numpy.inf, low, lowest, 0.0], [numpy.inf, high, highest, numpy.inf]),
                x_scale="jac",
                loss="soft_l1",
                f_scale=max(GAUSSIAN_MAD * float(typical(deviations)), exact),
                max_nfev=EVALUATIONS_MAX,
            ).x
        return numpy.asarray(found)

    def _start(self, ages: Array, losses: Array, weights: Array) -> Array:
        """The best of a grid of shapes, each with its least-squares scale and offset; an offset is not negative."""
        assert self.shape is not None
        firsts, seconds = (axis.ravel() for axis in numpy.meshgrid(*self.grid, indexing="ij"))
        shapes = self.shape(ages[None, :], firsts[:, None], seconds[:, None])
        shares = weights / weights.sum()
        mean_shapes, mean_loss = shapes @ shares, float(losses @ shares)
        spreads = shapes - mean_shapes[:, None]
        scales = ((spreads * (losses - mean_loss)) @ shares) / numpy.maximum((spreads**2) @ shares, SMALLEST)
        offsets = mean_loss - scales * mean_shapes
        through_zero = ((shapes * losses) @ shares) / numpy.maximum((shapes**2) @ shares, SMALLEST)
        scales = numpy.where(offsets < 0, through_zero, scales)
        offsets = numpy.maximum(offsets, 0.0)
        best = int(numpy.argmin(numpy.abs(offsets[:, None] + scales[:, None] * shapes - losses) @ shares))
        return numpy.array([scales[best], firsts[best], seconds[best], offsets[best]])


def _power_shape(ages: Array, shift: Any, exponent: Any) -> Array:
    return numpy.asarray(((numpy.maximum(ages, 0.0) + shift) / (1 + shift)) ** -exponent)


def _stretched_shape(ages: Array, timescale: Any, stretch: Any) -> Array:
    # Not quite zero: its powers stay finite.
    return numpy.asarray(numpy.exp(-((numpy.maximum(ages / timescale, SMALLEST)) ** stretch)))


_EXPONENTIAL = _Family(
    "exponential",
    ("decay", "log_level"),
    lambda ages, own: numpy.asarray(numpy.exp(own[1] - own[0] * ages)),
)
_FAMILIES = (
    _EXPONENTIAL,
    _Family(
        "power_law",
        ("scale_nats", "shift", "exponent", "offset_nats"),
        lambda ages, own: own[3] + own[0] * _power_shape(ages, own[1], own[2]),
        _power_shape,
        (numpy.geomspace(0.003, 3.0, 8), numpy.geomspace(0.1, 4.0, 8)),
        ((1e-3, 10.0), (0.02, 10.0)),
    ),
    _Family(
        "stretched_exponential",
        ("scale_nats", "timescale", "stretch", "offset_nats"),
        lambda ages, own: own[3] + own[0] * _stretched_shape(ages, own[1], own[2]),
        _stretched_shape,
        (numpy.geomspace(0.02, 5.0, 8), numpy.linspace(0.3, 1.8, 8)),
        ((1e-3, 50.0), (0.1, 2.0)),
    ),
)


@dataclass(frozen=True, eq=False)
class LossFit:
    """A fitted loss curve.

    Attributes:
        family: `exponential`, `power_law` or `stretched_exponential`.
        coefficients: by name; their times are in units of the iterations covered.
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
    _candidate: "_Candidate" = field(repr=False)

    def at(self, iterations: ArrayLike) -> Array:
        """Expected losses in nats, float64 in the shape of `iterations`."""
        places = numpy.asarray(iterations, dtype=numpy.float64)
        return self._candidate.at(places.ravel()).reshape(places.shape)

    def band(self, iterations: ArrayLike, confidence: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper bound, in nats, of single losses; each in the shape of `iterations`.

        By Student's t, from the noise of single losses and what is unknown of the coefficients. Beyond the last
        iteration, how far the family strays from the run adds to it, in proportion to the distance.

        Args:
            iterations: where.
            confidence: between 0 and 1.
        """
        places = numpy.asarray(iterations, dtype=numpy.float64)
        unknown = self._candidate.unknown(places.ravel()).reshape(places.shape) * self.noise_nats**2
        quantile = float(scipy.special.stdtrit(self.degrees_of_freedom, (1 + confidence) / 2))
        ahead = numpy.maximum(places - self.last_iteration, 0.0) / self.held_out_iterations
        half = quantile * numpy.sqrt(unknown + self.noise_nats**2 + (self.drift_nats * ahead) ** 2)
        return self.at(places) - half, self.at(places) + half

    @property
    def alpha1_per_iteration(self) -> float:
        """Decay of the exponential that touches the curve at the last iteration (the paper's Eq. 11).

        Zero where the loss stands still, negative where it rises.
        """
        before, after = self.at([self.last_iteration - 0.5, self.last_iteration + 0.5]).tolist()
        return float((before - after) / float(self.at(self.last_iteration)))

    @property
    def alpha2(self) -> float:
        """Logarithm, at iteration 0, of the same exponential."""
        level = numpy.log(float(self.at(self.last_iteration)))
        return float(level) + self.alpha1_per_iteration * self.last_iteration

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        alphas = {"alpha1_per_iteration": self.alpha1_per_iteration, "alpha2": self.alpha2}
        return {**own, "coefficients": dict(self.coefficients), **alphas}


def fit_loss(iterations: ArrayLike, losses: ArrayLike, span_iterations: int | None = None) -> LossFit:
    """Fit the loss curve, with the family and the weight of the past that forecast the last span best.

    The candidates, three families with four half-lives each, are fitted to all but the last span. They are judged by
    their mean absolute error on it: a spike there counts once, not squared. The simplest of those within one standard
    error of the best is fitted again to everything.

    However long the run, at most 256 bins are fitted, medians of as many consecutive losses each. RMSE and noise are
    those of single losses, the noise of 20,000 at most, evenly spaced.

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
    candidates = [_Candidate.fitted(family, before, span, life) for family in _FAMILIES for life in HALF_LIVES_SPANS]
    candidates = [candidate for candidate in candidates if candidate.is_sound(after[0])]
    chosen = candidates[_simplest(numpy.array([candidate.errors(after) for candidate in candidates]))]
    final = _Candidate.fitted(chosen.family, _binned(places, values), span, chosen.half_life_spans)
    weights = _weights(places, span, final.half_life_spans)
    missed = values[split:] - chosen.at(places[split:])
    return LossFit(
        family=final.family.name,
        coefficients=dict(zip(final.family.coefficients, final.coefficients.tolist(), strict=True)),
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
        _candidate=final,
    )


def robust_line(places: Array, values: Array, weights: Array) -> tuple[float, float]:
    """Slope and level at 0 of Huber's line through weighted points; places take at least two values.

    Args:
        places: `(points,)`, about 1 in size.
        values: `(points,)`.
        weights: relative, positive.
    """
    # Imported by the planner's thread and not with this module: a restart does not wait for it.
    from sklearn.linear_model import HuberRegressor

    slope, level = numpy.polyfit(places, values, 1, w=numpy.sqrt(weights))
    deviations = numpy.abs(values - level - slope * places)
    spread = float(deviations.max())
    if spread <= EXACT_FIT * (1 + float(numpy.abs(values).max())):
        return float(slope), float(level)
    # Relative to the line of least squares, and in units of its deviations: the search then converges at any scale.
    huber = HuberRegressor(epsilon=HUBER_EPSILON, alpha=0.0, max_iter=HUBER_ITERATIONS)
    try:
        huber.fit(places[:, None], (values - level - slope * places) / spread, sample_weight=weights / weights.mean())
    except ValueError:  # half of the points lie on a line, which leaves no scale of noise
        return float(slope), float(level)
    return float(slope + spread * huber.coef_[0]), float(level + spread * huber.intercept_)


@dataclass(frozen=True)
class _Candidate:
    """One family with one weight of the past, fitted over some iterations."""

    family: _Family
    half_life_spans: float | None
    first_iteration: float
    length_iterations: float
    coefficients: Array
    inverse: Array

    @classmethod
    def fitted(
        cls, family: _Family, points: tuple[Array, Array], span: float, half_life_spans: float | None
    ) -> "_Candidate":
        places, values = points
        first, length = float(places[0]), max(float(places[-1] - places[0]), 1.0)
        weights = _weights(places, span, half_life_spans)
        return cls(family, half_life_spans, first, length, *family.fit((places - first) / length, values, weights))

    def _ages(self, places: Array) -> Array:
        return (places - self.first_iteration) / self.length_iterations

    def at(self, places: Array) -> Array:
        return self.family.curve(self._ages(places), self.coefficients)

    def unknown(self, places: Array) -> Array:
        """Variance of the curve, in units of the noise's."""
        derivatives = self.family.derivatives(self._ages(places), self.coefficients)
        found: Array = numpy.einsum("ij,jk,ik->i", derivatives, self.inverse, derivatives)
        return numpy.maximum(found, 0.0)

    def errors(self, points: tuple[Array, Array]) -> Array:
        return numpy.abs(points[1] - self.at(points[0]))

    def is_sound(self, places: Array) -> bool:
        """Whether the curve can be a loss there: the exponential always is."""
        values = self.at(places)
        return bool(numpy.all(numpy.isfinite(values)) and numpy.all(values > 0)) or self.family is _EXPONENTIAL


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


def _simplest(errors: Array) -> int:
    """Index of the first candidate whose error on the held-out points is the best's, give or take a standard error."""
    means = errors.mean(axis=1)
    best = int(numpy.argmin(means))
    allowed = (errors - errors[best]).std(axis=1, ddof=1) / numpy.sqrt(errors.shape[1])
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
