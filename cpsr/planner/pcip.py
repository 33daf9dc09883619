"""The paper's checkpoint interval problem in closed form: its theorem as printed, un-truncated, and in exact form.

One unit of time throughout: the iteration. `T_s` is the stall of a checkpoint and `lambda` the failure rate in it;
`tau1` is per checkpoint, so that `tau1 / T_c` is per iteration and

    A = xi N_p tau1 exp(tau2 - alpha2) / (2 alpha1)    (iterations)
    B = alpha1 - lambda                                (per iteration; negative where failures are frequent)
    r = lambda sqrt(A / T_s)                           (per iteration)

The cost of Eq. 17 is `T_s / (1 - exp(-lambda P)) + (lambda A / tau1) T_c / (tau1 - B T_c)` with `P = T_c + T_s`, where
`tau1 > B T_c`. Its derivative vanishes where `tau1 - B T_c = 2 sqrt(A / T_s) sinh(lambda P / 2)`. The paper takes
`lambda P` for small, which gives `T_c = (tau1 - lambda sqrt(A T_s)) / (B + r)`. It prints the theorem without the
subtrahend: too long by `r T_s / (B + r)`.
"""

import math
from dataclasses import dataclass

from cpsr.planner.choice import LONGEST, LONGEST_TAKEN, SHORTEST, SHORTEST_TAKEN, Choice
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.units import in_iterations, whole_iterations

__all__ = ["Exact", "PaperTerms", "Theorem", "Untruncated", "exact_iterations", "paper_terms"]

# exp of more than this overflows a float.
EXPONENT_MAX = 700.0
# Doublings of the bracket of a root: beyond them the root is longer than any run.
DOUBLINGS_MAX = 200
ROOT_TOLERANCE_ITERATIONS = 1e-9


@dataclass(frozen=True)
class PaperTerms:
    """The terms of the theorem, all finite, with `lambda`, `tau1`, `T_s` and `A` positive.

    Attributes:
        tau1: decay of the predictor's error per checkpoint.
        stall_iterations: T_s.
        failures_per_iteration: lambda.
        deviation_iterations: A.
        decay_per_iteration: B.
    """

    tau1: float
    stall_iterations: float
    failures_per_iteration: float
    deviation_iterations: float
    decay_per_iteration: float

    @property
    def rate_per_iteration(self) -> float:
        """`r = lambda sqrt(A / T_s)`."""
        return self.failures_per_iteration * math.sqrt(self.deviation_iterations / self.stall_iterations)


def paper_terms(inputs: PlannerInputs) -> PaperTerms | Choice:
    """The terms of the theorem, or the choice in cases outside of it."""
    phase = inputs.phase
    if phase is None:
        return Choice(SHORTEST, f"the curves of loss and accuracy are not known yet; {SHORTEST_TAKEN}")
    stall = in_iterations(inputs.stall_seconds, inputs.iteration_seconds)
    failures = inputs.failures_per_second * inputs.iteration_seconds
    if math.isnan(stall) or math.isnan(failures) or failures < 0:
        return Choice(SHORTEST, f"stall, iteration time or failure rate is not known; {SHORTEST_TAKEN}")
    if failures == 0:
        return Choice(LONGEST, f"no failures are expected (lambda = 0); {LONGEST_TAKEN}")
    if stall == 0:
        return Choice(SHORTEST, f"checkpoints cost nothing (T_s = 0); {SHORTEST_TAKEN}")
    if not phase.tau1_per_checkpoint > 0:
        return Choice(LONGEST, f"more checkpoints do not make the predictor better (tau1 <= 0); {LONGEST_TAKEN}")
    if not phase.alpha1_per_iteration > 0:
        return Choice(SHORTEST, f"the loss does not fall (alpha1 <= 0); {SHORTEST_TAKEN}")
    exponent = phase.tau2 - phase.alpha2
    growth = math.exp(exponent) if exponent < EXPONENT_MAX else math.inf
    size = phase.xi * phase.parameters * phase.tau1_per_checkpoint
    deviation = size * growth / (2 * phase.alpha1_per_iteration)
    if deviation == 0:
        return Choice(LONGEST, f"predictions deviate by nothing (A = 0); {LONGEST_TAKEN}")
    if not deviation > 0:
        return Choice(SHORTEST, f"the gradients' second moment (xi) is not known; {SHORTEST_TAKEN}")
    terms = PaperTerms(phase.tau1_per_checkpoint, stall, failures, deviation, phase.alpha1_per_iteration - failures)
    if not all(math.isfinite(value) for value in (*vars(terms).values(), terms.rate_per_iteration)):
        return Choice(SHORTEST, f"a term of the theorem is not finite; {SHORTEST_TAKEN}")
    return terms


