"""Forming the state that a method goes on from after a failure."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.methods import ORACLE, PREDICTORS
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.predictor.protocol import Target

__all__ = ["Formed", "form"]


@dataclass(frozen=True)
class Formed:
    """What a method made of a failure.

    Attributes:
        state: where training goes on; None where the method advises against itself.
        reason: one sentence for people.
        seconds: opening the history, forecasting, predicting and injecting.
        settings: of the forecast.
    """

    state: State | None
    reason: str
    seconds: float
    settings: dict[str, Any]


def form(method: str, trajectory: Trajectory, point: Point, checkpoint: State, failure: State) -> Formed:
    """The state at the failure as `method` has it, injected into a trainer once to time it.

    Args:
        method: any but recomputing.
        trajectory: the run that fails; its checkpoints are the history.
        point: where it fails.
        checkpoint: the true state at the last checkpoint, whose moments every method keeps, counting on from f.
        failure: the true state at the failure, for the oracle alone.
    """
    trainer = trajectory.trainer()
    started = time.perf_counter()
    settings: dict[str, Any] = {}
    reason = ""
    if method == ORACLE:
        state = failure
    else:
        predictor = PREDICTORS[method](point.interval)
        history = trajectory.history(point.checkpoint, point.interval)
        forecast = predictor.forecast(history, _target(trajectory, point))
        settings, reason = forecast.settings, forecast.reason
        if not forecast.feasible:
            return Formed(None, reason, time.perf_counter() - started, settings)
        weights = {name: torch.empty_like(values) for name, values in checkpoint.weights.items()}
        for name, start, values in predictor.predict(history, forecast):
            weights[name][start : start + values.numel()] = values
        state = _at(point, checkpoint, weights)
    trainer.load(state)
    seconds = time.perf_counter() - started
    if not all(bool(torch.isfinite(values).all()) for values in state.weights.values()):
        return Formed(None, f"the predicted weights are not finite; {reason}", seconds, settings)
    return Formed(state, reason, seconds, settings)


def _target(trajectory: Trajectory, point: Point) -> Target:
    workload = trajectory.workload
    return Target(point.failure, workload.times[point.failure], workload.peak_until(point.failure))


def _at(point: Point, checkpoint: State, weights: dict[str, torch.Tensor]) -> State:
    return State(point.failure, weights, checkpoint.exp_avg, checkpoint.exp_avg_sq)
