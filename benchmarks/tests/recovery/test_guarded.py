"""Predictions under the guard, and the control that moves without a failure."""

from pathlib import Path

import pytest
import torch

from cpsr.benchmarks.recovery import guarded as guarding
from cpsr.benchmarks.recovery.form import form, form_moved
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.guarded import guarded_state
from cpsr.benchmarks.recovery.lost import lost_part
from cpsr.benchmarks.recovery.measure import PointMeasurement
from cpsr.benchmarks.recovery.methods.roster import PREDICTORS, predictor_source
from cpsr.benchmarks.recovery.predict import target_of
from cpsr.benchmarks.recovery.sources import predictor_files
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.tests.recovery.tiny import TINY, fault_free, one_thread
from cpsr.fitter.end_cost import IterationWorth
from cpsr.predictor.line import LinePredictor

POINT = Point(50, 0.5, 450, 488)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    with one_thread():
        return fault_free(tmp_path_factory.mktemp("cache"), TINY.iterations)


def guarded(run: Trajectory, predictor: LinePredictor) -> tuple[float | None, str]:
    """Distance that was moved, None where it was declined, and why."""
    checkpoint = run.at(POINT.checkpoint).state()
    history = run.history(POINT.checkpoint, POINT.interval)
    forecast, state = guarded_state(predictor, history, TINY, POINT.failure, checkpoint, run.trainer())
    if state is None:
        assert not forecast.feasible
        return None, forecast.reason
    moved = sum(float((values - checkpoint.weights[name]).square().sum()) for name, values in state.weights.items())
    return moved**0.5, forecast.reason


def settled(run: Trajectory, gain: float) -> LinePredictor:
    """A line whose predictions have cost nothing so far: recomputing these few iterations is dearer."""
    predictor = LinePredictor(300, gain)
    forecast = predictor.forecast(run.history(POINT.checkpoint, POINT.interval), target_of(TINY, POINT.failure))
    for _ in range(20):
        predictor.record({"settings": forecast.settings, "lag_iterations": 0.0, "standard_error_iterations": 0.0})
    return predictor


def test_a_sound_prediction_passes_and_a_wild_one_is_cut_to_the_path_or_vetoed(run: Trajectory) -> None:
    with one_thread():
        plain, reason = guarded(run, settled(run, 1.0))
        assert plain is not None, reason
        assert "accepted" in reason
        double, _ = guarded(run, settled(run, 2.0))
        assert double == pytest.approx(2 * plain, rel=1e-4)
        wild, reason = guarded(run, settled(run, 1000.0))
        assert wild is None or wild < 100 * plain  # the path of the history at most


def test_it_declines_where_recomputing_is_no_dearer(run: Trajectory) -> None:
    predictor = LinePredictor()
    with one_thread():
        for _ in range(20):
            history = run.history(POINT.checkpoint, POINT.interval)
            forecast = predictor.forecast(history, target_of(TINY, POINT.failure))
            outcome = {"settings": forecast.settings, "lag_iterations": 90.0, "standard_error_iterations": 0.0}
            predictor.record(outcome)
        moved, reason = guarded(run, predictor)
        history = run.history(POINT.checkpoint, POINT.interval)
        checkpoint = run.at(POINT.checkpoint).state()
        asked = predictor, history, TINY, POINT.failure, checkpoint, run.trainer()
        _, quarter = guarded_state(*asked, lost_part("1/4", run.at(POINT.failure).state(), 0))
    assert moved is None
    assert "recomputing 38 iterations is the safer choice" in reason
    assert quarter is not None, "a quarter of the state costs a quarter of what the whole is expected to"


def test_the_control_moves_the_true_state_as_far_and_is_charged_the_horizon(run: Trajectory) -> None:
    with one_thread():
        checkpoint, failure = run.at(POINT.checkpoint).state(), run.at(POINT.failure).state()
        line = form("line", run, POINT, checkpoint)
        moved = form_moved(run, POINT, checkpoint, failure)
        assert line.state is not None
        assert moved.state is not None
        for name, values in moved.state.weights.items():
            expected = failure.weights[name] + (line.state.weights[name] - checkpoint.weights[name])
            torch.testing.assert_close(values, expected)
        momentum = moved.state.moments["exp_avg"]
        assert all(torch.equal(momentum[name], values) for name, values in failure.moments["exp_avg"].items())
        outcome = PointMeasurement(run, POINT, IterationWorth(2e-5, 1e-6, TINY.iterations)).outcome("recompute-moved")
    assert outcome.curve is not None
    if outcome.lag_iterations is not None:
        assert outcome.lag_iterations == outcome.curve["lag"]["iterations"] + POINT.horizon


def test_what_the_guard_does_is_part_of_what_a_kept_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PREDICTORS["line"].guarded
    with_guard = predictor_source("line")
    monkeypatch.setitem(PREDICTORS, "line", PREDICTORS["line-x2"].__class__(LinePredictor))
    assert predictor_source("line") != with_guard


def test_the_guards_files_decide() -> None:
    names = {path.name for path in predictor_files(Path(guarding.__file__))}
    assert {"guarded.py", "guard.py", "displacement.py"} <= names