def _linear_terms(inputs: PlannerInputs) -> PaperTerms | Choice:
    """The terms if the linear stationarity condition has a minimum, else the choice without one."""
    terms = paper_terms(inputs)
    if isinstance(terms, Choice):
        return terms
    stall_root = terms.failures_per_iteration * math.sqrt(terms.deviation_iterations * terms.stall_iterations)
    if terms.tau1 <= stall_root:
        return Choice(SHORTEST, f"the cost only rises with the interval (tau1 <= lambda sqrt(A T_s)); {SHORTEST_TAKEN}")
    if terms.decay_per_iteration + terms.rate_per_iteration <= 0:
        return Choice(LONGEST, f"the cost only falls with the interval (B + r <= 0); {LONGEST_TAKEN}")
    return terms


class Theorem:
    """`T_c = tau1 / (B + lambda sqrt(A / T_s))`, as printed.

    Source: CPSR, Theorem 1 (Eq. 16).
    """

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The theorem's interval; a bound where its derivation has no solution."""
        terms = _linear_terms(inputs)
        if isinstance(terms, Choice):
            return terms
        return _chosen(terms.tau1 / (terms.decay_per_iteration + terms.rate_per_iteration))


class Untruncated:
    """`T_c = (tau1 - lambda sqrt(A T_s)) / (B + r)`: the theorem with the `T_s` that its last step drops.

    Source: the last equation of the proof in CPSR, section V-C, solved for T_c.
    """

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval; a bound where the linear condition has no solution."""
        terms = _linear_terms(inputs)
        if isinstance(terms, Choice):
            return terms
        stall_root = terms.rate_per_iteration * terms.stall_iterations
        return _chosen((terms.tau1 - stall_root) / (terms.decay_per_iteration + terms.rate_per_iteration))


class Exact:
    """The root of `tau1 - B T_c = 2 sqrt(A / T_s) sinh(lambda (T_c + T_s) / 2)`.

    Source: stationarity of CPSR, Eq. 17, without approximation.
    """

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval; a bound where the cost has no minimum inside."""
        terms = paper_terms(inputs)
        if isinstance(terms, Choice):
            return terms
        interval = exact_iterations(terms)
        if interval is None:
            return Choice(SHORTEST, f"the cost only rises with the interval; {SHORTEST_TAKEN}")
        return _chosen(interval)


def exact_iterations(terms: PaperTerms) -> float | None:
    """The interval at which the cost of Eq. 17 is stationary, in iterations; None if it rises from the start."""
    scale = 2 * math.sqrt(terms.deviation_iterations / terms.stall_iterations)
    # The import takes a third of a second, and most jobs do not need it.
    from scipy.optimize import brentq

    def slack(interval: float) -> float:
        """The condition through asinh, which cannot overflow; concave, positive left of the root."""
        left = terms.tau1 - terms.decay_per_iteration * interval
        return math.asinh(left / scale) - terms.failures_per_iteration * (interval + terms.stall_iterations) / 2

    if not slack(0.0) > 0:
        return None
    # Right of tau1 / B the left side is negative; for B <= 0 it grows like a logarithm, slower than the line.
    high = 1 / terms.failures_per_iteration
    if terms.decay_per_iteration > 0:
        high = min(high, terms.tau1 / terms.decay_per_iteration)
    for _ in range(DOUBLINGS_MAX):
        if slack(high) <= 0:
            return float(brentq(slack, 0.0, high, xtol=ROOT_TOLERANCE_ITERATIONS))
        high *= 2
    return math.inf


def _chosen(iterations: float) -> Choice:
    if iterations < 1:
        return Choice(SHORTEST, f"the optimum of {iterations:.3g} iterations is shorter than one")
    return Choice(whole_iterations(iterations))
