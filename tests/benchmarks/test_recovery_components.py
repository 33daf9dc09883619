"""The ablation's own predictors differ from the full one in the named component alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cpsr.benchmarks.recovery.components import IterationTime, ScaledSecant
from cpsr.benchmarks.recovery.predict import target_of
from cpsr.benchmarks.recovery.trajectory import CachedHistory, Trajectory
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast
from cpsr.predictor.vitp import VITPPredictor
from tests.benchmarks.tiny_recovery import TINY, fault_free, one_thread

FAILURE = 488
CONSTANT = Workload("tiny-constant", TINY.task, "constant", 1e-3, 1000)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trajectory]:
    with one_thread():
        yield fault_free(tmp_path_factory.mktemp("cache"), 500)


def history(run: Trajectory, workload: Workload) -> CachedHistory:
    """The run's weights, under that workload's schedule."""
    return CachedHistory(workload, run.path_of, range(50, 451, 50))


def row(forecast: Forecast) -> list[float]:
    assert forecast.feasible, forecast.reason
    return list(next(iter(forecast.coefficients.values())))


def test_the_secant_goes_as_far_as_the_line_and_rests_on_two_checkpoints(run: Trajectory) -> None:
    target = target_of(TINY, FAILURE)
    secant, line = (one().forecast(history(run, TINY), target) for one in (ScaledSecant, LinePredictor))
    assert secant.settings["gain"] == line.settings["gain"]
    assert secant.settings["used_iterations"] == [400, 450]
    assert row(secant)[:-2] == [0.0] * 7
    reach = line.settings["gain"] * (TINY.times[FAILURE] - TINY.times[450]) / (TINY.times[450] - TINY.times[400])
    assert row(secant)[-2:] == pytest.approx([-reach, 1 + reach])


def test_time_in_iterations_is_the_same_where_the_learning_rate_never_changes(run: Trajectory) -> None:
    # From the warm-up's end on; the window reaches back to iteration 250.
    for workload, same in ((CONSTANT, True), (replace(TINY, peak_learning_rate=1e-3), False)):
        target = target_of(workload, FAILURE)
        plain, other = (
            one(window_iterations=200, gain=2.0, base="checkpoint", direction="line").forecast(
                history(run, workload), target
            )
            for one in (VITPPredictor, IterationTime)
        )
        assert (row(other) == pytest.approx(row(plain), abs=1e-9)) is same


def test_it_learns_and_predicts_on_that_axis_too(run: Trajectory) -> None:
    predictor = IterationTime(window_iterations=300, direction="vitp")
    for newest in range(50, 451, 50):
        for _ in predictor.learn(CachedHistory(TINY, run.path_of, range(50, newest + 1, 50))):
            pass
    forecast = predictor.forecast(history(run, TINY), target_of(TINY, FAILURE))
    assert forecast.settings["direction"] == "vitp"
    pieces = list(predictor.predict(history(run, TINY), forecast))
    assert {name for name, _, _ in pieces} == set(history(run, TINY).operators)
