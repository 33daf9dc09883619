"""Forming the state that a method goes on from after a failure."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.guarded import guarded_state
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.lost import LostPart
from cpsr.benchmarks.recovery.methods.checkfree import mean_of_neighbours
from cpsr.benchmarks.recovery.methods.roster import PREDICTORS
from cpsr.benchmarks.recovery.methods.scar import running_checkpoint
from cpsr.benchmarks.recovery.predict import in_random_direction, predicted_state
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory

__all__ = [
    "MOVES_AS",
    "Formed",
    "form",
    "form_checkfree",
    "form_doubled",
    "form_moved",
    "form_placebo",
    "form_scar",
    "form_truth",
    "form_twin",
    "form_weights_only",
]

MOVES_AS = "line"
OTHER_SEED = 1000  # added to a run's seed: no run has such a one


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


def form(
    method: str,
    trajectory: Trajectory,
    point: Point,
    checkpoint: State,
    part: LostPart | None = None,
) -> Formed:
    """The state at the failure as `method` predicts it, injected into a trainer once to time it.

    Args:
        method: name of one that predicts.
        trajectory: the run that fails; its checkpoints are the history.
        point: where it fails.
        checkpoint: the true state at the last checkpoint, whose moments every method keeps, counting on from f.
        part: that is lost; None: all.
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
    forecast, state = guarded_state(*asked, trainer, part) if guarded else predicted_state(*asked, part)
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


def form_scar(trajectory: Trajectory, point: Point) -> Formed:
    """The running checkpoint of SCAR, as it is at the failure."""
    return Formed(running_checkpoint(trajectory, point), "the running checkpoint", 0.0, {})


def form_checkfree(failure: State, lost: Collection[str]) -> Formed:
    """The lost block as the mean of its neighbours; None where something else is lost."""
    state = mean_of_neighbours(failure, lost)
    return Formed(state, "the mean of the neighbours" if state else "what was lost is no block", 0.0, {})


def form_twin(trajectory: Trajectory, point: Point, checkpoint: State) -> Formed:
    """The run as it would be at the failure with other batches since the checkpoint: its cost is chance."""
    trainer = trajectory.trainer()
    trainer.load(checkpoint)
    while trainer.iteration < point.failure:
        trainer.step(batches_of=trajectory.seed + OTHER_SEED)
    return Formed(trainer.state(), "trained to the failure on other batches", 0.0, {})


def form_weights_only(trajectory: Trajectory, point: Point) -> Formed:
    """The checkpoint before the last, of which only the weights are left, under a new optimizer.

    The rate is the schedule's at that checkpoint: the product does not warm it up again.
    """
    saved = trajectory.at(point.before).state()
    moments = {
        moment: {name: torch.zeros_like(values) for name, values in of.items()} for moment, of in saved.moments.items()
    }
    state = replace(saved, moments=moments, optimizer_since=saved.iteration)
    return Formed(state, f"the weights of checkpoint {saved.iteration}, moments at zero", 0.0, {})


def form_doubled(failure: State) -> Formed:
    """The true state at the failure with twice the `exp_avg_sq`: training goes on at a lower rate for a while."""
    doubled = {name: 2.0 * values for name, values in failure.moments["exp_avg_sq"].items()}
    state = replace(failure, moments=failure.moments | {"exp_avg_sq": doubled})
    return Formed(state, "the true state, exp_avg_sq doubled", 0.0, {})


def form_placebo(trajectory: Trajectory, point: Point, checkpoint: State) -> Formed:
    """The checkpoint, each tensor moved as far as `line` moves it, in a random direction; None where that declines."""
    moved = form(MOVES_AS, trajectory, point, checkpoint)
    if moved.state is None:
        return moved
    generator = torch.Generator().manual_seed(point.failure)
    displacement = {name: moved.state.weights[name] - values for name, values in checkpoint.weights.items()}
    turned = in_random_direction(displacement, generator)
    weights = {name: values + turned[name] for name, values in checkpoint.weights.items()}
    return replace(moved, state=replace(moved.state, weights=weights), reason="a random direction, as far as the line")
