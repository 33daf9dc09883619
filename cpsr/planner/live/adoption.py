"""Which plan a job follows: the first one of a life, one under an override, and when another is worth adopting."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.errors import JournalError
from cpsr.journal import PlanOverride, latest_override
from cpsr.planner.inputs import Limits, MemoryTier, Origin, PlannerInputs
from cpsr.planner.live.expectations import prior_curves
from cpsr.planner.plan import Plan, fixed_plan
from cpsr.planner.planning import make_plan

__all__ = [
    "OverrideWatch",
    "bounded",
    "differs",
    "first_memory_interval",
    "first_plan",
    "memory_tier",
    "overridden",
    "override_message",
    "pinned_plan",
]

logger = logging.getLogger(__name__)

REPLAN_FRACTION = 0.1  # smaller changes are noise of the measurement; the cost is flat around its optimum
MEMORY_REPLAN_FRACTION = 0.34  # a third, as from 3 to 4 iterations, changes the cost of snapshots by 4%


def first_plan(config: CPSRConfig, saved: Mapping[str, Any]) -> Plan:
    """The first plan of a life, the same on every rank.

    Args:
        config: of the run.
        saved: the planner's state in the checkpoint that this life begins with; empty in the first life.
    """
    fixed, planner, interval = config.checkpoint.interval_iterations, config.planner, saved.get("interval_iterations")
    # The prices stay with the checkpoints: the next failure may come before the next plan.
    prices = saved.get("prices")
    low, high = planner.interval_min_iterations, planner.interval_max_iterations
    if fixed is not None:
        plan = fixed_plan(fixed)
        if prices is not None and config.checkpoint.shared_memory:
            plan = replace(plan, explanation={**plan.explanation, "prices": prices})
    elif interval is None:
        # Costs of zero before any measurement: the minimum decides. Lost work is then the larger risk.
        rate = prior_curves(0, config).failures.total.mean_per_second
        unmeasured = PlannerInputs(0.0, 0.0, 0.0, rate, origins={"failures_per_second": Origin("configured")})
        plan = make_plan(unmeasured, Limits(low, high), "young", "exact")
    else:
        explanation = {"rule": "as planned before the restart, until the next plan", "prices": prices}
        plan = Plan(min(max(interval, low), high), planner.policy, explanation, saved.get("mode"))
    every = first_memory_interval(config, saved.get("memory_interval_iterations"), plan.interval_iterations)
    return replace(plan, memory_interval_iterations=every)


def first_memory_interval(config: CPSRConfig, planned: int | None, interval_iterations: int) -> int | None:
    """Between snapshots in memory until they are planned anew, or the length of windows; None if there are none.

    Args:
        config: of the run.
        planned: before; None if they were not: the shortest interval between checkpoints then.
        interval_iterations: between checkpoints.
    """
    if not config.checkpoint.shared_memory:
        return None
    if config.replay.enabled:
        return config.replay.window_iterations or planned or 1
    every = config.memory.interval_iterations or planned or config.planner.interval_min_iterations
    return min(every, interval_iterations)


def memory_tier(
    config: CPSRConfig,
    known: Mapping[str, float],
    iteration_seconds: float,
    checkpoint_stall_seconds: float,
    window_iterations: int | None,
) -> MemoryTier | None:
    """The job's snapshots in host memory: their measured costs, and the limits of their interval; None without any.

    Args:
        config: of the run.
        known: medians of the slowest rank, by name (`RankReport`).
        iteration_seconds: of the job.
        checkpoint_stall_seconds: of a checkpoint, where nothing else is known.
        window_iterations: length of windows, which take the place of snapshots and go on all the time, so that each
            stalls nothing more; None where none are taken.
    """
    replica = known.get("replica_seconds")
    if config.replay.enabled:
        return None if window_iterations is None else MemoryTier(0.0, window_iterations, replica, window=True)
    if not config.checkpoint.shared_memory:
        return None
    stall_seconds = known.get("stall_seconds", checkpoint_stall_seconds)
    budget_seconds = config.memory.budget_fraction * iteration_seconds  # per iteration
    longest = None
    if budget_seconds > 0 and math.isfinite(stall_seconds):
        longest = max(config.planner.interval_min_iterations, math.ceil(stall_seconds / budget_seconds))
    return MemoryTier(stall_seconds, config.memory.interval_iterations, replica, longest_iterations=longest)


def differs(plan: Plan, current: Plan) -> bool:
    """Whether a plan is worth adopting in place of the current one; so is the first by which a restart has prices."""
    if plan.explanation.get("prices") and not current.explanation.get("prices"):
        return True
    interval, before = plan.interval_iterations, current.interval_iterations
    if abs(interval - before) > REPLAN_FRACTION * before:
        return True
    every, earlier = plan.memory_interval_iterations, current.memory_interval_iterations
    if every is None or earlier is None:
        return every is not earlier
    return abs(every - earlier) > MEMORY_REPLAN_FRACTION * min(every, earlier)


class OverrideWatch:
    """Reads the overrides of one run's plan.

    If they cannot be read now, the last one that was read stays in force until it expires.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: PlanOverride | None = None
        self._unreadable = False

    def now(self) -> PlanOverride | None:
        """The override in force; a file system access."""
        try:
            self._read = latest_override(self._run_dir)
            self._unreadable = False
        except JournalError as error:
            if not self._unreadable:
                logger.warning(
                    "overrides of the interval cannot be read; the last one that was read stays in force: %s", error
                )
            self._unreadable = True
        newest = self._read
        return newest if newest is not None and newest.holds(time.time()) else None


