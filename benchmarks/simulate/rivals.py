"""Other rules for the interval, beside those of a running job; after a failure they all recompute."""

import math
from collections.abc import Mapping
from dataclasses import replace

from cpsr.planner.cost import Costs, cheapest
from cpsr.planner.inputs import PlannerInputs, whole_iterations
from cpsr.planner.policies import (
    LONGEST,
    LONGEST_TAKEN,
    POLICIES,
    SHORTEST,
    SHORTEST_TAKEN,
    Choice,
    PaperTerms,
    Rule,
    chosen_interval,
    linear_terms,
    paper_terms,
)

__all__ = [
    "CHECKFREQ_STEP_ITERATIONS",
    "PCCHECK_CONCURRENT",
    "RULES",
    "checkfreq",
    "exact_iterations",
    "gemini",
    "pccheck",
    "sinh",
    "untruncated",
]

# Overhead of the baselines in CPSR's evaluation, "2% of the job completion time" (section VI-C2): a fraction of the
# training time for CheckFreq (whose paper takes 0.035), and a factor of 1.02 on the time of an iteration for PCcheck.
TOLERANCE_FRACTION = 0.02
# CheckFreq lengthens its interval by so many iterations in each round in which its overhead exceeds the limit.
CHECKFREQ_STEP_ITERATIONS = 2
# Checkpoints that PCcheck writes at a time; its evaluation finds little beyond two to four.
PCCHECK_CONCURRENT = 2
# Doublings of the bracket of a root: beyond them the root is longer than any run.
DOUBLINGS_MAX = 200
ROOT_TOLERANCE_ITERATIONS = 1e-9


def checkfreq(inputs: PlannerInputs, overhead_fraction: float = TOLERANCE_FRACTION) -> Choice:
    """The shortest interval in which a checkpoint finishes, lengthened until the overhead is within a limit.

    `k = max(ceil((t_f - overhead) / t_i), 1)`, then `k += 2` while `overhead / (k t_i)` exceeds the limit. `t_f` is the
    time of a checkpoint from snapshot to disk, `overhead` its stall, `t_i` the time of an iteration.

    Source: Mohan, Phanishayee, Chidambaram, "CheckFreq", FAST 2021, and the profiling of its published code.
    """
    persist = inputs.persist_seconds / inputs.iteration_seconds
    stall = inputs.stall_seconds / inputs.iteration_seconds
    if max(persist, stall / overhead_fraction) >= LONGEST:
        return Choice(LONGEST, f"its overhead is above the limit at every interval; {LONGEST_TAKEN}")
    shortest = max(math.ceil(persist), 1)
    rounds = math.ceil(max(stall / overhead_fraction - shortest, 0.0) / CHECKFREQ_STEP_ITERATIONS)
    return Choice(shortest + CHECKFREQ_STEP_ITERATIONS * rounds)


def pccheck(inputs: PlannerInputs) -> Choice:
    """`k = ceil(T_w / (N q t))`: N checkpoints at a time, each of `T_w` seconds, between iterations of `q t` seconds.

    Source: Strati, Friedman, Klimovic, "PCcheck", ASPLOS 2025; its published code only sweeps intervals.
    """
    iterations = inputs.persist_seconds / inputs.iteration_seconds / (PCCHECK_CONCURRENT * (1 + TOLERANCE_FRACTION))
    return Choice(whole_iterations(math.ceil(iterations)) if iterations < LONGEST else LONGEST)


def gemini(inputs: PlannerInputs) -> Choice:
    """Copies in other machines' memory, at the interval of least cost of recomputing, known from an oracle.

    Source: Wang et al., "Gemini", SOSP 2023; the oracle as in the evaluation of MoEvement (section 5.2), which chooses
    its interval in hindsight.
    """
    costs = Costs(replace(inputs, memory=None))
    interval = cheapest(lambda grid: costs.per_second(grid, "recompute"), SHORTEST, LONGEST)
    return Choice(interval)


def untruncated(inputs: PlannerInputs) -> Choice:
    """`T_c = (tau1 - lambda sqrt(A T_s)) / (B + r)`: the theorem with the `T_s` that its last step drops.

    Source: the last equation of the proof in CPSR, section V-C, solved for T_c.
    """
    terms = linear_terms(inputs)
    if isinstance(terms, Choice):
        return terms
    stall_root = terms.rate_per_iteration * terms.stall_iterations
    return chosen_interval((terms.tau1 - stall_root) / (terms.decay_per_iteration + terms.rate_per_iteration))


def sinh(inputs: PlannerInputs) -> Choice:
    """The interval at which Eq. 17 is stationary.

    It is the root of `tau1 - B T_c = 2 sqrt(A / T_s) sinh(lambda (T_c + T_s) / 2)`.

    Source: stationarity of CPSR, Eq. 17, without approximation.
    """
    terms = paper_terms(inputs)
    if isinstance(terms, Choice):
        return terms
    interval = exact_iterations(terms)
    if interval is None:
        return Choice(SHORTEST, f"the cost only rises with the interval; {SHORTEST_TAKEN}")
    return chosen_interval(interval)


RULES: Mapping[str, Rule] = {
    **POLICIES,
    "untruncated": untruncated,
    "sinh": sinh,
    "checkfreq": checkfreq,
    "pccheck": pccheck,
    "gemini": gemini,
}


def exact_iterations(terms: PaperTerms) -> float | None:
    """The interval at which the cost of Eq. 17 is stationary, in iterations; None if it rises from the start."""
    scale = 2 * math.sqrt(terms.deviation_iterations / terms.stall_iterations)

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
