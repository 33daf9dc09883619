"""Forming the state that a method goes on from after a failure."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import BLOCK, LostPart
from cpsr.benchmarks.recovery.methods import LINE, PREDICTORS, learned
from cpsr.benchmarks.recovery.trainer import State, Tensors, Trainer
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.predictor.calibration import of_part
from cpsr.predictor.guard import LENGTHS, Guard, measure, of_length, shorten
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target

__all__ = [
    "Formed",
    "form_checkfree",
    "form_doubled",
    "form_moved",
    "form_placebo",
    "form_predicted",
    "form_scar",
    "form_truth",
    "form_twin",
    "target_of",
]

OTHER_SEED = 1000  # added to a run's seed: no run has such a one
PROBE_BATCHES = 4  # the product's default: the newest training batches before the checkpoint
SCAR_BLOCK_ELEMENTS = 1024
SCAR_WARM_UP_INTERVALS = 2  # until the parts are of different ages


@dataclass(frozen=True)
class Formed:
    """What a method made of a failure.

    Attributes:
        state: where training goes on; None where the method advises against itself.
        reason: one sentence for people.
        seconds: opening the history, loading what was learned, forecasting, predicting and injecting.
        settings: of the forecast.
        learning_seconds: spent on learning at the checkpoints before, not in `seconds`.
    """

    state: State | None
    reason: str
    seconds: float = 0.0
    settings: dict[str, Any] | None = None
    learning_seconds: float = 0.0


def target_of(workload: Workload, failure: int) -> Target:
    """The failure as a predictor receives it."""
    return Target(failure, workload.times[failure], workload.peak_until(failure))


def form_predicted(
    method: str, trajectory: Trajectory, point: Point, checkpoint: State, part: LostPart | None = None
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
    trainer, predictor = trajectory.trainer(), PREDICTORS[method].make()
    started = time.perf_counter()
    history = trajectory.history(point.checkpoint, point.interval)
    if lessons.state is not None:
        predictor.load_state_dict(lessons.state)
    forecast = predictor.forecast(history, target_of(trajectory.workload, point.failure))
    state: State | None = None
    if forecast.feasible and PREDICTORS[method].guarded:
        forecast, state = _guarded(predictor, history, forecast, point, checkpoint, trainer, part)
    elif forecast.feasible:
        state = _applied(predictor, history, forecast, point, checkpoint, part)
    if state is not None:
        trainer.load(state)
    seconds = time.perf_counter() - started
    reason = forecast.reason
    if state is not None and not state.is_finite():
        state, reason = None, f"the predicted weights are not finite; {reason}"
    return Formed(state, reason, seconds, forecast.settings, lessons.seconds)


def _applied(
    predictor: StatePredictor,
    history: History,
    forecast: Forecast,
    point: Point,
    checkpoint: State,
    part: LostPart | None,
) -> State:
    """The state of a feasible forecast, exact outside of the lost part."""
    weights = {name: torch.empty_like(values) for name, values in checkpoint.weights.items()}
    for name, start, values in predictor.predict(history, forecast):
        weights[name][start : start + values.numel()] = values
    formed = replace(checkpoint, iteration=point.failure, weights=weights)
    return formed if part is None else part.complete(formed)


def _guarded(
    predictor: StatePredictor,
    history: History,
    forecast: Forecast,
    point: Point,
    checkpoint: State,
    trainer: Trainer,
    part: LostPart | None,
) -> tuple[Forecast, State | None]:
    """One prediction under the guard, as the product makes it in mode `auto`; the watch afterwards is not played."""
    charged = of_part(forecast, 1.0 if part is None else part.share)
    if charged.expected_end_cost_iterations + charged.expected_deviation_iterations >= point.horizon:
        return replace(forecast, reason=f"recomputing {point.horizon} iterations is safer; {forecast.reason}"), None
    guard = Guard()
    moved = measure(history, forecast, predictor.predict(history, forecast))
    limited = shorten(forecast, dict(zip(moved.operators, guard.limit(moved).tolist(), strict=True)))
    decision = guard.finite(moved)
    if not decision.accepted:
        return replace(forecast, reason=decision.reason), None
    before = trainer.probe(checkpoint, PROBE_BATCHES)
    for length in LENGTHS:
        tried = of_length(limited, length)
        state = _applied(predictor, history, tried, point, checkpoint, part)
        decision = guard.veto(before, trainer.probe(replace(state, iteration=checkpoint.iteration), PROBE_BATCHES))
        if decision.accepted:
            return replace(tried, reason=f"{tried.reason}; {decision.reason}"), state
    return replace(forecast, reason=decision.reason), None


def form_moved(trajectory: Trajectory, point: Point, checkpoint: State, failure: State) -> Formed:
    """The true state at the failure, moved as far as `line` moves the checkpoint's; None where that declines.

    It costs the horizon, which is recomputed first, and has nothing to do with the failure: any run could do it at any
    time. What `line` costs less than it is what the prediction itself saves.
    """
    moved = form_predicted(LINE, trajectory, point, checkpoint)
    if moved.state is None:
        return moved
    weights = {
        name: values + (moved.state.weights[name] - checkpoint.weights[name])
        for name, values in failure.weights.items()
    }
    return replace(moved, state=replace(failure, weights=weights))


def form_truth(failure: State) -> Formed:
    """The true state at the failure, as the oracle has it."""
    return Formed(failure, "the true state")


def form_twin(trajectory: Trajectory, point: Point, checkpoint: State) -> Formed:
    """The run as it would be at the failure with other batches since the checkpoint: its cost is chance."""
    trainer = trajectory.trainer()
    trainer.load(checkpoint)
    while trainer.iteration < point.failure:
        trainer.step(batches_of=trajectory.seed + OTHER_SEED)
    return Formed(trainer.state(), "trained to the failure on other batches")


def form_doubled(failure: State) -> Formed:
    """The true state at the failure with twice the `exp_avg_sq`: training goes on at a lower rate for a while."""
    doubled = {name: 2.0 * values for name, values in failure.moments["exp_avg_sq"].items()}
    return Formed(replace(failure, moments=failure.moments | {"exp_avg_sq": doubled}), "exp_avg_sq doubled")


def form_placebo(trajectory: Trajectory, point: Point, checkpoint: State) -> Formed:
    """The checkpoint, each tensor moved as far as `line` moves it, in a random direction; None where that declines."""
    moved = form_predicted(LINE, trajectory, point, checkpoint)
    if moved.state is None:
        return moved
    generator = torch.Generator().manual_seed(point.failure)
    weights = {}
    for name, values in checkpoint.weights.items():
        direction = torch.randn(values.shape, generator=generator)
        weights[name] = values + direction * ((moved.state.weights[name] - values).norm() / direction.norm())
    return replace(moved, state=replace(moved.state, weights=weights), reason="a random direction, as far as the line")


def form_scar(trajectory: Trajectory, point: Point) -> Formed:
    """SCAR's running checkpoint at the failure: small parts are renewed often, those first that have moved most.

    It writes as many bytes as a whole checkpoint every interval: every 10 iterations the share of the blocks that has
    moved furthest since it was written. The moments go with the weights.

    Source: Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4 (priority checkpoints).
    """
    every = trajectory.workload.snapshot_iterations
    begin = max(0, point.checkpoint - SCAR_WARM_UP_INTERVALS * point.interval)
    trainer = trajectory.at(begin)
    saved = trainer.state()
    for at in range(begin + every, point.failure + 1, every):
        trajectory.advance(trainer, at)
        saved = _renewed(saved, trainer.state(), every / point.interval)
    return Formed(replace(saved, iteration=point.failure), "the running checkpoint")


def _renewed(saved: State, now: State, share: float) -> State:
    """The saved state with the blocks renewed whose weights have moved furthest, as many as the share allows."""
    moved = {
        name: torch.stack([part.norm() for part in torch.split(now.weights[name] - values, SCAR_BLOCK_ELEMENTS)])
        for name, values in saved.weights.items()
    }
    every = torch.cat(list(moved.values()))
    least = every.sort(descending=True).values[max(0, round(share * len(every)) - 1)]
    chosen = {
        name: (distances >= least).repeat_interleave(SCAR_BLOCK_ELEMENTS)[: saved.weights[name].numel()]
        for name, distances in moved.items()
    }

    def renewed(kept: Tensors, newest: Tensors) -> Tensors:
        return {name: torch.where(chosen[name], newest[name], values) for name, values in kept.items()}

    return replace(
        saved,
        weights=renewed(saved.weights, now.weights),
        moments={moment: renewed(values, now.moments[moment]) for moment, values in saved.moments.items()},
    )


def form_checkfree(failure: State, lost: Collection[str]) -> Formed:
    """The lost block as the weighted mean of those before and after it, without a checkpoint; None if it is no block.

    Each neighbour counts by its squared gradient norm, as its `exp_avg_sq` sums it up. The moments are formed likewise.

    Source: Blagoev et al., All is Not Lost: LLM Recovery without Checkpoints, Algorithm 1; there with the gradients of
    the last iteration.
    """
    if not all(BLOCK.match(name) for name in lost):
        return Formed(None, "what was lost is no block")
    beside = {side: {name: _beside(name, side) for name in lost} for side in (-1, 1)}
    norms = {
        side: sum(float(failure.moments["exp_avg_sq"][name].sum()) for name in names.values())
        for side, names in beside.items()
    }
    before = norms[-1] / sum(norms.values())

    def formed(values: Tensors) -> Tensors:
        means = {name: before * values[beside[-1][name]] + (1 - before) * values[beside[1][name]] for name in lost}
        return {**values, **means}

    moments = {moment: formed(values) for moment, values in failure.moments.items()}
    return Formed(replace(failure, weights=formed(failure.weights), moments=moments), "the mean of the neighbours")


def _beside(name: str, side: int) -> str:
    """The same parameter of the block so many further on."""
    return BLOCK.sub(lambda block: f"blocks.{int(block[1]) + side}.", name, count=1)