def bounded(limits: Limits, override: PlanOverride | None) -> Limits:
    """The limits, narrowed by an override; those of the configuration are not widened."""
    if override is None:
        return limits
    low, high = override.within(limits.interval_min_iterations, limits.interval_max_iterations)
    return replace(limits, interval_min_iterations=low, interval_max_iterations=high)


def overridden(plan: Plan, override: PlanOverride | None, limits: Limits) -> Plan:
    """A plan that was made inside an override's bounds, with the override in its origin and explanation.

    Args:
        plan: made within `bounded(limits, override)`.
        override: None leaves the plan as it is.
        limits: without the override.
    """
    if override is None:
        return plan
    without = {
        "interval_min_iterations": limits.interval_min_iterations,
        "interval_max_iterations": limits.interval_max_iterations,
    }
    recorded = _explanation(override) | {"policy": plan.origin, "without": without}
    origin = "override" if override.pinned else plan.origin
    return replace(plan, origin=origin, explanation={**plan.explanation, "override": recorded})


def pinned_plan(fixed: Plan, override: PlanOverride, limits: Limits) -> Plan:
    """The plan of a run with a fixed interval under an override: the nearest interval that it allows.

    Args:
        fixed: as configured.
        override: in force.
        limits: of the configuration; widened only to include the fixed interval.
    """
    usual = fixed.interval_iterations
    low, high = override.within(min(limits.interval_min_iterations, usual), max(limits.interval_max_iterations, usual))
    interval = min(max(usual, low), high)
    rule = f"fixed by the configuration to {fixed.interval_iterations} iterations, temporarily overridden"
    explanation = {**fixed.explanation, "rule": rule, "override": _explanation(override)}
    return replace(fixed, interval_iterations=interval, origin="override", explanation=explanation)


def override_message(override: PlanOverride | None) -> str:
    """The event's message for the journal, one sentence."""
    if override is None:
        return "the override of the interval has ended; the planner chooses the interval again"
    low, high = override.interval_min_iterations, override.interval_max_iterations
    what = f"of {low}" if override.pinned else f"from {low or 1} to {'any' if high is None else high}"
    left = override.expires_unix_seconds - time.time()
    return f"override {override.id}: an interval {what} iterations applies for {left:.0f} s ({override.reason})"


def _explanation(override: PlanOverride) -> dict[str, Any]:
    return {
        "id": override.id,
        "interval_min_iterations": override.interval_min_iterations,
        "interval_max_iterations": override.interval_max_iterations,
        "reason": override.reason,
        "expires_unix_seconds": override.expires_unix_seconds,
    }
