"""Overrides of the interval by people, as the planner of a running job applies them."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsr.errors import JournalError
from cpsr.journal import PlanOverride, latest_override
from cpsr.planner.bounds import Limits
from cpsr.planner.plan import Plan

__all__ = ["OverrideWatch", "bounded", "overridden", "override_message", "pinned_plan"]

logger = logging.getLogger(__name__)


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
