import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.config import PlannerConfig
from cpsr.planner.interval import Plan, fixed_plan, young_plan

CONFIG = PlannerConfig(mtbf_hours=12.0, interval_min_iterations=10, interval_max_iterations=500)
ANY_SECONDS = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, -1.0])
USUAL_SECONDS = st.floats(1e-6, 1e6)


@st.composite
def configs(draw: st.DrawFn) -> PlannerConfig:
    low, high = sorted((draw(st.integers(1, 10_000)), draw(st.integers(1, 10_000))))
    hours = draw(st.floats(1e-3, 1e6) | st.just(math.inf))
    return PlannerConfig(mtbf_hours=hours, interval_min_iterations=low, interval_max_iterations=high)


def bound(plan: Plan) -> str:
    word = plan.explanation["bound"]
    assert isinstance(word, str)
    return word


def test_young_by_hand() -> None:
    # sqrt(2 * 0.5 s * 43,200 s) = 207.846 s, at 1.5 s an iteration: 138.56
    plan = young_plan(0.5, 1.5, 3.0, CONFIG)
    assert (plan.interval_iterations, plan.origin, bound(plan)) == (139, "young", "none")
    assert plan.explanation["unbounded_seconds"] == pytest.approx(207.846, abs=1e-3)
    assert plan.explanation["inputs"]["mtbf_hours"] == 12.0
    assert plan.explanation["notes"] == []


@pytest.mark.parametrize(
    ("stall", "iteration", "persist", "interval", "active"),
    [
        (1e-6, 1.0, 0.0, 10, "minimum"),
        (100.0, 1.0, 0.0, 500, "maximum"),
        (0.5, 1.5, 300.0, 200, "persist"),
        (0.5, 1.5, 300.1, 201, "persist"),
        (0.5, 1.5, 1500.0, 1000, "persist"),
        (0.0, 1.0, 1.0, 10, "minimum"),
        (math.inf, 1.0, 1.0, 500, "maximum"),
        (math.nan, 1.0, 1.0, 10, "minimum"),
        (-1.0, 1.0, 1.0, 10, "minimum"),
        (1.0, 0.0, 1.0, 500, "maximum"),
        (1.0, math.inf, 1.0, 10, "minimum"),
        (1.0, math.nan, 1.0, 10, "minimum"),
        (0.0, 0.0, 0.0, 10, "minimum"),
        (1.0, 1.0, math.inf, 500, "maximum"),
        (0.5, 1.5, math.nan, 139, "none"),
    ],
)
def test_bounds(stall: float, iteration: float, persist: float, interval: int, active: str) -> None:
    plan = young_plan(stall, iteration, persist, CONFIG)
    assert (plan.interval_iterations, bound(plan)) == (interval, active)
    usual = active in ("none", "persist") and math.isfinite(persist)
    unusual_input = not usual and not all(math.isfinite(x) and x > 0 for x in (stall, iteration))
    if unusual_input or not math.isfinite(persist) or interval == 1000:
        assert plan.explanation["notes"], "what is unusual must be said"


def test_no_failures_expected_gives_the_maximum() -> None:
    config = PlannerConfig(mtbf_hours=math.inf, interval_max_iterations=700)
    plan = young_plan(0.5, 1.0, 1.0, config)
    assert (plan.interval_iterations, bound(plan)) == (700, "maximum")


@given(ANY_SECONDS, ANY_SECONDS, ANY_SECONDS, configs())
def test_any_input_is_usable(stall: float, iteration: float, persist: float, config: PlannerConfig) -> None:
    plan = young_plan(stall, iteration, persist, config)
    assert plan.interval_iterations >= config.interval_min_iterations
    assert plan.interval_iterations <= config.interval_max_iterations or bound(plan) == "persist"
    json.dumps(plan.explanation, allow_nan=False)


@given(USUAL_SECONDS, USUAL_SECONDS, USUAL_SECONDS, configs())
def test_a_checkpoint_is_durable_before_the_next(
    stall: float, iteration: float, persist: float, config: PlannerConfig
) -> None:
    plan = young_plan(stall, iteration, persist, config)
    if persist / iteration < 2**31:
        assert plan.interval_iterations >= persist / iteration
    if bound(plan) == "none":
        best = math.sqrt(2 * stall * config.mtbf_hours * 3600)
        assert abs(plan.interval_iterations * iteration - best) <= iteration * 0.5001 + best * 1e-9


@given(USUAL_SECONDS, USUAL_SECONDS, USUAL_SECONDS, configs())
def test_a_longer_stall_never_shortens_the_interval(
    stall: float, iteration: float, persist: float, config: PlannerConfig
) -> None:
    shorter, longer = (young_plan(seconds, iteration, persist, config) for seconds in (stall, 2 * stall))
    assert longer.interval_iterations >= shorter.interval_iterations


def test_fixed_is_what_the_user_said() -> None:
    plan = fixed_plan(50)
    assert (plan.interval_iterations, plan.origin, bound(plan)) == (50, "fixed", "none")
    with pytest.raises(ValueError, match="at least 1"):
        fixed_plan(0)
