"""Rehearsals: within their budget, from the run's own past, and charged to the failure."""

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.recovery import rehearsals
from cpsr.benchmarks.recovery.grid import Cell, Point
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.measure import PointMeasurement, needed_until
from cpsr.benchmarks.recovery.rehearsals import REHEARSED_ITERATIONS, is_earned, rehearse
from cpsr.benchmarks.recovery.statistics import cell_results
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, History, Target
from tests.benchmarks.tiny_recovery import TinyTask, fault_free, one_thread

POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trajectory]:
    with one_thread():
        # Larger batches without noise: the slope of the tiny run's own training losses cannot be told.
        task = TinyTask(noise=0.0, batch_rows=512)
        yield fault_free(tmp_path_factory.mktemp("cache"), needed_until(POINT), task)


@given(st.floats(0, 1), st.integers(1, 60), st.integers(10, 3000))
def test_rehearsals_stay_within_their_budget(budget: float, interval: int, iterations: int) -> None:
    held = 0
    for boundary in range(interval, iterations, interval):
        held += is_earned(budget, boundary, held)
        assert held * REHEARSED_ITERATIONS <= budget * boundary


def test_the_products_budget_earns_none_in_a_short_run(run: Trajectory) -> None:
    known = learned("line-rehearsed", run, 50, 450, 0.005)
    assert (known.held, known.rehearsals, known.rehearsal_iterations) == (0, (), 0.0)
    assert not any(is_earned(0.005, boundary, 0) for boundary in range(3001))


def test_a_rehearsal_looks_at_the_past_alone(run: Trajectory) -> None:
    class Careful(LinePredictor):
        def forecast(self, history: History, target: Target) -> Forecast:
            assert history.entries[-1].iteration == 300
            assert target.iteration == 342
            return super().forecast(history, target)

    rehearsal = rehearse(Careful(200, 1.0, "line"), run, 50, 450)  # 342 + 60 is before 450, 392 + 60 is not
    assert rehearsal is not None
    assert rehearsal.outcome is not None
    assert rehearsal.outcome["horizon_iterations"] == 42
    assert rehearsal.outcome["kind"] == "rehearsal"
    assert rehearsal.outcome["settings"]["window_iterations"] == 200
    assert rehearsal.outcome["standard_error_iterations"] > 0
    assert REHEARSED_ITERATIONS < rehearsal.iterations < 2 * REHEARSED_ITERATIONS


def test_nothing_is_trained_before_there_is_a_checkpoint_or_a_forecast(run: Trajectory) -> None:
    assert rehearse(LinePredictor(), run, 50, 150) is None  # 50 + 42 + 60 is later
    assert rehearse(LinePredictor(), run, 50, 200) is None  # two checkpoints: the line advises against itself


def test_the_true_state_has_no_lag(run: Trajectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "applied", lambda *of: run.at(of[3]).state())
    rehearsal = rehearse(LinePredictor(), run, 50, 450)
    assert rehearsal is not None
    assert rehearsal.outcome is not None
    assert rehearsal.outcome["lag_iterations"] == rehearsal.outcome["standard_error_iterations"] == 0.0


def test_a_predictor_with_a_word_in_it_says_what_is_rehearsed(run: Trajectory) -> None:
    class Curious(LinePredictor):
        def candidates(self, history: History, target: Target) -> list[Forecast]:
            return [LinePredictor(150, 0.5, "line").forecast(history, target)]

    for predictor, gain in ((Curious(200, 1.0, "line"), 0.5), (LinePredictor(200, 1.0, "line"), 1.0)):
        rehearsal = rehearse(predictor, run, 50, 450)
        assert rehearsal is not None
        assert rehearsal.outcome is not None
        assert rehearsal.outcome["settings"]["gain"] == gain


def test_what_was_rehearsed_is_recorded_and_charged_to_the_failure(run: Trajectory) -> None:
    measurement = PointMeasurement(run, POINT, rehearsal_budget=0.3)
    outcome = measurement.outcome("line-rehearsed")
    # The first is earned at 200 and feasible at 300, after checkpoint 150; the second is earned at 400.
    assert [one["failure_iteration"] for one in outcome.rehearsals] == [192, 292]
    assert outcome.rehearsal_iterations > 2 * REHEARSED_ITERATIONS
    known = learned("line-rehearsed", run, 50, 450, 0.3)
    assert known.state is not None
    assert known.state["outcomes"] == list(outcome.rehearsals)
    (cell,) = cell_results(Cell("tiny", 50, 0.5), [outcome])
    assert cell.lag_and_rehearsals is not None
    assert outcome.lag_iterations is not None
    charged = outcome.lag_iterations + outcome.rehearsal_iterations
    assert cell.lag_and_rehearsals.value == pytest.approx(charged / POINT.horizon)
    (plain,) = cell_results(Cell("tiny", 50, 0.5), [dataclasses.replace(outcome, rehearsal_iterations=0.0)])
    assert plain.lag_and_rehearsals is None


def test_budgets_do_not_share_results(run: Trajectory) -> None:
    few = PointMeasurement(run, POINT, 0.16).outcome("line-rehearsed")
    none = PointMeasurement(run, POINT, 0.005).outcome("line-rehearsed")
    assert (len(few.rehearsals), len(none.rehearsals)) == (1, 0)
    assert none.lag_iterations == PointMeasurement(run, POINT).outcome("line").lag_iterations


def test_training_losses_are_the_batches_own(run: Trajectory) -> None:
    trainer = run.at(95)
    losses = [trainer.step() for _ in range(10)]
    assert run.training_losses(95, 105).tolist() == losses
    assert len(run.training_losses(100, 150)) == 50
