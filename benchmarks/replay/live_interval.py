"""Rivals' own policies for the interval in a running job: they profile it, set its interval, and adapt that."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from cpsr.benchmarks.simulate.rivals import CHECKFREQ_STEP_ITERATIONS, checkfreq, pccheck
from cpsr.errors import CPSRError
from cpsr.life.life import Life
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.plan import Plan
from cpsr.planner.policies import Choice

__all__ = ["CHECKFREQ", "OVERHEAD_FRACTION", "PCCHECK", "PROFILED_INTERVAL", "PROFILED_ITERATIONS", "LiveInterval"]

CHECKFREQ, PCCHECK = "checkfreq", "pccheck"
OVERHEAD_FRACTION = 0.035  # CheckFreq's own limit
PROFILED_ITERATIONS, PROFILED_INTERVAL, SETTLING = 30, 10, 3
RULES: Mapping[str, Callable[[PlannerInputs], Choice]] = {
    CHECKFREQ: partial(checkfreq, overhead_fraction=OVERHEAD_FRACTION),
    PCCHECK: pccheck,
}


@dataclass(frozen=True)
class Profile:
    """What a rival knows of the job; the largest of the ranks.

    Attributes:
        iteration_seconds: without a checkpoint.
        stall_seconds: extra time of the training for one.
        persist_seconds: until it is durable.
        interval_iterations: that it has chosen.
    """

    iteration_seconds: float
    stall_seconds: float
    persist_seconds: float
    interval_iterations: int


class LiveInterval:
    """One rival's policy; called on all ranks after each step.

    CheckFreq profiles the first iterations and sets the shortest interval within its limit. If an interval then takes
    longer than the limit allows, it lengthens the next by two iterations. PCcheck's rule is fixed once it is profiled.

    Args:
        life: whose interval it sets.
        policy: `CHECKFREQ` or `PCCHECK`.
        known: the profile that an earlier life of the job left; both rivals keep theirs.
    """

    def __init__(self, life: Life, policy: str, known: Mapping[str, Any] | None) -> None:
        self._life, self._policy = life, policy
        self._profile: Profile | None = None
        self._seconds: list[float] = []  # of the steps since the last decision
        self._begun = time.perf_counter()
        if known is not None:
            self._adopt(Profile(**known))

    def after_step(self) -> dict[str, Any] | None:
        """Decide where it is time; a collective then.

        Returns:
            The profile, if it is new.
        """
        now = time.perf_counter()
        self._seconds.append(now - self._begun)
        self._begun = now
        known = self._profile
        if len(self._seconds) < (PROFILED_ITERATIONS if known is None else known.interval_iterations):
            return None
        found = self._profiled() if known is None else self._adapted(known)
        self._seconds.clear()
        if found == known:
            return None
        self._adopt(found)
        return asdict(found)

    def rest(self) -> None:
        """The next step begins now: what the loop did since the last one is none of the job's."""
        self._begun = time.perf_counter()

    @property
    def interval_iterations(self) -> int:
        """That it has chosen; 0: none so far."""
        return 0 if self._profile is None else self._profile.interval_iterations

    def _profiled(self) -> Profile:
        costs = self._life.planner.times.costs()
        if costs is None:
            raise CPSRError(f"no checkpoint of {PROFILED_ITERATIONS} iterations has measured what one costs")
        own = median(self._seconds[SETTLING:PROFILED_INTERVAL]), costs.stall_seconds, costs.persist_seconds
        seconds, stall, persist = self._largest(*own)
        choice = RULES[self._policy](PlannerInputs(seconds, stall, persist, 0.0))
        return Profile(seconds, stall, persist, choice.interval_iterations)

    def _adapted(self, known: Profile) -> Profile:
        (seconds,) = self._largest(fmean(self._seconds))
        if self._policy != CHECKFREQ or seconds <= (1 + OVERHEAD_FRACTION) * known.iteration_seconds:
            return known
        longer = known.interval_iterations + CHECKFREQ_STEP_ITERATIONS
        return Profile(known.iteration_seconds, known.stall_seconds, known.persist_seconds, longer)

    def _largest(self, *own: float) -> list[float]:
        values = torch.tensor(own, dtype=torch.float64)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return values.tolist()

    def _adopt(self, found: Profile) -> None:
        plan = Plan(found.interval_iterations, self._policy, asdict(found))
        self._profile = found
        self._life.saver.adopt(plan, self._life.job.adapter.iteration)
