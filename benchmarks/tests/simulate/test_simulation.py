"""The simulation against what is known exactly, within the error of its runs; seeds are fixed."""

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.simulate import planner_grid
from cpsr.benchmarks.simulate.simulation import (
    Checkpoints,
    Failures,
    Job,
    LinearCost,
    Outcome,
    Recovery,
    System,
    simulate,
)
from cpsr.planner.inputs import PlannerInputs
from tests.planner.jobs import cost_per_second

DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3_600.0
# A mean of many runs lies within so many of its standard errors of the truth but once in 15,000 times.
STANDARD_ERRORS = 4.0


def outcome(
    checkpoints: Checkpoints,
    recovery: Recovery | None = None,
    mtbf_seconds: float = 2 * HOUR_SECONDS,
    days: float = 54,
    runs: int = 200,
    **job: float,
) -> Outcome:
    system = System("under test", checkpoints, Recovery() if recovery is None else recovery)
    return simulate(Job(3.0, days * DAY_SECONDS, **job), system, Failures(mtbf_seconds), runs)


@pytest.mark.parametrize("mtbf_seconds", [600.0, 12 * HOUR_SECONDS])
@pytest.mark.parametrize(("interval", "stall", "restart"), [(20, 4.0, 60.0), (100, 20.0, 0.0)])
def test_ettr_is_dalys_exact_one(mtbf_seconds: float, interval: int, stall: float, restart: float) -> None:
    result = outcome(Checkpoints(interval, stall), mtbf_seconds=mtbf_seconds, restart_seconds=restart)
    mean, error = result.mean_and_error(result.ettr)
    useful = interval * 3.0
    period = mtbf_seconds * math.exp(restart / mtbf_seconds) * math.expm1((useful + stall) / mtbf_seconds)
    # What is cut off at the end of a run is an interval in all.
    cut = useful / result.job.wall_seconds
    assert mean == pytest.approx(useful / period, abs=STANDARD_ERRORS * error + cut)


def test_lost_work_is_half_an_interval_and_the_persist_time() -> None:
    result = outcome(Checkpoints(40, 6.0, persist_seconds=90.0), mtbf_seconds=24 * HOUR_SECONDS, days=540)
    mean, error = result.mean_and_error(result.lost_seconds / result.failures)
    # Iterations that were done when a failure comes, from the newest durable checkpoint: k (k/2 + s + p) / (k + s).
    assert mean == pytest.approx(120 * (60 + 6 + 90) / 126, abs=STANDARD_ERRORS * error + 0.4)


WATCHED = [
    # MTBF, interval, stall and persist time, the cost, watch.
    pytest.param(600.0, 28, 0.3, 5.0, LinearCost(0.5), 60, id="a watch of two intervals"),
    pytest.param(600.0, 60, 20.0, 150.0, LinearCost(0.7), 200, id="a watch as long as the time between failures"),
    pytest.param(600.0, 100, 20.0, 150.0, None, 0, id="recomputing"),
]


@pytest.mark.parametrize(("mtbf", "interval", "stall", "persist", "lag", "watch"), WATCHED)
def test_planner_and_simulation_agree(
    mtbf: float, interval: int, stall: float, persist: float, lag: LinearCost | None, watch: int
) -> None:
    wall = 500 * mtbf
    recovery = Recovery() if lag is None else Recovery(lag, 5.0, watch)
    system = System("under test", Checkpoints(interval, stall, persist), recovery)
    simulated = simulate(Job(3.0, wall), system, Failures(mtbf), 200)
    mean, error = simulated.mean_and_error(simulated.cost_fraction)
    inputs = PlannerInputs(
        3.0,
        stall,
        persist,
        1 / mtbf,
        lag,
        predict_seconds=5.0,
        watch_iterations=watch,
    )
    expected = cost_per_second(inputs, numpy.array([float(interval)]), "recompute" if lag is None else "predict")[0]
    assert expected == pytest.approx(mean, rel=0.005, abs=STANDARD_ERRORS * error)


@settings(max_examples=40, deadline=None)
@given(
    interval=st.integers(1, 300),
    stall=st.floats(0, 50),
    persist=st.floats(0, 2000),
    slots=st.integers(1, 3),
    recovery=st.sampled_from([Recovery(), Recovery(LinearCost(0.3), 11.0, 60), Recovery(LinearCost(-2.0))]),
    mtbf=st.floats(5, 1e6),
    down=st.tuples(st.floats(0, 100), st.floats(0, 1000), st.floats(0, 1000)),
)
def test_no_second_is_lost_or_counted_twice(
    interval: int, stall: float, persist: float, slots: int, recovery: Recovery, mtbf: float, down: tuple[float, ...]
) -> None:
    detection, replacement, restart = down
    result = outcome(
        Checkpoints(interval, stall, persist, slots), recovery, mtbf, days=0.05, runs=20,
        detection_seconds=detection, replacement_seconds=replacement, restart_seconds=restart,
    )  # fmt: skip
    spent = result.stall_seconds + result.lost_seconds + result.restart_seconds + result.waiting_seconds
    numpy.testing.assert_allclose(result.useful_seconds + spent, result.job.wall_seconds, rtol=1e-9)


def test_a_planned_interval_is_near_brute_force() -> None:
    found = list(planner_grid._cell(60, "middling", "half"))
    assert [case.curve_error for case in found] == list(planner_grid.ERRORS)
    right = found[0]
    assert 0 <= right.over_brute <= planner_grid.AIMS["brute force"]
    assert right.over_rival < 0
    assert planner_grid.report(found)["worst"]["brute force"] == right.over_brute
