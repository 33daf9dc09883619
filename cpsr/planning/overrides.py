"""What people want the interval to be, as the planner of a running job hears it."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsr.errors import JournalError
from cpsr.journal import PlanOverride, latest_override
from cpsr.planner.bounds import Limits
from cpsr.planner.plan import Plan

__all__ = ["OverrideWatch", "bounded", "overridden", "pinned_plan", "said_of"]

logger = logging.getLogger(__name__)


class OverrideWatch:
    """Reads what people say about the plan of one run.

    Where that cannot be read now, what was read before holds until it expires.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: PlanOverride | None = None
        self._unreadable = False

    def now(self) -> PlanOverride | None:
        """The override that holds now; a file system access."""
        try:
            self._read = latest_override(self._run_dir)
            self._unreadable = False
        except JournalError as error:
            if not self._unreadable:
                logger.warning(
                    "overrides of the interval cannot be read; the last one that was read stays in force: %s", error
                )
            self._unreadable = True
        held = self._read
        return held if held is not None and held.holds(time.time()) else None


def bounded(limits: Limits, override: PlanOverride | None) -> Limits:
    """The limits, narrowed by an override; those of the configuration are not widened."""
    if override is None:
        return limits
    low, high = override.within(limits.interval_min_iterations, limits.interval_max_iterations)
    return replace(limits, interval_min_iterations=low, interval_max_iterations=high)


def overridden(plan: Plan, override: PlanOverride | None, limits: Limits) -> Plan:
    """A plan that was made inside an override's bounds, with what it needs to say of that.

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
    told = _told(override) | {"policy": plan.origin, "without": without}
    origin = "override" if override.pinned else plan.origin
    return replace(plan, origin=origin, explanation={**plan.explanation, "override": told})


def pinned_plan(fixed: Plan, override: PlanOverride, limits: Limits) -> Plan:
    """The plan of a run whose configuration fixes the interval, under an override: as near to it as that allows.

    Args:
        fixed: as configured.
        override: that holds.
        limits: of the configuration; they are kept, as far as the fixed interval itself does.
    """
    usual = fixed.interval_iterations
    low, high = override.within(min(limits.interval_min_iterations, usual), max(limits.interval_max_iterations, usual))
    interval = min(max(usual, low), high)
    rule = f"fixed by the configuration to {fixed.interval_iterations} iterations, and overridden for a while"
    explanation = {**fixed.explanation, "rule": rule, "override": _told(override)}
    return replace(fixed, interval_iterations=interval, origin="override", explanation=explanation)


def said_of(override: PlanOverride | None) -> str:
    """One sentence for the journal's events."""
    if override is None:
        return "the override of the interval has ended; it is planned again as if there had been none"
    low, high = override.interval_min_iterations, override.interval_max_iterations
    what = f"of {low}" if override.pinned else f"from {low or 1} to {'any' if high is None else high}"
    left = override.expires_unix_seconds - time.time()
    return f"override {override.id}: an interval {what} iterations is to hold for {left:.0f} s ({override.reason})"


def _told(override: PlanOverride) -> dict[str, Any]:
    return {
        "id": override.id,
        "interval_min_iterations": override.interval_min_iterations,
        "interval_max_iterations": override.interval_max_iterations,
        "reason": override.reason,
        "expires_unix_seconds": override.expires_unix_seconds,
    }
