"""The end cost of a predicted recovery: a line through what the run has measured, and the paper's curve."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy
from numpy.typing import ArrayLike

from cpsr.planner.inputs import Array, PhaseInputs

__all__ = [
    "LEAD_AFTER_ITERATIONS",
    "OBSERVATIONS_MAX",
    "CostObservation",
    "EndCostCurve",
    "PaperCurve",
    "Row",
    "as_row",
]

# A recovery that gets ahead does so only after so many iterations of training. Measured on a GPT of 0.4M
# parameters, 30 predicted recoveries of three jobs (`cpsr bench plan --real`, 2026-11-21): those with that long until
# the next failure were expected to move the lag by -30 iterations and moved it by -31 +- 7; those with less were
# expected at -33, and moved it by +7 +- 6.
LEAD_AFTER_ITERATIONS = 100
# Newest measurements that a curve keeps: enough for three coefficients, few enough to follow a run that changes.
OBSERVATIONS_MAX = 64
# Weight of the prior scatter of recoveries, as a number of observations.
SCATTER_PRIOR_OBSERVATIONS = 4.0
# Coefficients and scatter are estimated in turns; the scatter settles within a few per cent after three.
SCATTER_ROUNDS = 3
# Points of a phase over which the paper's curve is averaged: Gauss-Legendre.
_NODES, _WEIGHTS = numpy.polynomial.legendre.leggauss(8)
PHASE_NODES: Array = (_NODES + 1) / 2
PHASE_WEIGHTS: Array = _WEIGHTS / 2

Row = tuple[float, float, float]  # a (iterations), b and c (iterations per iteration)


@dataclass(frozen=True)
class CostObservation:
    """What one recovery tells about the end cost.

    Attributes:
        horizon_iterations: from the checkpoint to the failure.
        interval_iterations: spacing of the checkpoints that the prediction rested on.
        end_cost_iterations: what was recomputed, or was expected of a prediction that was kept.
    """

    horizon_iterations: float
    interval_iterations: float
    end_cost_iterations: float


@dataclass(frozen=True)
class EndCostCurve:
    """Bayesian linear regression of the end cost, `cost = a + b u + c T_c`, updated by measured recoveries.

    Measurements count by the scatter of recoveries among themselves, which is estimated with them.

    Attributes:
        prior_mean: of a (iterations), b and c (iterations per iteration).
        prior_covariance: of the three, positive definite.
        scatter_iterations: expected standard deviation of single recoveries around the line.
        observations: the newest measurements, oldest first.
        prior_source: origin of the prior, for the plan's explanation.
    """

    prior_mean: Row
    prior_covariance: tuple[Row, Row, Row]
    scatter_iterations: float
    observations: tuple[CostObservation, ...] = ()
    prior_source: str = "prior"

    @classmethod
    def with_independent_prior(
        cls, mean: Sequence[float], standard_errors: Sequence[float], scatter_iterations: float, source: str = "prior"
    ) -> "EndCostCurve":
        """A curve whose three coefficients are uncertain independently of each other.

        Args:
            mean: a (iterations), b and c (iterations per iteration).
            standard_errors: of the three, positive.
            scatter_iterations: of single recoveries.
            source: origin of the prior.
        """
        covariance = numpy.diag(numpy.square(numpy.asarray(standard_errors, dtype=numpy.float64)))
        return cls.of_estimate(mean, covariance, scatter_iterations, source)

    @classmethod
    def of_estimate(
        cls, mean: Sequence[float], covariance: ArrayLike, scatter_iterations: float, source: str = "prior"
    ) -> "EndCostCurve":
        """A curve with the coefficients and the covariance of another one, as its prior.

        Args:
            mean: a (iterations), b and c (iterations per iteration).
            covariance: of the three, `(3, 3)`; made symmetric, since an estimate is so only up to rounding.
            scatter_iterations: of single recoveries.
            source: origin of the estimate.
        """
        matrix = numpy.asarray(covariance, dtype=numpy.float64)
        rows = [as_row(row) for row in (matrix + matrix.T) / 2]
        return cls(as_row(mean), (rows[0], rows[1], rows[2]), float(scatter_iterations), (), source)

    @property
    def source(self) -> str:
        """Where the curve comes from."""
        count = len(self.observations)
        return f"{count} measured recoveries, on {self.prior_source}" if count else self.prior_source

    @property
    def coefficients(self) -> Row:
        """Posterior mean of a (iterations), b and c (iterations per iteration)."""
        return self._posterior[0]

    @property
    def covariance(self) -> Array:
        """Posterior covariance of the coefficients, `(3, 3)`."""
        return self._posterior[1]

    def with_observation(self, observation: CostObservation) -> "EndCostCurve":
        """The curve after one more measurement; beyond OBSERVATIONS_MAX the oldest is dropped."""
        kept = (*self.observations, observation)[-OBSERVATIONS_MAX:]
        return EndCostCurve(self.prior_mean, self.prior_covariance, self.scatter_iterations, kept, self.prior_source)

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """Expected end cost (negative: the run ends better) of a failure that far past its checkpoint.

        Args:
            horizon_iterations: `u = f - c` of the failures.
            interval_iterations: spacing of the checkpoints; broadcast with the horizons.
        """
        a, b, c = self.coefficients
        return numpy.asarray(a + c * interval_iterations + b * horizon_iterations)

    def deviation_iterations(self, horizon_iterations: float, interval_iterations: float) -> float:
        """Standard deviation of the expected end cost; a single failure scatters more.

        Args:
            horizon_iterations: of the failure; finite.
            interval_iterations: spacing of the checkpoints; finite.
        """
        row = numpy.array([1.0, horizon_iterations, interval_iterations])
        scale = float(numpy.abs(row).max())  # the square of a long horizon is too large for a float
        return scale * math.sqrt(float(row / scale @ self.covariance @ (row / scale)))

    @cached_property
    def _posterior(self) -> tuple[Row, Array]:
        """Mean and covariance of the coefficients."""
        if not self.observations:
            return self.prior_mean, numpy.array(self.prior_covariance)
        data = numpy.array([tuple(asdict(observation).values()) for observation in self.observations])
        rows = numpy.column_stack([numpy.ones(len(data)), data[:, 0], data[:, 1]])
        costs = data[:, 2]
        prior_mean, prior_precision = numpy.array(self.prior_mean), numpy.linalg.inv(numpy.array(self.prior_covariance))
        scatter_prior = scatter = self.scatter_iterations**2
        for _ in range(SCATTER_ROUNDS):
            covariance = numpy.linalg.inv(prior_precision + rows.T @ rows / scatter)
            mean = covariance @ (prior_precision @ prior_mean + rows.T @ costs / scatter)
            excess = float(numpy.sum((costs - rows @ mean) ** 2))
            weight = SCATTER_PRIOR_OBSERVATIONS
            scatter = (weight * scatter_prior + excess) / (weight + len(costs))
        return as_row(mean), numpy.asarray(covariance)


@dataclass(frozen=True)
class PaperCurve:
    """The paper's recovery cost averaged over a phase, `T_p = ln(1 + x0 exp((alpha1 - tau1 / T_c) t)) / alpha1`.

    It ignores the horizon: every failure of a phase costs the same.

    Source: CPSR, Eq. 13 with Eq. 10; `x0 = xi N_p exp(tau2 - alpha2) / 2`.

    Attributes:
        phase: the coefficients, in iterations.

    Raises:
        ValueError: a coefficient is not finite, the loss does not fall (alpha1 <= 0), or xi or N_p is negative.
    """

    phase: PhaseInputs

    def __post_init__(self) -> None:
        phase = self.phase
        wrong = [name for name, value in asdict(phase).items() if value is not None and not math.isfinite(value)]
        if wrong:
            raise ValueError(f"the paper's curve needs finite coefficients; not finite: {', '.join(wrong)}")
        if phase.alpha1_per_iteration <= 0 or phase.xi < 0 or phase.parameters < 0:
            raise ValueError(
                "the paper's curve needs a falling loss and a second moment: alpha1_per_iteration > 0, xi >= 0 and "
                f"parameters >= 0, not {phase.alpha1_per_iteration}, {phase.xi} and {phase.parameters}"
            )

    @property
    def source(self) -> str:
        """Where the curve comes from."""
        phase = self.phase
        return f"Eq. 13 of the paper over iterations {phase.first_iteration} to {phase.last_iteration}"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """Mean iterations behind after a failure in the phase; the same for every horizon.

        Args:
            horizon_iterations: of the failures, for the shape of the result.
            interval_iterations: spacing of the checkpoints; broadcast with the horizons.
        """
        phase = self.phase
        intervals = numpy.asarray(interval_iterations, dtype=numpy.float64)[..., None]
        times = phase.first_iteration + PHASE_NODES * (phase.last_iteration - phase.first_iteration)
        size = phase.xi / 2 * phase.parameters
        start = (math.log(size) if size > 0 else -math.inf) + phase.tau2 - phase.alpha2
        exponents = start + (phase.alpha1_per_iteration - phase.tau1_per_checkpoint / intervals) * times
        costs = numpy.logaddexp(0.0, exponents) @ PHASE_WEIGHTS / phase.alpha1_per_iteration
        shape = numpy.broadcast_shapes(costs.shape, numpy.shape(horizon_iterations))
        return numpy.broadcast_to(costs, shape)


def as_row(values: Any) -> Row:
    """Three numbers as plain floats."""
    a, b, c = (float(value) for value in values)
    return a, b, c
