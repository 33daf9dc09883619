"""The simulation against what is known exactly, within the error of its runs."""

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.planner.baselines import Daly, Young
from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import Array, PlannerInputs
from cpsr.planner.objective import cost_per_second
from cpsr.planner.plan import make_plan
from cpsr.simulate.arrivals import Weibull, poisson
from cpsr.simulate.closed_forms import exact_ettr, formula_ettr
from cpsr.simulate.outcome import Outcome
from cpsr.simulate.run import simulate
from cpsr.simulate.system import Checkpoints, Job, LinearCost, Prediction, Recovery, Replay, Rollback, System
from tests.simulate.event_walk import Walk
from tests.simulate.known_costs import (
    checkpoint_overhead_seconds,
    lost_work_seconds,
    pccheck_failure_seconds,
    recovery_bounds_iterations,
    wasted_seconds,
)

DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0
# A mean of many runs lies within so many of its standard errors of the truth but once in 15,000 times; seeds are fixed.
STANDARD_ERRORS = 4.0


def outcome(
    checkpoints: Checkpoints,
    recovery: Recovery | None = None,
    mtbf_seconds: float = 2 * HOUR_SECONDS,
    days: float = 54,
    runs: int = 1000,
    **job: float,
) -> Outcome:
    system = System("under test", checkpoints, Rollback() if recovery is None else recovery)
    return simulate(Job(3.0, days * DAY_SECONDS, **job), system, poisson(mtbf_seconds), runs)


def total(result: Outcome) -> Array:
    spent = result.stall_seconds + result.lost_seconds + result.restart_seconds + result.waiting_seconds
    return result.useful_seconds + spent


def lost_per_failure(result: Outcome) -> tuple[float, float]:
    """Mean over the runs and its standard error."""
    return result.mean_and_error(result.lost_seconds / result.failures)


@pytest.mark.parametrize("mtbf_seconds", [600.0, HOUR_SECONDS, 12 * HOUR_SECONDS])
@pytest.mark.parametrize(("interval", "stall", "restart"), [(20, 4.0, 60.0), (100, 20.0, 0.0)])
def test_ettr_is_daly_s_exact_one(mtbf_seconds: float, interval: int, stall: float, restart: float) -> None:
    # Long runs of few failures: what is cut off at the end of a run is an interval in all, at most 1e-4 of it here.
    result = outcome(Checkpoints(interval, stall), mtbf_seconds=mtbf_seconds, runs=200, restart_seconds=restart)
    mean, error = result.mean_and_error(result.ettr)
    cut = interval * 3.0 / result.job.wall_seconds
    assert mean == pytest.approx(
        exact_ettr(3.0, interval, stall, restart, mtbf_seconds), abs=STANDARD_ERRORS * error + cut
    )
    assert error < 3e-4


def test_ettr_is_near_the_formula_where_failures_are_rare() -> None:
    mtbf_seconds = 12 * HOUR_SECONDS
    recovery_seconds = 3.0 * 50 / 2 + 120.0
    result = outcome(Checkpoints(50, 4.0), mtbf_seconds=mtbf_seconds, restart_seconds=120.0)
    mean, error = result.mean_and_error(result.ettr)
    # The formula leaves out what is of second order: here the stall that is lost with the work.
    second_order = 4.0 / mtbf_seconds + (recovery_seconds / mtbf_seconds) ** 2
    assert mean == pytest.approx(
        formula_ettr(3.0, 50, 4.0, recovery_seconds, mtbf_seconds), abs=STANDARD_ERRORS * error + second_order
    )


