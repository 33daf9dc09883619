"""What-if plans at another failure rate, from the explanation of a plan."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, PhaseInputs, PlannerInputs
from cpsr.planner.plan import fixed_plan
from cpsr.planner.planning import make_plan, preview
from cpsr.planner.recovery_curve import EndCostCurve

LINE = EndCostCurve(-20.0, 0.5, 0.1, 10.0, "the offline prior")
PHASE = PhaseInputs(100, 200, 1e-3, 1.0, 0.05, -3.0, 1e-9, 1000)
LIMITS = Limits(5, 800, 400)
TIERS: list[dict[str, Any]] = [
    {},
    {"memory": MemoryTier(0.01, 7)},
    {"memory": MemoryTier(0.01, None, 2.0)},
    {"memory": MemoryTier(0.0, 6, 2.0, window=True), "lost_share": 0.5},
]


def inputs(**changes: Any) -> PlannerInputs:
    figures: dict[str, Any] = {
        "iteration_seconds": 0.6,
        "stall_seconds": 0.2,
        "persist_seconds": 4.0,
        "failures_per_second": 1 / 7200,
        "recovery": LINE,
        "restart_seconds": 20.0,
        "predict_seconds": 1.5,
        "phase": PHASE,
        "watch_iterations": 60,
        "classes": {"process": FailureClass(0.7, 0.5, 3), "machine": FailureClass(0.3, 0.5)},
    }
    return PlannerInputs(**(figures | changes))


def stored(explanation: Any) -> dict[str, Any]:
    """As the journal gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(explanation))
    return found


@pytest.mark.parametrize("policy", ["cpsr", "young", "theorem1"])
@pytest.mark.parametrize("mode", ["auto", "predict", "exact"])
@pytest.mark.parametrize("tiers", TIERS)
def test_at_the_same_rate_the_plan_is_the_same(policy: str, mode: Any, tiers: dict[str, Any]) -> None:
    job = inputs(recovery=None, **tiers) if mode == "exact" else inputs(**tiers)
    plan = make_plan(job, LIMITS, policy, mode)
    again = preview(stored(plan.explanation), 2.0, mode)
    assert again is not None
    assert (again.interval_iterations, again.mode, again.origin) == (plan.interval_iterations, plan.mode, plan.origin)
    assert stored(again.explanation) == stored(plan.explanation)
    assert again.memory_interval_iterations == plan.memory_interval_iterations


@given(st.floats(1e-3, 1e4))
def test_another_rate_is_planned_as_if_it_were_measured(mtbf_hours: float) -> None:
    changed = preview(stored(make_plan(inputs(), LIMITS).explanation), mtbf_hours, "auto")
    expected = make_plan(inputs(failures_per_second=1 / (mtbf_hours * 3600)), LIMITS)
    assert changed is not None
    assert changed.interval_iterations == expected.interval_iterations


def test_a_plan_of_another_version_has_no_preview() -> None:
    explanation = stored(make_plan(inputs(), LIMITS).explanation)
    explanation["inputs"]["recovery"] = {"mean": [1.0, 0.5, 0.1], "covariance": [], "source": "the prior"}
    assert preview(explanation, 2.0, "auto") is None


@pytest.mark.parametrize(
    "explanation",
    [
        {},
        fixed_plan(50).explanation,
        {"rule": "as planned before the restart"},
    ],
    ids=["empty", "fixed", "restarted"],
)
def test_a_plan_that_was_not_made_from_measurements_has_no_preview(explanation: Any) -> None:
    assert preview(explanation, 2.0, "auto") is None
