import time
from dataclasses import replace
from typing import Any

import pytest

from cpsr.config import CPSRConfig
from cpsr.journal import PlanOverride
from cpsr.planner.inputs import Limits, PlannerInputs
from cpsr.planner.live.adoption import differs, planned
from cpsr.planner.plan import Plan
from cpsr.planner.planning import preview

LIMITS = Limits(10, 500, 300)
JOB = PlannerInputs(0.6, 0.2, 4.0, 1 / 7200)


@pytest.mark.parametrize(
    ("fixed", "asked", "taken"),
    [
        *[(fixed, *pair) for fixed in (None, 50) for pair in ((50, 50), (12, 12), (2, 10), (900, 500))],
        # What the user fixed is within the bounds, too.
        *[(5000, 2000, 2000), (5000, 9000, 5000), (5000, 2, 10), (8, 9, 9), (8, 2, 8), (8, 900, 500)],
    ],
)
def test_an_override_pins_the_interval_within_the_configured_bounds(fixed: int | None, asked: int, taken: int) -> None:
    settings: dict[str, Any] = {"run_dir": "run", "checkpoint": {"interval_iterations": fixed}}
    override = PlanOverride(interval_iterations=asked, reason="x", expires_unix_seconds=time.time() + 60, id=3)
    plan = planned(JOB, LIMITS, CPSRConfig.load(settings), override)
    assert (plan.interval_iterations, plan.origin) == (taken, "override")
    assert (plan.explanation["override"]["id"], plan.explanation["policy"]) == (3, "cpsr")
    without = planned(JOB, LIMITS, CPSRConfig.load(settings), None)
    assert without.origin == ("cpsr" if fixed is None else "fixed")
    assert "override" not in without.explanation


@pytest.mark.parametrize(
    ("asked", "taken", "bound"), [(50, 50, "none"), (2, 10, "minimum"), (900, 500, "maximum"), (20, 40, "persist")]
)
def test_a_pin_names_what_moved_it_and_a_preview_is_of_the_planner(asked: int, taken: int, bound: str) -> None:
    job = replace(JOB, persist_seconds=24.0) if bound == "persist" else JOB
    override = PlanOverride(interval_iterations=asked, reason="x", expires_unix_seconds=time.time() + 60)
    pinned, free = (planned(job, LIMITS, CPSRConfig.load({"run_dir": "run"}), one) for one in (override, None))
    assert (pinned.interval_iterations, pinned.explanation["bound"]) == (taken, bound)
    assert "override" in pinned.explanation["rule"]
    for hours in (0.01, 1.0, 1000.0):
        found, expected = (preview(plan.explanation, hours, "auto") for plan in (pinned, free))
        assert found == expected


@pytest.mark.parametrize(
    ("before", "after", "worth"),
    [
        ((100, 3), (100, 4), False),
        ((100, 1), (100, 2), True),
        ((100, 10), (109, 12), False),
        ((100, 10), (111, 10), True),
        ((100, None), (100, 10), True),
        ((100, None), (100, None), False),
    ],
)
def test_small_changes_are_not_worth_a_plan(
    before: tuple[int, int | None], after: tuple[int, int | None], worth: bool
) -> None:
    plans = [Plan(interval, "cpsr", {"expected": {}}, None, every) for interval, every in (after, before)]
    assert differs(*plans) == worth


def test_the_first_measured_plan_and_another_mode_are_adopted_at_the_same_interval() -> None:
    measured = planned(JOB, LIMITS, CPSRConfig.load({"run_dir": "run"}), None)
    assert not differs(measured, measured)
    assert differs(measured, replace(measured, explanation={"rule": "the shortest interval"}))
    assert differs(measured, replace(measured, mode="predict"))