@pytest.mark.parametrize("mtbf_seconds", [HOUR_SECONDS, 12 * HOUR_SECONDS])
@pytest.mark.parametrize("stall_seconds", [0.5, 10.0])
def test_young_and_daly_choose_the_optimum(mtbf_seconds: float, stall_seconds: float) -> None:
    inputs = PlannerInputs(3.0, stall_seconds, 0.0, 1 / mtbf_seconds)
    intervals = numpy.arange(1, 2000)
    exact = [exact_ettr(3.0, interval, stall_seconds, 0.0, mtbf_seconds) for interval in intervals.tolist()]
    best = int(intervals[numpy.argmax(exact)])
    assert Daly().choose(inputs).interval_iterations == pytest.approx(best, abs=1)
    chosen = {rule: rule.choose(inputs).interval_iterations for rule in (Young(), Daly())}
    for interval in chosen.values():
        simulated = outcome(Checkpoints(interval, stall_seconds), mtbf_seconds=mtbf_seconds, runs=200)
        rivals = [
            outcome(Checkpoints(round(interval * f), stall_seconds), mtbf_seconds=mtbf_seconds, runs=200)
            for f in (0.5, 2.0)
        ]
        # The same failures meet all of them, so that the differences are sharper than the means.
        for rival in rivals:
            mean, error = simulated.mean_and_error(simulated.ettr - rival.ettr)
            assert mean > STANDARD_ERRORS * error


def test_lost_work_is_half_an_interval_and_the_persist_time() -> None:
    checkpoints = Checkpoints(40, 6.0, persist_seconds=90.0)
    mean, error = lost_per_failure(outcome(checkpoints, mtbf_seconds=24 * HOUR_SECONDS, days=540))
    # Failures this rare meet no other one: the neglected share is the interval over the MTBF.
    rare = 2 * 120.0 * 120.0 / (24 * HOUR_SECONDS)
    assert mean == pytest.approx(lost_work_seconds(3.0, 40, 6.0, 90.0), abs=STANDARD_ERRORS * error + rare)
    assert error < 0.1 * mean


def test_checkfreq_loses_one_to_two_intervals_where_persisting_fills_the_interval() -> None:
    # Its paper: a failure rolls back to the checkpoint before the one that is being written.
    interval_seconds = 40 * 3.0
    checkpoints = Checkpoints(40, 0.01, persist_seconds=interval_seconds)
    mean, error = lost_per_failure(outcome(checkpoints, mtbf_seconds=24 * HOUR_SECONDS, days=540))
    assert mean == pytest.approx(1.5 * interval_seconds, abs=STANDARD_ERRORS * error + 1.0)


def test_pccheck_s_cost_counts_half_of_the_time_until_durable() -> None:
    persist_seconds = 90.0
    checkpoints = Checkpoints(20, 0.001, persist_seconds, slots=2)
    result = outcome(checkpoints, mtbf_seconds=24 * HOUR_SECONDS, days=540, restart_seconds=30.0)
    mean, error = result.mean_and_error((result.lost_seconds + result.restart_seconds) / result.failures)
    expected = pccheck_failure_seconds(3.0, 20, 30.0, persist_seconds, 2) + persist_seconds / 2
    assert mean == pytest.approx(expected, abs=STANDARD_ERRORS * error + 1.0)


def test_overhead_is_pec_s_third_equation() -> None:
    interval, stall, restart = 30, 1.0, 45.0
    result = outcome(Checkpoints(interval, stall), mtbf_seconds=24 * HOUR_SECONDS, days=540, restart_seconds=restart)
    cost = result.job.wall_seconds - result.useful_seconds
    iterations = (result.job.wall_seconds - cost) / 3.0
    runs = zip(iterations.tolist(), result.failures.tolist(), strict=True)
    expected = [checkpoint_overhead_seconds(stall, done, interval, failures, restart, 3.0) for done, failures in runs]
    difference = cost - numpy.array(expected)
    mean, error = result.mean_and_error(difference / cost)
    # It leaves out the stall lost with the work, here 1 s in 100 a failure.
    assert mean == pytest.approx(0.0, abs=STANDARD_ERRORS * error + 2e-3)


def test_wasted_time_is_moetion_s() -> None:
    stall, retrieval = 0.5, 20.0
    result = outcome(Checkpoints(10, stall), mtbf_seconds=24 * HOUR_SECONDS, days=540, restart_seconds=retrieval)
    mean, error = result.mean_and_error((result.lost_seconds + result.restart_seconds) / result.failures)
    assert mean + stall == pytest.approx(wasted_seconds(stall, retrieval, 10, 3.0), abs=STANDARD_ERRORS * error + stall)


