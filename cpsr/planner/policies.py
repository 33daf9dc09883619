"""Rules that choose an interval: Young, Daly, and the paper's theorem.

The theorem has one unit of time throughout: the iteration. `T_s` is the stall of a checkpoint and `lambda` the failure
rate in it; `tau1` is per checkpoint, so that `tau1 / T_c` is per iteration and

    A = xi N_p tau1 exp(tau2 - alpha2) / (2 alpha1)    (iterations)
    B = alpha1 - lambda                                (per iteration; negative where failures are frequent)
    r = lambda sqrt(A / T_s)                           (per iteration)

The cost of Eq. 17 is `T_s / (1 - exp(-lambda P)) + (lambda A / tau1) T_c / (tau1 - B T_c)` with `P = T_c + T_s`, where
`tau1 > B T_c`. Its derivative vanishes where `tau1 - B T_c = 2 sqrt(A / T_s) sinh(lambda P / 2)`. The paper takes
`lambda P` for small, which gives `T_c = (tau1 - lambda sqrt(A T_s)) / (B + r)`. It prints the theorem without the
subtrahend: too long by `r T_s / (B + r)`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cpsr.planner.inputs import ITERATIONS_MAX, PlannerInputs, whole_iterations

__all__ = [
    "LONGEST",
    "LONGEST_TAKEN",
    "POLICIES",
    "SHORTEST",
    "SHORTEST_TAKEN",
    "Choice",
    "PaperTerms",
    "Rule",
    "chosen_interval",
    "daly",
    "linear_terms",
    "paper_terms",
    "theorem1",
    "young",
]

SHORTEST = 1
LONGEST = ITERATIONS_MAX
# Their effect, for messages.
SHORTEST_TAKEN = "the shortest allowed interval is taken"
LONGEST_TAKEN = "the longest allowed interval is taken"
# exp of more than this overflows a float.
EXPONENT_MAX = 700.0


@dataclass(frozen=True)
class Choice:
    """An interval before any bound.

    Attributes:
        interval_iterations: at least 1. If a rule has no optimum this is SHORTEST or LONGEST, so that the bounds
            decide.
        note: what is unusual about it; may be empty.
    """

    interval_iterations: int
    note: str = ""


Rule = Callable[[PlannerInputs], Choice]
"""Chooses an interval for a job before any bound; SHORTEST or LONGEST where it has no optimum."""


def young(inputs: PlannerInputs) -> Choice:
    """`T_c = sqrt(2 T_s M)`, with T_s the stall of a checkpoint and M the mean time between failures.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    stall, rate = inputs.stall_seconds, inputs.failures_per_second
    if rate == 0:
        return Choice(LONGEST if stall > 0 else SHORTEST)
    return Choice(whole_iterations(math.sqrt(2 * stall / rate) / inputs.iteration_seconds))


def daly(inputs: PlannerInputs) -> Choice:
    """`T_c = sqrt(2 T_s M) (1 + sqrt(T_s / (2 M)) / 3 + T_s / (18 M)) - T_s` for `T_s < 2 M`, else M.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006: the expansion of the minimum of his exact wall time for exponential failures.
    """
    stall, rate = inputs.stall_seconds, inputs.failures_per_second
    if rate == 0:
        return Choice(LONGEST if stall > 0 else SHORTEST)
    seconds = mtbf = 1 / rate
    if stall < 2 * mtbf:
        ratio = math.sqrt(stall / (2 * mtbf))
        seconds = 2 * mtbf * ratio * (1 + ratio / 3 + ratio * ratio / 9) - stall
    return Choice(whole_iterations(seconds / inputs.iteration_seconds))


def theorem1(inputs: PlannerInputs) -> Choice:
    """`T_c = tau1 / (B + lambda sqrt(A / T_s))`, as printed; a bound where its derivation has no solution.

    Its proof assumes that the loss falls (alpha1 > 0), and that the predictor gets better with the checkpoints
    (tau1 > 0). Until the measurements show both, tau1 beyond chance, the interval stays as it is. So it does while
    failures are so frequent that the printed interval would be negative.

    Source: CPSR, Theorem 1 (Eq. 16).
    """
    terms = linear_terms(inputs)
    if isinstance(terms, Choice):
        return terms
    return chosen_interval(terms.tau1 / (terms.decay_per_iteration + terms.rate_per_iteration))


# The rules of a running job beside `cpsr`, the interval of least cost.
POLICIES: Mapping[str, Rule] = {"theorem1": theorem1, "young": young, "daly": daly}


def chosen_interval(iterations: float) -> Choice:
    """The choice of a computed optimum, which may be shorter than one iteration."""
    if iterations < 1:
        return Choice(SHORTEST, f"the optimum of {iterations:.3g} iterations is shorter than one")
    return Choice(whole_iterations(iterations))


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
    stall = inputs.stall_seconds / inputs.iteration_seconds
    failures = inputs.failures_per_second * inputs.iteration_seconds
    if failures == 0:
        return Choice(LONGEST, f"no failures are expected (lambda = 0); {LONGEST_TAKEN}")
    if stall == 0:
        return Choice(SHORTEST, f"checkpoints cost nothing (T_s = 0); {SHORTEST_TAKEN}")
    if phase is None:
        return _held(inputs, "the curves of loss and accuracy are not known yet")
    tau1, low = phase.tau1_per_checkpoint, phase.tau1_low_per_checkpoint
    if min(tau1, tau1 if low is None else low) <= 0:
        return _held(inputs, f"more checkpoints make the predictor no better beyond chance (tau1 = {tau1:.3g})")
    if phase.alpha1_per_iteration <= 0:
        return _held(inputs, f"the loss does not fall (alpha1 = {phase.alpha1_per_iteration:.3g})")
    exponent = phase.tau2 - phase.alpha2
    growth = math.exp(exponent) if exponent < EXPONENT_MAX else math.inf
    size = phase.xi * phase.parameters * phase.tau1_per_checkpoint
    deviation = size * growth / (2 * phase.alpha1_per_iteration)
    if deviation == 0:
        return Choice(LONGEST, f"predictions deviate by nothing (A = 0); {LONGEST_TAKEN}")
    terms = PaperTerms(phase.tau1_per_checkpoint, stall, failures, deviation, phase.alpha1_per_iteration - failures)
    if not all(math.isfinite(value) for value in (*vars(terms).values(), terms.rate_per_iteration)):
        return _held(inputs, "a term of the theorem is not finite")
    return terms


def _held(inputs: PlannerInputs, why: str) -> Choice:
    """The present interval: nothing that was measured speaks for another."""
    return Choice(inputs.interval_iterations, f"{why}; the interval stays as it is")


def linear_terms(inputs: PlannerInputs) -> PaperTerms | Choice:
    """The terms if the linear stationarity condition has a solution, else the choice without one."""
    terms = paper_terms(inputs)
    if isinstance(terms, Choice):
        return terms
    stall_root = terms.failures_per_iteration * math.sqrt(terms.deviation_iterations * terms.stall_iterations)
    if terms.tau1 <= stall_root:
        return Choice(SHORTEST, f"the cost only rises with the interval (tau1 <= lambda sqrt(A T_s)); {SHORTEST_TAKEN}")
    if terms.decay_per_iteration + terms.rate_per_iteration <= 0:
        # The form without an end is one for small `lambda P`: it says nothing of long intervals.
        return _held(inputs, "failures are more frequent than the loss falls (B + r <= 0)")
    return terms
