import itertools
import json
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.planner.inputs import Bounds, Limits, PlannerInputs, RecoveryCost, bounds_of
from cpsr.planner.plan import Plan
from cpsr.planner.planning import make_plan, policy_names
from cpsr.planner.policies import POLICIES
from cpsr.planner.recovery_curve import PaperCurve
from tests.planner.jobs import (
    JOB,
    PHASE,
    USUAL,
    Scaled,
    any_job,
    brute_force,
    cost_per_second,
    end_cost,
    job,
    limits,
)

WIDE = Limits(1, 3000)
MTBF_HOURS = (1 / 6, 0.5, 2.0, 6.0, 12.0)
# Seconds of stall and of persisting: 4 GB, 40 GB and 400 GB of state at 5 GB/s and 1 GB/s.
STATES = ((0.8, 4.0), (8.0, 40.0), (80.0, 400.0))
# What a predicted recovery costs, from the first phase to the last: by the paper's curve, or as a share of the horizon.
PHASES: dict[str, RecoveryCost] = {
    "paper, early": PaperCurve(replace(PHASE, first_iteration=200, last_iteration=800)),
    "paper, middle": PaperCurve(PHASE),
    "paper, late": PaperCurve(replace(PHASE, first_iteration=8000, last_iteration=12000)),
    "end cost, early": end_cost(10.0, 0.9, 0.1),
    "end cost, middle": end_cost(4.0, 0.5, 0.05),
    "end cost, late": end_cost(0.0, 0.2, 0.02),
}
GRID = [
    pytest.param(hours, state, curve, id=f"{hours:.2g} h, stall {state[0]} s, {name}")
    for hours, state, (name, curve) in itertools.product(MTBF_HOURS, STATES, PHASES.items())
]


def described(hours: float, state: tuple[float, float], curve: RecoveryCost) -> PlannerInputs:
    return job(hours, stall_seconds=state[0], persist_seconds=state[1], recovery=curve, predict_seconds=2.0)


def true_cost(inputs: PlannerInputs, plan: Plan) -> float:
    assert plan.mode is not None
    return float(cost_per_second(inputs, numpy.array([float(plan.interval_iterations)]), plan.mode)[0])


def least(inputs: PlannerInputs, allowed: Limits) -> float:
    """Of all integers in both modes."""
    found = []
    for mode in ("predict", "recompute"):
        bounds = bounds_of(inputs, allowed, mode)
        if bounds is not None:
            found.append(brute_force(inputs, bounds, mode)[1])
    return min(found)


@pytest.mark.parametrize(("hours", "state", "curve"), GRID)
def test_nothing_is_cheaper_by_more_than_two_per_cent(
    hours: float, state: tuple[float, float], curve: RecoveryCost
) -> None:
    inputs = described(hours, state, curve)
    cost = true_cost(inputs, make_plan(inputs, WIDE))
    assert cost <= 1.02 * least(inputs, WIDE)
    bounds = bounds_of(inputs, WIDE, "recompute")
    assert bounds is not None
    for rule in POLICIES.values():
        interval = bounds.clamp(rule(inputs).interval_iterations)[0]
        assert cost <= 1.02 * cost_per_second(inputs, numpy.array([float(interval)]), "recompute")[0]


@pytest.mark.parametrize("factor", [0.7, 1.3])
@pytest.mark.parametrize("mode", ["predict", "exact"])
@pytest.mark.parametrize(("hours", "state", "curve"), GRID)
def test_a_curve_that_is_wrong_by_a_third_moves_the_interval_little(
    hours: float, state: tuple[float, float], curve: RecoveryCost, mode: str, factor: float
) -> None:
    """Within a mode: near the break-even of the two no rule can know which is the cheaper one."""
    believed = described(hours, state, curve)
    true = replace(believed, recovery=Scaled(curve, factor))
    plan = make_plan(believed, WIDE, recovery_mode=mode)  # type: ignore[arg-type]
    assert plan.mode is not None
    bounds = bounds_of(true, WIDE, plan.mode)
    assert bounds is not None
    assert true_cost(true, plan) <= 1.05 * brute_force(true, bounds, plan.mode)[1]


def test_it_takes_the_mode_that_costs_less() -> None:
    good = make_plan(job(recovery=end_cost(0.0, 0.3)), WIDE)
    bad = make_plan(job(recovery=end_cost(0.0, 1.3)), WIDE)
    assert (good.mode, bad.mode) == ("predict", "recompute")
    assert good.interval_iterations > bad.interval_iterations
    assert bad.explanation["modes"]["predict"]["cost_per_second"] > bad.explanation["expected"]["cost_per_second"]