@pytest.mark.parametrize("window", [3, 6])
def test_sparse_windows_repeat_between_one_and_two_windows(window: int) -> None:
    checkpoints = Checkpoints(window, 0.0)
    mean, error = lost_per_failure(
        outcome(checkpoints, Replay(conversion_iterations=window), mtbf_seconds=24 * HOUR_SECONDS, days=540)
    )
    least, expected, most = recovery_bounds_iterations(window)
    assert mean / 3.0 == pytest.approx(expected, abs=STANDARD_ERRORS * error / 3.0 + 0.01)
    single = outcome(checkpoints, Replay(conversion_iterations=window), days=1, mtbf_seconds=2 * DAY_SECONDS)
    once = single.failures == 1
    repeated = single.lost_seconds[once] / 3.0
    assert once.sum() > 100
    assert least <= repeated.min() <= repeated.max() <= most


def test_predicted_lag_is_the_curve_s_mean() -> None:
    lag = LinearCost(slope=0.4, lead_iterations=2.0)
    checkpoints = Checkpoints(50, 0.0)
    predicted = outcome(checkpoints, Prediction(lag, seconds=7.0), mtbf_seconds=24 * HOUR_SECONDS, days=540)
    mean, error = lost_per_failure(predicted)
    # Half a partial iteration is lost, and the horizon is whole iterations: 24.5 on average.
    expected = 3.0 * (0.5 + 0.4 * 24.5 - 2.0 * 49 / 50)
    assert mean == pytest.approx(expected, abs=STANDARD_ERRORS * error + 0.1)
    restart, _ = predicted.mean_and_error(predicted.restart_seconds / predicted.failures)
    assert restart == pytest.approx(7.0, abs=0.05)


WATCHED = [
    # MTBF, interval, stall and persist time, slope and lead of the lag, watch, iterations until a lead is had.
    pytest.param(600.0, 28, 0.3, 5.0, LinearCost(0.5), 0, 0, id="no watch"),
    pytest.param(600.0, 28, 0.3, 5.0, LinearCost(0.5), 60, 0, id="a watch of two intervals"),
    pytest.param(600.0, 28, 0.3, 5.0, LinearCost(0.5, 4.0), 60, 0, id="a lead"),
    pytest.param(600.0, 60, 20.0, 150.0, LinearCost(0.7), 200, 0, id="a watch as long as the time between failures"),
    pytest.param(3600.0, 60, 3.0, 40.0, LinearCost(0.3), 100, 0, id="rarer failures"),
    pytest.param(600.0, 100, 20.0, 150.0, None, 0, 0, id="recomputing"),
    pytest.param(
        300.0, 10, 0.3, 5.0, LinearCost(1.0, 50.0), 60, 100, id="a lead that most failures come too early for"
    ),
    pytest.param(600.0, 30, 9.0, 60.0, LinearCost(1.0, 75.0), 0, 100, id="with stalls before it is had, and no watch"),
    pytest.param(600.0, 20, 1.0, 5.0, LinearCost(-0.5), 60, 100, id="a lead that grows with what was lost"),
    pytest.param(600.0, 28, 3.0, 40.0, LinearCost(0.0, 9.0), 60, 150, id="a lead at any distance"),
    pytest.param(300.0, 25, 20.0, 70.0, LinearCost(0.5, 90.0), 60, 300, id="a lead that many chained failures reach"),
]


