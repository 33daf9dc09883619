"""Which plan a job follows: the first one of a life, the planned one, and when another is worth adopting."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.journal import PlanOverride
from cpsr.planner.inputs import Limits, MemoryTier, PlannerInputs
from cpsr.planner.live.measurements import RankCosts
from cpsr.planner.plan import Plan, fixed_plan
from cpsr.planner.planning import make_plan, with_memory

__all__ = ["differs", "first_plan", "memory_tier", "override_message", "planned"]

REPLAN_FRACTION = 0.1  # smaller changes are noise of the measurement; the cost is flat around its optimum
MEMORY_REPLAN_FRACTION = 0.34  # a third, as from 3 to 4 iterations, changes the cost of snapshots by 4%


def first_plan(config: CPSRConfig, saved: Mapping[str, Any]) -> Plan:
    """The first plan of a life, the same on every rank.

    Args:
        config: of the run.
        saved: the planner's state in the checkpoint that this life begins with; empty in the first life.
    """
    fixed, planner, interval = config.checkpoint.interval_iterations, config.planner, saved.get("interval_iterations")
    low, high = planner.interval_min_iterations, planner.interval_max_iterations
    if fixed is not None:
        plan = fixed_plan(fixed)
    elif interval is None:
        # Lost work is the larger risk until a checkpoint was measured.
        explanation = {"rule": "the shortest interval, until checkpoints are measured", "bound": "minimum"}
        plan = Plan(low, planner.policy, explanation, "recompute")
    else:
        explanation = {"rule": "as planned before the restart, until the next plan"}
        plan = Plan(min(max(interval, low), high), planner.policy, explanation, saved.get("mode"))
    every = _first_memory_interval(config, saved.get("memory_interval_iterations"), plan.interval_iterations)
    return replace(plan, memory_interval_iterations=every)


def _first_memory_interval(config: CPSRConfig, planned: int | None, interval_iterations: int) -> int | None:
    """Between snapshots in memory until they are planned anew, or the length of windows; None if there are none.

    Not planned before, it is the shortest interval between checkpoints.
    """
    if not config.checkpoint.shared_memory:
        return None
    if config.replay.enabled:
        return config.replay.window_iterations or planned or 1
    every = config.memory.interval_iterations or planned or config.planner.interval_min_iterations
    return min(every, interval_iterations)


def memory_tier(
    config: CPSRConfig, costs: RankCosts, iteration_seconds: float, window_iterations: int | None
) -> MemoryTier | None:
    """The job's snapshots in host memory: their measured costs, and the limits of their interval; None without any.

    Args:
        config: of the run.
        costs: of the job.
        iteration_seconds: of the job.
        window_iterations: length of windows, which take the place of snapshots and go on all the time, so that each
            stalls nothing more; None where none are taken.
    """
    replica = costs.memory.get("replica_seconds")
    if config.replay.enabled:
        return None if window_iterations is None else MemoryTier(0.0, window_iterations, replica, window=True)
    if not config.checkpoint.shared_memory:
        return None
    stall_seconds = costs.memory.get("stall_seconds", costs.stall_seconds)
    budget_seconds = config.memory.budget_fraction * iteration_seconds  # per iteration
    longest = None
    if budget_seconds > 0:
        longest = max(config.planner.interval_min_iterations, math.ceil(stall_seconds / budget_seconds))
    return MemoryTier(stall_seconds, config.memory.interval_iterations, replica, longest_iterations=longest)


def planned(job: PlannerInputs, limits: Limits, config: CPSRConfig, override: PlanOverride | None) -> Plan:
    """The plan of a running job: at the interval of an override in force, else at the user's, else at the best one.

    Args:
        job: its inputs.
        limits: of the configuration and the predictor; an override keeps to the configured ones, and an interval that
            the user has fixed is within them.
        config: of the run.
        override: in force.
    """
    fixed = config.checkpoint.interval_iterations
    if override is not None:
        low, high = limits.interval_min_iterations, limits.interval_max_iterations
        if fixed is not None:
            low, high = min(low, fixed), max(high, fixed)
        pin = min(max(override.interval_iterations, low), high)
        pinned = replace(limits, interval_min_iterations=pin, interval_max_iterations=pin)
        plan = make_plan(job, pinned, config.planner.policy, config.mode)
        asked, moved = override.interval_iterations, plan.interval_iterations != pin
        found = {
            "rule": "pinned by an override",
            "bound": "persist" if moved else "minimum" if pin > asked else "maximum" if pin < asked else "none",
            "bounds": {**plan.explanation["bounds"], **vars(limits)},  # previews are without the override
            "override": asdict(override),
        }
        return replace(plan, origin="override", explanation={**plan.explanation, **found})
    if fixed is not None:
        return with_memory(fixed_plan(fixed), job, limits, config.mode)
    return make_plan(job, limits, config.planner.policy, config.mode)


def differs(plan: Plan, current: Plan) -> bool:
    """Whether to adopt a plan instead of the current one; the first that rests on measurements always is."""
    if plan.mode != current.mode or "expected" not in current.explanation:
        return True
    interval, before = plan.interval_iterations, current.interval_iterations
    if abs(interval - before) > REPLAN_FRACTION * before:
        return True
    every, earlier = plan.memory_interval_iterations, current.memory_interval_iterations
    if every is None or earlier is None:
        return every is not earlier
    return abs(every - earlier) > MEMORY_REPLAN_FRACTION * min(every, earlier)


def override_message(override: PlanOverride | None) -> str:
    """The event's message for the journal, one sentence."""
    if override is None:
        return "the override of the interval has ended; the planner chooses the interval again"
    left = override.expires_unix_seconds - time.time()
    every = override.interval_iterations
    return f"override {override.id}: an interval of {every} iterations applies for {left:.0f} s ({override.reason})"
