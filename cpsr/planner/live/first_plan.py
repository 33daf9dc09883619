"""The plan with which a life begins, and when another one is worth adopting."""

from dataclasses import replace
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.planner.bounds import Limits
from cpsr.planner.live.inputs import unmeasured_inputs
from cpsr.planner.plan import Plan, fixed_plan, make_plan

__all__ = ["differs", "first_memory_interval", "first_plan"]

REPLAN_FRACTION = 0.1  # smaller changes are noise of the measurement; the cost is flat around its optimum
MEMORY_REPLAN_FRACTION = 0.34  # a third, as from 3 to 4 iterations, changes the cost of snapshots by 4%


def first_plan(config: CPSRConfig, saved: dict[str, Any]) -> Plan:
    """The first plan of a life, the same on every rank.

    Args:
        config: of the run.
        saved: the planner's state in the checkpoint that this life begins with; empty in the first life.
    """
    plan = _first_plan(config, saved)
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


def _fixed(interval: int, config: CPSRConfig, saved: dict[str, Any]) -> Plan:
    """The user's interval, with the prices of the plan before the restart, if there will be others."""
    plan, prices = fixed_plan(interval), saved.get("prices")
    if prices is None or not config.checkpoint.shared_memory:
        return plan
    return replace(plan, explanation={**plan.explanation, "prices": prices})


def _first_plan(config: CPSRConfig, saved: dict[str, Any]) -> Plan:
    fixed, planner = config.checkpoint.interval_iterations, config.planner
    if fixed is not None:
        return _fixed(fixed, config, saved)
    low, high = planner.interval_min_iterations, planner.interval_max_iterations
    interval = saved.get("interval_iterations")
    if interval is None:
        # Without measurements the minimum applies: lost work is then the larger risk.
        return make_plan([unmeasured_inputs(config)], Limits(low, high), "young", "exact")
    # The prices stay with the checkpoints: the next failure may come before the next plan.
    explanation = {"rule": "as planned before the restart, until the next plan", "prices": saved.get("prices")}
    return Plan(min(max(interval, low), high), planner.policy, explanation, saved.get("mode"))