@pytest.mark.parametrize(("mtbf", "interval", "stall", "persist", "lag", "watch", "lead_after"), WATCHED)
def test_planner_simulation_and_a_walk_through_every_event_agree_on_watch_and_lead(
    mtbf: float, interval: int, stall: float, persist: float, lag: LinearCost | None, watch: int, lead_after: int
) -> None:
    wall = 500 * mtbf
    recovery = Rollback() if lag is None else Prediction(lag, 5.0, watch, lead_after)
    system = System("under test", Checkpoints(interval, stall, persist), recovery)
    simulated = simulate(Job(3.0, wall), system, poisson(mtbf), 200)
    mean, error = simulated.mean_and_error(simulated.cost_fraction)
    inputs = PlannerInputs(
        3.0,
        stall,
        persist,
        1 / mtbf,
        lag,
        predict_seconds=5.0,
        watch_iterations=watch,
        lead_after_iterations=lead_after,
    )
    expected = cost_per_second(inputs, numpy.array([float(interval)]), "recompute" if lag is None else "predict")[0]
    # At its ends a run is cut off: an interval, a watch or a lead of it at most; a lead is not had at horizon 0.
    assert expected == pytest.approx(mean, rel=0.005, abs=STANDARD_ERRORS * error)

    def lag_of(horizon: float) -> float:
        assert lag is not None
        return lag.slope * horizon - (lag.lead_iterations if horizon > 0 else 0.0)

    walk = Walk(3.0, interval, stall, persist, mtbf, None if lag is None else lag_of, 5.0, watch, lead_after)
    walked = numpy.array([walk.cost(wall, seed) for seed in range(60)])
    walk_error = walked.std(ddof=1) / numpy.sqrt(walked.size)
    assert walked.mean() == pytest.approx(mean, abs=STANDARD_ERRORS * float(numpy.hypot(error, walk_error)))


def test_a_watch_makes_recomputing_the_cheaper_one_where_failures_are_frequent() -> None:
    watched = PlannerInputs(3.0, 0.3, 5.0, 1 / 600, LinearCost(0.5), predict_seconds=5.0, watch_iterations=60)
    assert make_plan([replace(watched, watch_iterations=0)], Limits(2, 5000, 300)).mode == "predict"
    assert make_plan([watched], Limits(2, 5000, 300)).mode == "recompute"


def test_the_first_checkpoint_after_a_predicted_restart_waits_for_the_watch() -> None:
    position, durable = numpy.array([47.6]), numpy.array([40.0])
    due = [
        recovery.resume(position, durable, 10, 1.0).next_checkpoint_iterations.item()
        for recovery in (Prediction(LinearCost(0.5)), Prediction(LinearCost(0.5), 0.0, 60), Rollback(), Replay())
    ]
    assert due == [57, 107, 50, 50]


def test_a_lag_below_zero_gives_time_back() -> None:
    ahead = outcome(Checkpoints(50, 1.0), Prediction(LinearCost(slope=-1.0)), mtbf_seconds=HOUR_SECONDS)
    behind = outcome(Checkpoints(50, 1.0), Prediction(LinearCost(slope=1.0)), mtbf_seconds=HOUR_SECONDS)
    assert ahead.ettr.mean() > 1 - 0.01 > behind.ettr.mean()
    numpy.testing.assert_allclose(total(ahead), ahead.job.wall_seconds)


def test_a_failure_during_the_recovery_costs_no_second_lag() -> None:
    # A job that never trains again within a restart keeps the lag of the last recovery only.
    lag = LinearCost(slope=1.0)
    checkpoints = Checkpoints(10, 0.0)
    often = simulate(
        Job(1.0, 500.0, restart_seconds=480.0), System("x", checkpoints, Prediction(lag)), poisson(15.0), 400
    )
    assert (often.failures > 5).mean() > 0.9
    # At most one interval and a part of an iteration; a sum over the failures would be several times as much.
    assert often.lost_seconds.max() <= 10 + 1


def test_training_waits_for_the_storage_or_skips() -> None:
    waiting = outcome(Checkpoints(10, 1.0, persist_seconds=90.0), runs=20, mtbf_seconds=1e12)
    skipping = outcome(Checkpoints(10, 1.0, persist_seconds=90.0, contention="skip"), runs=20, mtbf_seconds=1e12)
    # Every 91 s 30 s are trained; or every third checkpoint is taken: 90 s of 91.
    assert waiting.ettr.mean() == pytest.approx(30 / 91, rel=1e-4)
    assert skipping.ettr.mean() == pytest.approx(90 / 91, rel=1e-4)


