"""A rehearsed recovery: a failure that is only pretended, followed for as long as its true losses are known."""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from cpsr.benchmarks.recovery.grid import HORIZON_SHARE
from cpsr.benchmarks.recovery.predict import applied, target_of
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.coordinator.lag import SLOPE_LOSSES_MAX, RehearsedLag, measure_lag
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target

__all__ = ["REHEARSED_ITERATIONS", "Rehearsal", "is_earned", "rehearse"]

REHEARSED_ITERATIONS = 60  # as many paired steps ranked settings as 160 did; 30 did not always


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal showed.

    Attributes:
        outcome: plain data for `StatePredictor.record`; None where the loss was too flat to tell a lag by.
        iterations: what it cost the run: the paired steps, and putting the state there, in steps' time.
    """

    outcome: dict[str, Any] | None
    iterations: float


def is_earned(budget: float, boundary: int, held: int) -> bool:
    """Whether a run of `boundary` iterations that has held that many rehearsals may hold one more.

    Args:
        budget: share of the training that rehearsals may take.
        boundary: iterations trained so far.
        held: rehearsals before; each counts as its paired steps, so that no clock decides.
    """
    return (held + 1) * REHEARSED_ITERATIONS <= budget * boundary


def rehearse(predictor: StatePredictor, trajectory: Trajectory, interval: int, boundary: int) -> Rehearsal | None:
    """Pretend the latest failure of usual horizon whose 60 iterations after it end by `boundary`, and follow it.

    The pretended failure comes from the run's own past, so that the losses of the batches after it are known; the run
    itself goes on as if nothing had been.

    Args:
        predictor: forms the state from the checkpoints before the pretended failure.
        trajectory: the run.
        interval: iterations between its checkpoints.
        boundary: the checkpoint at which the run stands.

    Returns:
        None where there was no checkpoint yet, or the predictor advised against itself: then nothing was trained.
    """
    horizon = max(1, min(round(HORIZON_SHARE * interval), interval - 1))
    checkpoint = (boundary - REHEARSED_ITERATIONS - horizon) // interval * interval
    if checkpoint < interval:
        return None
    failure = checkpoint + horizon
    trainer = trajectory.at(checkpoint)
    before = trainer.state()
    started = time.perf_counter()
    history = trajectory.history(checkpoint, interval)
    forecast = _candidate(predictor, history, target_of(trajectory.workload, failure))
    if not forecast.feasible:
        return None
    trainer.load(applied(predictor, history, forecast, failure, before))
    load_seconds = time.perf_counter() - started
    losses, step_seconds = _train(trainer)
    cost = REHEARSED_ITERATIONS + load_seconds / step_seconds
    lag = _lag(trajectory, losses, failure, boundary)
    if lag.lag_iterations is None or not math.isfinite(lag.lag_iterations):
        return Rehearsal(None, cost)
    outcome = {
        "kind": "rehearsal",
        "settings": forecast.settings,
        "lag_iterations": lag.lag_iterations,
        "standard_error_iterations": lag.standard_error_iterations,
        "horizon_iterations": horizon,
        "checkpoint_iteration": checkpoint,
        "failure_iteration": failure,
    }
    return Rehearsal(outcome, cost)


def _train(trainer: Trainer) -> tuple[list[float], float]:
    """Losses of the paired steps, and the median seconds of one."""
    losses, seconds = [], []
    for _ in range(REHEARSED_ITERATIONS):
        started = time.perf_counter()
        losses.append(trainer.step())
        seconds.append(time.perf_counter() - started)
    return losses, statistics.median(seconds)


def _lag(trajectory: Trajectory, losses: list[float], failure: int, boundary: int) -> RehearsedLag:
    """As the product takes it: the settled gap over the slope of the run's own training losses."""
    gaps = (losses - trajectory.training_losses(failure, failure + REHEARSED_ITERATIONS)).tolist()
    recent = range(max(0, boundary - SLOPE_LOSSES_MAX), boundary)
    known = trajectory.training_losses(recent.start, boundary).tolist()
    middle = failure + 0.75 * REHEARSED_ITERATIONS  # of the second half, over which the gaps are taken
    return measure_lag(gaps, [iteration + 1 for iteration in recent], known, middle)


def _candidate(predictor: StatePredictor, history: History, target: Target) -> Forecast:
    """What tells most, where the predictor has a word in that; else what it would do."""
    candidates = getattr(predictor, "candidates", None)
    proposed: list[Forecast] = [] if candidates is None else candidates(history, target)
    return next((forecast for forecast in proposed if forecast.feasible), None) or predictor.forecast(history, target)