def test_the_mode_that_is_demanded_holds_where_it_can() -> None:
    dear = job(recovery=end_cost(0.0, 1.3))
    assert make_plan(dear, WIDE, recovery_mode="predict").mode == "predict"
    assert make_plan(job(recovery=end_cost(0.0, 0.3)), WIDE, recovery_mode="exact").mode == "recompute"
    impossible = make_plan(job(), WIDE, recovery_mode="predict")
    assert impossible.mode == "recompute"
    assert any("not possible" in note for note in impossible.explanation["notes"])


def test_a_mode_whose_cost_cannot_be_computed_is_not_chosen() -> None:
    """At a failure every 10 ms no life of a predicted recovery has a durable checkpoint."""
    plan = make_plan(replace(job(recovery=end_cost(-20.0, 0.5)), failures_per_second=100.0), WIDE)
    assert plan.mode == "recompute"


@pytest.mark.parametrize(
    ("fields", "interval", "bound"),
    [
        ({"stall_seconds": 1e-6}, 10, "minimum"),
        ({"stall_seconds": 100.0}, 500, "maximum"),
        ({"persist_seconds": 280.0}, 467, "persist"),
        ({"stall_seconds": 0.0}, 10, "minimum"),
        ({"failures_per_second": 0.0}, 500, "maximum"),
    ],
)
def test_the_active_bound_is_named(fields: dict[str, float], interval: int, bound: str) -> None:
    for policy in ("cpsr", "young"):
        plan = make_plan(replace(JOB, **fields), Limits(10, 500), policy=policy)  # type: ignore[arg-type]
        assert (plan.interval_iterations, plan.explanation["bound"]) == (interval, bound)


def test_the_explanation_has_what_a_reader_needs() -> None:
    plan = make_plan(job(1.0, recovery=end_cost(0.0, 0.5), restart_seconds=30.0), Limits(10, 500, 200))
    explanation = plan.explanation
    assert explanation["inputs"]["stall_seconds"] == 0.9
    assert explanation["inputs"]["failures_per_second"] == pytest.approx(1 / 3600)
    assert explanation["inputs"]["recovery"]["source"] == "prior"
    assert explanation["expected"]["restart_per_second"] == pytest.approx(30.0 / 3600)
    parts = explanation["expected"]["stall_per_second"] + explanation["expected"]["recovery_per_second"]
    assert explanation["expected"]["cost_per_second"] == pytest.approx(parts)
    assert set(explanation["rivals"]) == {"theorem1", "young", "daly"}
    least = explanation["expected"]["cost_per_second"]
    assert all(rival["cost_per_second"] >= least for rival in explanation["rivals"].values())
    assert explanation["bounds"]["maximum_by"] == "predictor"


@settings(max_examples=200, deadline=None)
@given(any_job(), limits(), st.sampled_from(policy_names()), st.sampled_from(["auto", "predict", "exact"]))
def test_any_input_gives_a_plan_inside_the_bounds(
    inputs: PlannerInputs, allowed: Limits, policy: str, mode: str
) -> None:
    plan = make_plan(inputs, allowed, policy, mode)  # type: ignore[arg-type]
    assert plan.mode is not None
    bounds = bounds_of(inputs, allowed, plan.mode)
    assert isinstance(bounds, Bounds)
    assert bounds.minimum_iterations <= plan.interval_iterations <= bounds.maximum_iterations
    json.dumps(plan.explanation, allow_nan=False)


@settings(deadline=None)
@given(st.floats(0.01, 30.0), st.floats(0.5, 100.0), st.floats(0.2, 2.0))
def test_more_failures_never_lengthen_the_interval(stall: float, hours: float, per_horizon: float) -> None:
    """Where the lag is a share of the horizon, and the best interval shorter than the time between failures."""
    curve = end_cost(0.0, per_horizon)
    rare, frequent = (
        make_plan(job(each, stall_seconds=stall, recovery=curve), WIDE, recovery_mode="predict").interval_iterations
        for each in (hours, hours / 2)
    )
    assert frequent <= rare


@given(USUAL, USUAL, USUAL, limits())
def test_a_checkpoint_is_durable_before_the_next(
    stall: float, iteration: float, persist: float, allowed: Limits
) -> None:
    inputs = PlannerInputs(iteration, stall, persist, 1 / 43200)
    for policy in ("cpsr", "young"):
        assert make_plan(inputs, allowed, policy).interval_iterations >= persist / iteration