def test_slots_let_checkpoints_overlap() -> None:
    one, three = (outcome(Checkpoints(10, 1.0, 90.0, slots=slots), runs=1, mtbf_seconds=1e12) for slots in (1, 3))
    assert one.ettr.mean() == pytest.approx(30 / 91, rel=1e-4)
    assert three.ettr.mean() == pytest.approx(30 / 31, rel=1e-4)


def test_brute_force_in_the_simulation_finds_the_planner_s_interval() -> None:
    mtbf_seconds = HOUR_SECONDS
    lag = LinearCost(slope=0.5, lead_iterations=3.0)
    inputs = PlannerInputs(3.0, 2.0, 15.0, 1 / mtbf_seconds, recovery=lag)
    chosen = make_plan([inputs], Limits(5, 400)).interval_iterations
    grid = [round(chosen * factor) for factor in (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)]
    costs = [
        outcome(
            Checkpoints(interval, 2.0, 15.0), Prediction(lag), mtbf_seconds=mtbf_seconds, runs=200
        ).cost_fraction.mean()
        for interval in grid
    ]
    assert costs[grid.index(chosen)] <= min(costs) * 1.02


def test_the_same_failures_meet_all_systems_of_a_seed() -> None:
    one = outcome(Checkpoints(10, 1.0), days=3)
    other = outcome(Checkpoints(90, 9.0, 30.0), Replay(2), days=3)
    numpy.testing.assert_array_equal(one.failures, other.failures)
    assert not numpy.array_equal(
        one.failures, simulate(one.job, one.system, poisson(2 * HOUR_SECONDS), 1000, seed=1).failures
    )


def test_bursts_are_kinder_than_poisson_failures_at_the_same_rate() -> None:
    # A failure soon after another one finds little to take back.
    job, system = Job(3.0, 54 * DAY_SECONDS), System("x", Checkpoints(100, 5.0), Rollback())
    memoryless, bursts = (simulate(job, system, Weibull(HOUR_SECONDS, shape), 300) for shape in (1.0, 0.5))
    assert lost_per_failure(bursts)[0] < 0.9 * lost_per_failure(memoryless)[0]
    assert bursts.failures.mean() == pytest.approx(54 * 24, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    interval=st.integers(1, 300),
    stall=st.floats(0, 50),
    persist=st.floats(0, 2000),
    slots=st.integers(1, 3),
    recovery=st.sampled_from(
        [Rollback(), Replay(4, 0.7), Prediction(LinearCost(0.3, 5.0), 11.0), Prediction(LinearCost(-2.0))]
    ),
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
    numpy.testing.assert_allclose(total(result), result.job.wall_seconds, rtol=1e-9)
    for spent in (result.stall_seconds, result.restart_seconds, result.waiting_seconds):
        assert spent.min() >= 0


def test_report_is_plain_and_names_its_units() -> None:
    figures = outcome(Checkpoints(10, 1.0), days=1, runs=50).to_json()
    assert sum(figures["wall_time_fractions"].values()) == pytest.approx(1)
    assert figures["ettr_quantiles"]["0.05"] <= figures["ettr_mean"] <= figures["ettr_quantiles"]["0.95"]
    assert figures["goodput_samples_per_second_mean"] == pytest.approx(figures["ettr_mean"] / 3.0)


@pytest.mark.parametrize(
    "wrong", [{"iteration_seconds": 0.0}, {"restart_seconds": -1.0}, {"wall_seconds": float("inf")}]
)
def test_impossible_jobs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Job(**({"iteration_seconds": 1.0, "wall_seconds": 10.0} | wrong))


def test_impossible_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match="interval_iterations"):
        Checkpoints(0, 1.0)
    with pytest.raises(ValueError, match="one slot only"):
        Checkpoints(1, 1.0, slots=2, contention="skip")
    with pytest.raises(ValueError, match="runs"):
        outcome(Checkpoints(1, 1.0), runs=0)
