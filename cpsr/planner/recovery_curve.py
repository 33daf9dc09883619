"""The end cost of a predicted recovery: a line, and the paper's curve."""

import math
from dataclasses import asdict, dataclass, replace

import numpy

from cpsr.planner.inputs import Array, PhaseInputs

__all__ = ["EndCostCurve", "PaperCurve"]

# Points of a phase over which the paper's curve is averaged: Gauss-Legendre.
_NODES, _WEIGHTS = numpy.polynomial.legendre.leggauss(8)
PHASE_NODES: Array = (_NODES + 1) / 2
PHASE_WEIGHTS: Array = _WEIGHTS / 2


@dataclass(frozen=True)
class EndCostCurve:
    """The end cost as a line through horizon and interval, `a + b u + c T_c`.

    Attributes:
        constant_iterations: a.
        per_horizon_iteration: b.
        per_interval_iteration: c.
        deviation_per_horizon_iteration: standard deviation of b; that of a single failure is larger.
        source: origin of the line, for the plan's explanation.
    """

    constant_iterations: float
    per_horizon_iteration: float
    per_interval_iteration: float
    deviation_per_horizon_iteration: float = 0.0
    source: str = "prior"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """Expected end cost (negative: the run ends better) of a failure that far past its checkpoint.

        Args:
            horizon_iterations: `u = f - c` of the failures.
            interval_iterations: spacing of the checkpoints; broadcast with the horizons.
        """
        at_zero = self.constant_iterations + self.per_interval_iteration * interval_iterations
        return numpy.asarray(at_zero + self.per_horizon_iteration * horizon_iterations)

    def with_refusals(self, vetoed_share: float, rolled_back_share: float, watch_iterations: int) -> "EndCostCurve":
        """The line for predictions of which these shares are not kept.

        A vetoed prediction costs the horizon, since it is recomputed. One that was rolled back also costs its watch.

        Args:
            vetoed_share: of the predictions.
            rolled_back_share: of the predictions.
            watch_iterations: length of the watch.
        """
        refused = vetoed_share + rolled_back_share
        kept = 1.0 - refused
        return replace(
            self,
            constant_iterations=kept * self.constant_iterations + rolled_back_share * watch_iterations,
            per_horizon_iteration=kept * self.per_horizon_iteration + refused,
            per_interval_iteration=kept * self.per_interval_iteration,
        )


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
