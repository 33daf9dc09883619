import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, Origin, PhaseInputs, PlannerInputs
from cpsr.planner.plan import fixed_plan
from cpsr.planner.planning import make_plan
from cpsr.planner.preview import Change, basis_of, preview
from cpsr.planner.recovery_curve import EndCostCurve

LINE = EndCostCurve.with_independent_prior((-20.0, 0.5, 0.1), (1.0, 0.1, 0.1), 10.0, "the offline prior")
PHASE = PhaseInputs(100, 200, 1e-3, 1.0, 0.05, -3.0, 1e-9, 1000)
LIMITS = Limits(5, 800, 400, "what was measured")


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
        "lead_after_iterations": 100,
        "origins": {"stall_seconds": Origin("measured", 8, 3), "phase": Origin("prior")},
    }
    return PlannerInputs(**(figures | changes))


def stored(explanation: Any) -> dict[str, Any]:
    """As the journal gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(explanation))
    return found


@pytest.mark.parametrize("policy", ["cpsr", "young", "theorem1"])
@pytest.mark.parametrize("mode", ["auto", "predict", "exact"])
@pytest.mark.parametrize(
    "tiers",
    [
        {},
        {"memory": MemoryTier(0.01, 7)},
        {"memory": MemoryTier(0.01, None, 2.0)},
        {
            "memory": MemoryTier(0.0, 6, 2.0, window=True),
            "load_seconds": {"disk": 1.0, "memory": 2.0},
            "lost_share": 0.5,
        },
    ],
)
def test_with_nothing_changed_the_plan_is_the_same(policy: str, mode: Any, tiers: dict[str, Any]) -> None:
    if tiers:
        tiers = {**tiers, "classes": {"process": FailureClass(0.7, 0.5, 3), "machine": FailureClass(0.3, 0.5)}}
    job = inputs(recovery=None, **tiers) if mode == "exact" else inputs(**tiers)
    plan = make_plan(job, LIMITS, policy, mode)
    basis = basis_of(stored(plan.explanation), plan.origin)
    assert basis is not None
    again = preview(basis, Change(), recovery_mode=mode)
    assert (again.interval_iterations, again.mode, again.origin) == (plan.interval_iterations, plan.mode, plan.origin)
    assert stored(again.explanation) == stored(plan.explanation)
    assert again.memory_interval_iterations == plan.memory_interval_iterations


@given(st.floats(1e-3, 1e4), st.floats(0.01, 100), st.floats(1e3, 1e9), st.floats(1e3, 1e9))
def test_the_change_is_planned_as_if_it_were_measured(
    mtbf_hours: float, growth: float, snapshot: float, persist: float
) -> None:
    size = 1e6
    basis = basis_of(stored(make_plan(inputs(), LIMITS).explanation), "cpsr")
    assert basis is not None
    changed = preview(basis, Change(mtbf_hours, growth * size, None, persist), size)
    expected = inputs(
        failures_per_second=1 / (mtbf_hours * 3600),
        stall_seconds=0.2 * growth * size / size,
        persist_seconds=growth * size / persist,
    )
    assert changed.interval_iterations == make_plan(expected, LIMITS).interval_iterations
    faster = preview(basis, Change(snapshot_bytes_per_second=snapshot), size).explanation
    assert faster["inputs"]["stall_seconds"] == size / snapshot
    assert faster["origins"]["stall_seconds"]["kind"] == "configured"


def test_an_overridden_plan_is_previewed_as_the_planner_would_make_it() -> None:
    free = make_plan(inputs(), LIMITS, "daly")
    pinned = make_plan(inputs(), Limits(7, 7, 400, "what was measured"), "daly")
    without = {"interval_min_iterations": 5, "interval_max_iterations": 800}
    explanation = {**pinned.explanation, "override": {"id": 1, "policy": "daly", "without": without}}
    basis = basis_of(stored(explanation), "override")
    assert basis is not None
    assert preview(basis, Change()).interval_iterations == free.interval_iterations


@pytest.mark.parametrize("change", [Change(state_bytes=5.0), Change(persist_bytes_per_second=5.0)])
def test_bytes_need_the_size_of_what_is_scaled(change: Change) -> None:
    basis = basis_of(stored(make_plan(inputs(), LIMITS).explanation), "cpsr")
    assert basis is not None
    with pytest.raises(ValueError, match="not known yet"):
        preview(basis, change)
    assert preview(basis, Change(None, 100.0, 10.0, 5.0)).explanation["inputs"]["persist_seconds"] == 20.0


def without(explanation: Any, *path: str) -> Any:
    found = stored(explanation)
    holder = found
    for name in path[:-1]:
        holder = holder[name]
    del holder[path[-1]]
    return found


PLAN = make_plan(inputs(), LIMITS)


@pytest.mark.parametrize(
    "explanation",
    [
        {},
        fixed_plan(50).explanation,
        {"rule": "as planned before the restart"},
        make_plan(PlannerInputs(0.0, 0.0, 0.0, 1 / 7200), LIMITS, "young", "exact").explanation,
        without(PLAN.explanation, "inputs", "recovery_line"),
        without(PLAN.explanation, "inputs", "stall_seconds"),
        without(PLAN.explanation, "bounds"),
        {**stored(PLAN.explanation), "inputs": 3},
        {**stored(PLAN.explanation), "override": 3},
        make_plan(inputs(iteration_seconds=math.nan), LIMITS).explanation,
    ],
    ids=["empty", "fixed", "restarted", "unmeasured", "line", "figure", "bounds", "torn", "override", "nan"],
)
def test_a_plan_that_does_not_say_what_it_was_made_from_has_no_basis(explanation: Any) -> None:
    assert basis_of(explanation, "cpsr") is None
