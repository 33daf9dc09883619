"""Baselines: how others choose an interval. After a failure they all recompute from the checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy

from cpsr.planner.choice import LONGEST, LONGEST_TAKEN, SHORTEST, SHORTEST_TAKEN, Choice
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.objective import Costs, cheapest, cost_per_second
from cpsr.planner.units import in_iterations, root, whole_iterations

__all__ = ["Baseline", "CheckFreq", "Daly", "Fixed", "Gemini", "PCcheck", "Young", "baselines"]

# Overhead of the baselines in CPSR's evaluation, "2% of the job completion time" (section VI-C2).
TOLERANCE_FRACTION = 0.02
# CheckFreq lengthens its interval by so many iterations in each round in which its overhead exceeds the limit.
CHECKFREQ_STEP_ITERATIONS = 2
# Checkpoints that PCcheck writes at a time; its evaluation finds little beyond two to four.
PCCHECK_CONCURRENT = 2


class Baseline(Protocol):
    """A rule, with its cost as its authors would compute it."""

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval by the rule, before any bound."""

    def cost(self, inputs: PlannerInputs, interval_iterations: int) -> float:
        """Expected seconds lost per second of wall time, by the rule's own recovery; without restarts."""


class _Recomputing:
    def cost(self, inputs: PlannerInputs, interval_iterations: int) -> float:
        """Stalls, and half an interval and the age of a durable checkpoint per failure."""
        inputs = replace(inputs, memory=None)  # the rules know one tier
        return float(cost_per_second(inputs, numpy.array([float(interval_iterations)]), "recompute")[0])


@dataclass(frozen=True)
class Fixed(_Recomputing):
    """The same interval always.

    Attributes:
        interval_iterations: at least 1.
    """

    interval_iterations: int

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval, for any inputs."""
        return Choice(self.interval_iterations)


class Young(_Recomputing):
    """`T_c = sqrt(2 T_s M)`, with T_s the stall of a checkpoint and M the mean time between failures.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """

    def choose(self, inputs: PlannerInputs) -> Choice:
        """Young's interval; a bound where an input is zero, infinite or unknown."""
        mtbf_seconds = _mtbf_seconds(inputs)
        # The product of the roots cannot overflow; the root of the product could.
        seconds = math.sqrt(2) * root(inputs.stall_seconds) * root(mtbf_seconds)
        note = _remark(inputs)
        return Choice(whole_iterations(in_iterations(seconds, inputs.iteration_seconds)), note)


class Daly(_Recomputing):
    """`T_c = sqrt(2 T_s M) (1 + sqrt(T_s / (2 M)) / 3 + T_s / (18 M)) - T_s` for `T_s < 2 M`, else M.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006: the expansion of the minimum of his exact wall time for exponential failures.
    """

    def choose(self, inputs: PlannerInputs) -> Choice:
        """Daly's interval; a bound where an input is zero, infinite or unknown."""
        stall, mtbf = inputs.stall_seconds, _mtbf_seconds(inputs)
        note = _remark(inputs)
        if not (stall >= 0 and mtbf >= 0):
            return Choice(SHORTEST, note)
        if math.isinf(mtbf):
            return Choice(SHORTEST if stall == 0 else LONGEST, note)
        if stall >= 2 * mtbf:
            seconds = mtbf
        else:
            ratio = math.sqrt(stall / (2 * mtbf))
            seconds = 2 * mtbf * ratio * (1 + ratio / 3 + ratio * ratio / 9) - stall
        return Choice(whole_iterations(in_iterations(seconds, inputs.iteration_seconds)), note)


@dataclass(frozen=True)
class CheckFreq(_Recomputing):
    """The shortest interval in which a checkpoint finishes, lengthened until the overhead is within a limit.

    `k = max(ceil((t_f - overhead) / t_i), 1)`, then `k += 2` while `overhead / (k t_i)` exceeds the limit. `t_f` is the
    time of a checkpoint from snapshot to disk, `overhead` its stall, `t_i` the time of an iteration.

    Source: Mohan, Phanishayee, Chidambaram, "CheckFreq", FAST 2021, and the profiling of its published code.

    Attributes:
        overhead_fraction: the limit, a FRACTION of the training time (0.02 is 2%; its paper takes 0.035).
    """

    overhead_fraction: float = TOLERANCE_FRACTION

    def choose(self, inputs: PlannerInputs) -> Choice:
        """Its interval; a bound where an input is unknown."""
        persist = in_iterations(inputs.persist_seconds, inputs.iteration_seconds)
        stall = in_iterations(inputs.stall_seconds, inputs.iteration_seconds)
        if math.isnan(persist) or math.isnan(stall):
            return Choice(SHORTEST, _remark(inputs) or f"the persist time is not known; {SHORTEST_TAKEN}")
        longest = max(persist, stall / self.overhead_fraction if self.overhead_fraction > 0 else math.inf)
        if longest >= LONGEST:
            return Choice(LONGEST, f"its overhead is above the limit at every interval; {LONGEST_TAKEN}")
        shortest = max(math.ceil(persist), 1)
        rounds = math.ceil(max(stall / self.overhead_fraction - shortest, 0.0) / CHECKFREQ_STEP_ITERATIONS)
        return Choice(shortest + CHECKFREQ_STEP_ITERATIONS * rounds)


