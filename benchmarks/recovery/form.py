"""Forming the state that a method goes on from after a failure."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.guarded import guarded_state
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.methods.roster import PREDICTORS
from cpsr.benchmarks.recovery.predict import predicted_state
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory

__all__ = ["MOVES_AS", "Formed", "form", "form_moved", "form_truth"]

MOVES_AS = "line"


@dataclass(frozen=True)
class Formed:
    """What a method made of a failure.

    Attributes:
        state: where training goes on; None where the method advises against itself.
        reason: one sentence for people.
        seconds: opening the history, loading what was learned, forecasting, predicting and injecting.
        settings: of the forecast.
        learning_seconds: spent on learning at the checkpoints before, not in `seconds`.
        accuracy: the predictor's own scores of itself, where it keeps any.
    """

    state: State | None
    reason: str
    seconds: float
    settings: dict[str, Any]
    learning_seconds: float = 0.0
    accuracy: list[dict[str, Any]] | None = None


def form(method: str, trajectory: Trajectory, point: Point, checkpoint: State) -> Formed:
    """The state at the failure as `method` predicts it, injected into a trainer once to time it.

    Args:
        method: name of one that predicts.
        trajectory: the run that fails; its checkpoints are the history.
        point: where it fails.
        checkpoint: the true state at the last checkpoint, whose moments every method keeps, counting on from f.
    """
    lessons = learned(method, trajectory, point.interval, point.checkpoint)
    trainer = trajectory.trainer()
    predictor = PREDICTORS[method].predictor(point.interval)
    started = time.perf_counter()
    history = trajectory.history(point.checkpoint, point.interval)
    if lessons.state is not None:
        predictor.load_state_dict(lessons.state)
    asked = predictor, history, trajectory.workload, point.failure, checkpoint
    guarded = PREDICTORS[method].guarded
    forecast, state = guarded_state(*asked, trainer) if guarded else predicted_state(*asked)
    if state is not None:
        trainer.load(state)
    seconds = time.perf_counter() - started
    reason = forecast.reason
    if state is not None and not state.is_finite():
        state, reason = None, f"the predicted weights are not finite; {reason}"
    accuracy = getattr(predictor, "accuracy", None)
    return Formed(
        state,
        reason,
        seconds,
        forecast.settings,
        lessons.seconds,
        None if accuracy is None else [score for score in accuracy() if all(map(math.isfinite, score.values()))],
    )


def form_moved(trajectory: Trajectory, point: Point, checkpoint: State, failure: State) -> Formed:
    """The true state at the failure, moved as far as `line` moves the checkpoint's; None where that declines.

    It costs the horizon, which is recomputed first, and has nothing to do with the failure: any run could do it at any
    time. What `line` costs less than it is what the prediction itself saves.
    """
    moved = form(MOVES_AS, trajectory, point, checkpoint)
    if moved.state is None:
        return moved
    weights = {
        name: values + (moved.state.weights[name] - checkpoint.weights[name])
        for name, values in failure.weights.items()
    }
    return replace(moved, state=replace(failure, weights=weights))


def form_truth(trajectory: Trajectory, failure: State) -> Formed:
    """The true state at the failure, as the oracle has it."""
    trainer = trajectory.trainer()
    started = time.perf_counter()
    trainer.load(failure)
    return Formed(failure, "", time.perf_counter() - started, {})
