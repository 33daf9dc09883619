import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

from cpsr.planner.cost import Costs, cheapest
from cpsr.planner.inputs import Array, PlannerInputs
from tests.planner.jobs import USUAL, cost_per_second, end_cost, exact_ettr, job, lost_work_seconds

# Failures so rare that none meets another: costs are those that can be had by hand.
RARE_HOURS = 1e5


def costs_at(inputs: PlannerInputs, interval: int) -> float:
    """Of predicting."""
    return float(cost_per_second(inputs, numpy.array([float(interval)]), "predict")[0])


def test_recomputing_by_hand() -> None:
    # 100 iterations of 0.6 s, a stall of 0.9 s, 5 s until durable: a failure loses 60 s (30 s + 0.9 s + 5 s) / 60.9 s.
    inputs = job(RARE_HOURS)
    seconds = Costs(inputs).recovery_seconds(numpy.array([100.0]), "recompute").item()
    assert seconds == pytest.approx(lost_work_seconds(0.6, 100, 0.9, 5.0), rel=1e-5)
    cost = cost_per_second(inputs, numpy.array([100.0]), "recompute")[0]
    assert cost == pytest.approx(0.9 / 60.9 + seconds / (RARE_HOURS * 3600))


def test_predicting_by_hand() -> None:
    # 35.37 s are lost, or 58.95 iterations, half of one unfinished: a lag of -20 + 0.5 * 58.45 + 0.1 * 100.
    inputs = job(RARE_HOURS, recovery=end_cost(-20.0, 0.5, 0.1), predict_seconds=2.0)
    seconds = Costs(inputs).recovery_seconds(numpy.array([100.0]), "predict").item()
    horizon = lost_work_seconds(0.6, 100, 0.9, 5.0) / 0.6 - 0.5
    assert seconds == pytest.approx(0.6 * (0.5 - 20 + 0.5 * horizon + 10) + 2.0, rel=1e-5)


@given(st.floats(0.02, 1e4), st.integers(1, 5000), st.floats(0.01, 100.0))
def test_recomputing_is_dalys_exact_cost_at_any_rate(mtbf_hours: float, interval: int, stall: float) -> None:
    inputs = job(mtbf_hours, stall_seconds=stall, persist_seconds=0.0)
    cost = cost_per_second(inputs, numpy.array([float(interval)]), "recompute")[0]
    assert cost == pytest.approx(1 - exact_ettr(0.6, interval, stall, 0.0, mtbf_hours * 3600), rel=1e-6, abs=1e-9)


@given(st.floats(0.02, 1e3), st.integers(1, 2000), st.integers(0, 500), st.floats(0.0, 50.0))
def test_a_lag_of_all_that_was_lost_costs_what_recomputing_does(
    mtbf_hours: float, interval: int, watch: int, stall: float
) -> None:
    """Where the watch is over before the interval; the step that was under way is in both."""
    own = min(watch, interval)
    inputs = job(
        mtbf_hours, stall_seconds=stall, persist_seconds=0.0, recovery=end_cost(0.0, 1.0), watch_iterations=own
    )
    costs = [cost_per_second(inputs, numpy.array([float(interval)]), mode)[0] for mode in ("predict", "recompute")]
    assert costs[0] == pytest.approx(costs[1], rel=1e-6, abs=1e-9)


def test_a_job_without_a_curve_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="recomputing only"):
        cost_per_second(job(), numpy.array([100.0]), "predict")


@given(USUAL, USUAL, st.floats(1e-3, 1e3))
def test_the_best_interval_of_recomputing_is_dalys_exact_one(stall: float, iteration: float, mtbf_hours: float) -> None:
    """`T_c / M - 1 = W(-exp(-1 - T_s / M))`, where the exact cost is stationary."""
    inputs = job(mtbf_hours, stall_seconds=stall, iteration_seconds=iteration, persist_seconds=0.0)
    mtbf = mtbf_hours * 3600
    ideal = mtbf * (1 + float(lambertw(-math.exp(-1 - stall / mtbf)).real)) / iteration
    costs = Costs(inputs)
    found = cheapest(lambda grid: costs.per_second(grid, "recompute"), 1, 2**31)
    near = [min(max(interval, 1), 2**31) for interval in (math.floor(ideal), math.ceil(ideal))]
    best = min(cost_per_second(inputs, numpy.array(near, dtype=float), "recompute"))
    assert cost_per_second(inputs, numpy.array([float(found)]), "recompute")[0] <= best * (1 + 1e-9)


@given(st.integers(1, 3000), st.integers(0, 3000), st.floats(1.0, 5000.0))
def test_the_search_finds_the_least_of_all_integers(low: int, more: int, optimum: float) -> None:
    def cost(grid: Array) -> Array:
        return numpy.asarray(optimum / grid + grid / optimum)

    found = cheapest(cost, low, low + more)
    every = numpy.arange(low, low + more + 1, dtype=float)
    assert cost(numpy.array([float(found)]))[0] == pytest.approx(cost(every).min(), rel=1e-12)
