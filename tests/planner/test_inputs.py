import pytest
from hypothesis import given

from cpsr.planner.inputs import ITERATIONS_MAX, Bounds, Limits, PlannerInputs, bounds_of
from cpsr.planner.planning import make_plan, policy_names
from tests.planner.jobs import ANY, JOB, USUAL, end_cost, job, limits


def test_a_disk_that_is_slower_than_the_users_maximum_wins_and_it_is_reported() -> None:
    found = bounds_of(job(persist_seconds=1500.0, iteration_seconds=1.5), Limits(10, 500), "recompute")
    assert found is not None
    assert (found.minimum_iterations, found.maximum_iterations) == (1000, 1000)
    assert found.clamp(20) == (1000, "persist")
    assert "cannot be kept" in found.notes[0]


def test_the_predictor_bounds_prediction_only() -> None:
    known = Limits(10, 500, predictable_interval_iterations=200)
    assert bounds_of(job(recovery=end_cost(0.0, 0.5)), known, "predict") == Bounds(10, 200, "minimum", "predictor")
    assert bounds_of(JOB, known, "recompute") == Bounds(10, 500)


@pytest.mark.parametrize("fields", [{"persist_seconds": 1e300}, {"iteration_seconds": 1e-300}])
def test_absurd_times_have_a_plan(fields: dict[str, float]) -> None:
    for policy in policy_names():
        assert make_plan(job(**fields), Limits(10, 500), policy).interval_iterations == ITERATIONS_MAX


@given(ANY, USUAL, limits())
def test_every_bound_can_be_kept(persist: float, iteration: float, allowed: Limits) -> None:
    inputs = PlannerInputs(iteration, 1.0, persist, 1e-5)
    for mode in ("predict", "recompute"):
        found = bounds_of(inputs, allowed, mode)
        if found is None:
            assert mode == "predict"
            continue
        assert 1 <= found.minimum_iterations <= found.maximum_iterations
        assert found.minimum_iterations >= min(persist / iteration, ITERATIONS_MAX)