@dataclass(frozen=True)
class PCcheck:
    """`k = ceil(T_w / (N q t))`: N checkpoints at a time, each of `T_w` seconds, between iterations of `q t` seconds.

    Per failure it expects the loading, which is the restart, and this lost work: `k t / 2 + t min(T_w / t, k N) / 2`.

    Source: Strati, Friedman, Klimovic, "PCcheck", ASPLOS 2025, for the interval; its published code only sweeps
    intervals, and gives the cost per failure.

    Attributes:
        slowdown_factor: q, a FACTOR on the time of an iteration (1.02 is 2% slower), not a fraction.
        concurrent: N.
    """

    slowdown_factor: float = 1 + TOLERANCE_FRACTION
    concurrent: int = PCCHECK_CONCURRENT

    def choose(self, inputs: PlannerInputs) -> Choice:
        """Its interval; a bound where the time of an iteration or of a checkpoint is unknown."""
        write = in_iterations(inputs.persist_seconds, inputs.iteration_seconds)
        if math.isnan(write):
            return Choice(SHORTEST, f"the persist time is not known; {SHORTEST_TAKEN}")
        iterations = write / (self.concurrent * self.slowdown_factor)
        return Choice(whole_iterations(math.ceil(iterations)) if iterations < LONGEST else LONGEST)

    def cost(self, inputs: PlannerInputs, interval_iterations: int) -> float:
        """Stalls, and the work that a failure loses while checkpoints are under way."""
        seconds = inputs.iteration_seconds
        training_seconds = interval_iterations * seconds
        under_way_seconds = min(inputs.persist_seconds, training_seconds * self.concurrent)
        period_seconds = training_seconds + inputs.stall_seconds
        stalls = inputs.stall_seconds / period_seconds if period_seconds > 0 else math.nan
        return stalls + inputs.failures_per_second * (training_seconds + under_way_seconds) / 2


@dataclass(frozen=True)
class Gemini(_Recomputing):
    """Copies in other machines' memory, at the interval of least cost, known from an oracle.

    Source: Wang et al., "Gemini", SOSP 2023; the oracle as in the evaluation of MoEvement (section 5.2), which chooses
    its interval in hindsight. A copy counts as safe after `replicate_seconds`.

    Attributes:
        replicate_seconds: from the snapshot to a copy in another machine; None is the persist time.
    """

    replicate_seconds: float | None = None

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The minimiser of the cost of recomputing."""
        own = self._own(inputs)
        costs = Costs([own])
        interval = cheapest(
            lambda grid: costs.per_second(grid, "recompute"), numpy.array([SHORTEST]), numpy.array([LONGEST])
        )
        return Choice(int(interval[0]), _remark(inputs))

    def cost(self, inputs: PlannerInputs, interval_iterations: int) -> float:
        """Stalls, and half an interval and the age of a copy per failure."""
        return super().cost(self._own(inputs), interval_iterations)

    def _own(self, inputs: PlannerInputs) -> PlannerInputs:
        persist = inputs.persist_seconds if self.replicate_seconds is None else self.replicate_seconds
        return replace(inputs, persist_seconds=persist, memory=None)


def baselines(
    fixed_interval_iterations: int | None = None, tolerance_fraction: float = TOLERANCE_FRACTION
) -> Mapping[str, Baseline]:
    """All baselines by name, with the same tolerated overhead.

    Args:
        fixed_interval_iterations: adds the fixed interval.
        tolerance_fraction: share of the training time that CheckFreq and PCcheck may take; for PCcheck its factor is
            one more.
    """
    known: dict[str, Baseline] = {
        "young": Young(),
        "daly": Daly(),
        "checkfreq": CheckFreq(tolerance_fraction),
        "pccheck": PCcheck(1 + tolerance_fraction),
        "gemini": Gemini(),
    }
    if fixed_interval_iterations is not None:
        known["fixed"] = Fixed(fixed_interval_iterations)
    return known


def _mtbf_seconds(inputs: PlannerInputs) -> float:
    rate = inputs.failures_per_second
    return math.inf if rate == 0 else 1 / rate if rate > 0 else math.nan


def _remark(inputs: PlannerInputs) -> str:
    """Unusual inputs of a rule; empty if there are none."""
    notes = []
    for name in ("stall_seconds", "iteration_seconds", "failures_per_second"):
        value = getattr(inputs, name)
        if math.isnan(value) or value < 0:
            notes.append(f"{name} is not known ({value}); {SHORTEST_TAKEN}")
        elif value == 0 or math.isinf(value):
            notes.append(f"{name} is {value}: one end of the allowed intervals costs least")
    return "; ".join(notes)
