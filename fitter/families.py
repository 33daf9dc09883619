"""Families of falling curves: their values, derivatives, and robust fits to weighted points."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy
import scipy  # its parts are loaded at their first use: a restart does not wait for them
from numpy.typing import NDArray

from cpsr.fitter.covariance import GAUSSIAN_MAD, sandwich

__all__ = ["Array", "Exponential", "Family", "PowerLaw", "StretchedExponential"]

Array = NDArray[numpy.float64]

# Huber's constant: 95% as efficient as least squares on Gaussian noise, and deaf to spikes.
HUBER_EPSILON = 1.35
HUBER_ITERATIONS = 300
HUBER_TOLERANCE = 1e-12  # of the criterion, in units of the noise
SMALLEST_SPREAD = 1e-9  # of the noise, in units of what least squares leave: half of the points lie on a line
# Points closer to a line than this, relative to it, have no scale of noise for Huber's estimator to find.
EXACT_FIT = 1e-9
# The polish starts next to the optimum; where coefficients are hardly distinguishable, more steps change no forecast.
EVALUATIONS_MAX = 120
# Shape coefficients tried before the polish, and its bounds; times in units of the covered iterations.
SHIFTS = numpy.geomspace(0.003, 3.0, 8)
SHIFT_BOUNDS = (1e-3, 10.0)
EXPONENTS = numpy.geomspace(0.1, 4.0, 8)
EXPONENT_BOUNDS = (0.02, 10.0)
TIMESCALES = numpy.geomspace(0.02, 5.0, 8)
TIMESCALE_BOUNDS = (1e-3, 50.0)
STRETCHES = numpy.linspace(0.3, 1.8, 8)
STRETCH_BOUNDS = (0.1, 2.0)
SMALLEST = 1e-12


class Family(Protocol):
    """One form of curve over a fixed stretch of iterations; coefficients are arrays in the order of `names`."""

    name: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    def value(self, iterations: Array, coefficients: Array) -> Array:
        """The curve, `(points,)`."""

    def jacobian(self, iterations: Array, coefficients: Array) -> Array:
        """Derivatives of `value` by the coefficients, `(points, coefficients)`."""

    def slope(self, iteration: float, coefficients: Array) -> float:
        """Derivative of `value` by the iteration."""

    def fit(self, iterations: Array, losses: Array, weights: Array) -> tuple[Array, Array]:
        """Coefficients and their covariance; weights are relative."""


@dataclass(frozen=True)
class Exponential:
    """`exp(-alpha1 t + alpha2)`, the paper's Eq. 11, with t the iteration itself.

    Fitted as a line to the logarithm by Huber's regression; every value must be positive.
    """

    name: ClassVar[str] = "exponential"
    names: ClassVar[tuple[str, ...]] = ("alpha1_per_iteration", "alpha2")

    def value(self, iterations: Array, coefficients: Array) -> Array:
        """The curve, `(points,)`."""
        return numpy.asarray(numpy.exp(coefficients[1] - coefficients[0] * iterations))

    def jacobian(self, iterations: Array, coefficients: Array) -> Array:
        """Derivatives of `value` by the coefficients, `(points, 2)`."""
        return self.value(iterations, coefficients)[:, None] * _line(iterations)

    def slope(self, iteration: float, coefficients: Array) -> float:
        """Derivative of `value` by the iteration."""
        return float(-coefficients[0] * self.value(numpy.array([iteration]), coefficients)[0])

    def fit(self, iterations: Array, losses: Array, weights: Array) -> tuple[Array, Array]:
        """Coefficients and their covariance; weights are relative, iterations take at least two values."""
        middle, width = iterations.mean(), numpy.ptp(iterations) / 2
        logarithms = numpy.log(losses)
        rate, level, outlying = _huber_line((iterations - middle) / width, logarithms, weights)
        alpha1 = -rate / width
        coefficients = numpy.array([alpha1, level + alpha1 * middle])
        residuals = logarithms - _line(iterations) @ coefficients
        scores = weights * numpy.clip(residuals, -outlying, outlying)
        curvatures = weights * (numpy.abs(residuals) <= outlying)
        return coefficients, sandwich(_line(iterations), scores, curvatures)


class _WithOffset(ABC):
    """What the two families `offset + scale * shape` share: a grid of shapes to start from, and a robust polish."""

    first_iteration: int
    length_iterations: int

    def value(self, iterations: Array, coefficients: Array) -> Array:
        """The curve, `(points,)`; before the first iteration it keeps its value there."""
        return numpy.asarray(coefficients[3] + coefficients[0] * self._shape(iterations, *coefficients[1:3]))

    def fit(self, iterations: Array, losses: Array, weights: Array) -> tuple[Array, Array]:
        """Coefficients and their covariance; weights are relative."""
        roots = numpy.sqrt(weights)
        coefficients = self._start(iterations, losses, weights)
        exact = EXACT_FIT * float(numpy.abs(losses).max())
        # Twice: the start is off by its grid, most where the curve is steep, and measured by the median those points
        # would count as spikes and never be met.
        for typical in (numpy.mean, numpy.median):
            deviations = numpy.abs(roots * (losses - self.value(iterations, coefficients)))
            scale = max(GAUSSIAN_MAD * float(typical(deviations)), exact)
            found = self._polished(iterations, losses, roots, coefficients, scale)
            coefficients = numpy.asarray(found.x)
        misfits = 1 + (found.fun / scale) ** 2
        jacobian = roots[:, None] * self.jacobian(iterations, coefficients)
        return coefficients, sandwich(jacobian, found.fun / numpy.sqrt(misfits), misfits**-1.5)

    def _polished(
        self, iterations: Array, losses: Array, roots: Array, coefficients: Array, scale: float
    ) -> "scipy.optimize.OptimizeResult":
        """The nearest least sum of deviations, those beyond `scale` at their size and not its square."""
        return scipy.optimize.least_squares(
            lambda coefficients: roots * (self.value(iterations, coefficients) - losses),
            coefficients,
            jac=lambda coefficients: roots[:, None] * self.jacobian(iterations, coefficients),
            bounds=self._bounds(),
            x_scale="jac",
            loss="soft_l1",
            f_scale=scale,
            max_nfev=EVALUATIONS_MAX,
        )

    @abstractmethod
    def jacobian(self, iterations: Array, coefficients: Array) -> Array:
        """Derivatives of `value` by the coefficients, `(points, 4)`."""

    @abstractmethod
    def _shape(self, iterations: Array, first: Array | float, second: Array | float) -> Array:
        """The shape that scale and offset are applied to, by its own two coefficients."""

    @abstractmethod
    def _grid(self) -> tuple[Array, Array]:
        """Values of the two coefficients of the shape to start from."""

    @abstractmethod
    def _bounds(self) -> tuple[Array, Array]:
        """Lowest and highest of the four coefficients."""

    def _start(self, iterations: Array, losses: Array, weights: Array) -> Array:
        """The best of a grid of shapes, each with its least-squares scale and offset; an offset is not negative."""
        firsts, seconds = (axis.ravel() for axis in numpy.meshgrid(*self._grid(), indexing="ij"))
        shapes = self._shape(iterations[None, :], firsts[:, None], seconds[:, None])
        shares = weights / weights.sum()
        mean_shapes, mean_loss = shapes @ shares, float(losses @ shares)
        spreads = shapes - mean_shapes[:, None]
        variances = numpy.maximum((spreads**2) @ shares, SMALLEST)
        scales = ((spreads * (losses - mean_loss)) @ shares) / variances
        offsets = mean_loss - scales * mean_shapes
        through_zero = ((shapes * losses) @ shares) / numpy.maximum((shapes**2) @ shares, SMALLEST)
        scales = numpy.where(offsets < 0, through_zero, scales)
        offsets = numpy.maximum(offsets, 0.0)
        misfits = numpy.abs(offsets[:, None] + scales[:, None] * shapes - losses) @ shares
        best = int(numpy.argmin(misfits))
        return numpy.array([scales[best], firsts[best], seconds[best], offsets[best]])


@dataclass(frozen=True)
class PowerLaw(_WithOffset):
    """`scale ((t - first + shift) / (length + shift))^-exponent + offset`: the scale is the excess at the end.

    Attributes:
        first_iteration: of the points that the curve is fitted to.
        length_iterations: that they cover, at least 1.
    """

    name: ClassVar[str] = "power_law"
    names: ClassVar[tuple[str, ...]] = ("scale_nats", "shift_iterations", "exponent", "offset_nats")
    first_iteration: int
    length_iterations: int

    def jacobian(self, iterations: Array, coefficients: Array) -> Array:
        """Derivatives of `value` by the coefficients, `(points, 4)`."""
        scale, shift, exponent, _ = coefficients
        shape, since = self._shape(iterations, shift, exponent), self._since(iterations, shift)
        end = self.length_iterations + shift
        by_shift = -exponent * scale * shape * (1 / since - 1 / end)
        by_exponent = -scale * shape * numpy.log(since / end)
        return numpy.stack([shape, by_shift, by_exponent, numpy.ones_like(shape)], axis=1)

    def slope(self, iteration: float, coefficients: Array) -> float:
        """Derivative of `value` by the iteration."""
        scale, shift, exponent, _ = coefficients
        at = numpy.array([iteration])
        return float((-exponent * scale * self._shape(at, shift, exponent) / self._since(at, shift))[0])

    def _since(self, iterations: Array, shift: Array | float) -> Array:
        return numpy.asarray(numpy.maximum(iterations - self.first_iteration, 0.0) + shift)

    def _shape(self, iterations: Array, shift: Array | float, exponent: Array | float) -> Array:
        return numpy.asarray((self._since(iterations, shift) / (self.length_iterations + shift)) ** -exponent)

    def _grid(self) -> tuple[Array, Array]:
        return SHIFTS * self.length_iterations, EXPONENTS

    def _bounds(self) -> tuple[Array, Array]:
        (low, high), (lowest, highest), length = SHIFT_BOUNDS, EXPONENT_BOUNDS, self.length_iterations
        return numpy.array([-numpy.inf, low * length, lowest, 0.0]), numpy.array(
            [numpy.inf, high * length, highest, numpy.inf]
        )


@dataclass(frozen=True)
class StretchedExponential(_WithOffset):
    """`scale exp(-((t - first) / timescale)^stretch) + offset`: the scale is the excess at the beginning.

    Attributes:
        first_iteration: of the points that the curve is fitted to.
        length_iterations: that they cover, at least 1.
    """

    name: ClassVar[str] = "stretched_exponential"
    names: ClassVar[tuple[str, ...]] = ("scale_nats", "timescale_iterations", "stretch", "offset_nats")
    first_iteration: int
    length_iterations: int

    def jacobian(self, iterations: Array, coefficients: Array) -> Array:
        """Derivatives of `value` by the coefficients, `(points, 4)`."""
        scale, timescale, stretch, _ = coefficients
        ages, shape = self._ages(iterations, timescale), self._shape(iterations, timescale, stretch)
        excess = scale * shape * ages**stretch
        by_timescale, by_stretch = excess * stretch / timescale, -excess * numpy.log(ages)
        return numpy.stack([shape, by_timescale, by_stretch, numpy.ones_like(shape)], axis=1)

    def slope(self, iteration: float, coefficients: Array) -> float:
        """Derivative of `value` by the iteration."""
        scale, timescale, stretch, _ = coefficients
        at = numpy.array([iteration])
        ages = self._ages(at, timescale)
        return float((-scale * self._shape(at, timescale, stretch) * stretch * ages ** (stretch - 1) / timescale)[0])

    def _ages(self, iterations: Array, timescale: Array | float) -> Array:
        # Not quite zero: its logarithm and its powers stay finite.
        return numpy.asarray(numpy.maximum((iterations - self.first_iteration) / timescale, SMALLEST))

    def _shape(self, iterations: Array, timescale: Array | float, stretch: Array | float) -> Array:
        return numpy.asarray(numpy.exp(-(self._ages(iterations, timescale) ** stretch)))

    def _grid(self) -> tuple[Array, Array]:
        return TIMESCALES * self.length_iterations, STRETCHES

    def _bounds(self) -> tuple[Array, Array]:
        (low, high), (lowest, highest), length = TIMESCALE_BOUNDS, STRETCH_BOUNDS, self.length_iterations
        return numpy.array([-numpy.inf, low * length, lowest, 0.0]), numpy.array(
            [numpy.inf, high * length, highest, numpy.inf]
        )


def _line(iterations: Array) -> Array:
    """Derivatives of `-alpha1 t + alpha2`, `(points, 2)`."""
    return numpy.stack([-iterations, numpy.ones_like(iterations)], axis=1)


def _huber_line(places: Array, values: Array, weights: Array) -> tuple[float, float, float]:
    """Slope, level at 0, and the deviation beyond which a point counts as outlying.

    Huber, Robust Statistics, 1981, section 7.7: the scale of the noise is estimated with the line, as scikit-learn's
    `HuberRegressor` does; that takes 0.6 s longer to import, which the first plan of a life would wait for.
    """
    slope, level = numpy.polyfit(places, values, 1, w=numpy.sqrt(weights))
    exact = EXACT_FIT * (1 + float(numpy.abs(values).max()))
    deviations = values - level - slope * places
    if float(numpy.abs(deviations).max()) <= exact:
        return float(slope), float(level), exact
    shares, scale = weights / weights.sum(), float(numpy.sqrt(weights @ deviations**2 / weights.sum()))

    def misfit(by: Array) -> tuple[float, Array]:
        """Huber's joint criterion of line and scale, and its derivatives; both are convex."""
        beside, spread = deviations / scale - by[0] * places - by[1], by[2]
        clipped = numpy.clip(beside, -HUBER_EPSILON * spread, HUBER_EPSILON * spread)
        pulls = shares * clipped
        value = spread + pulls @ (2 * beside - clipped) / spread
        slopes = -2 * (pulls @ places) / spread, -2 * pulls.sum() / spread, 1 - pulls @ clipped / spread**2
        return float(value), numpy.array(slopes)

    free, positive = (None, None), (SMALLEST_SPREAD, None)
    found = scipy.optimize.minimize(
        misfit,
        (0.0, 0.0, 1.0),
        method="L-BFGS-B",
        jac=True,
        bounds=(free, free, positive),
        options={"maxiter": HUBER_ITERATIONS, "ftol": HUBER_TOLERANCE, "gtol": HUBER_TOLERANCE},
    )
    by_slope, by_level, spread = (scale * float(one) for one in found.x)
    return float(slope) + by_slope, float(level) + by_level, HUBER_EPSILON * spread
