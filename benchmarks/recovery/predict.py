"""One prediction of a training state."""

from dataclasses import replace

import torch

from cpsr.benchmarks.recovery.lost import LostPart
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target

__all__ = ["applied", "in_random_direction", "predicted_state", "target_of"]


def target_of(workload: Workload, failure: int) -> Target:
    """The failure as a predictor receives it."""
    return Target(failure, workload.times[failure], workload.peak_until(failure))


def predicted_state(
    predictor: StatePredictor,
    history: History,
    workload: Workload,
    failure: int,
    checkpoint: State,
    part: LostPart | None = None,
) -> tuple[Forecast, State | None]:
    """The forecast, and the state that training goes on from; None where the forecast advises against itself.

    Args:
        predictor: as far as it has learned.
        history: up to the checkpoint.
        workload: whose schedule gives the times.
        failure: iteration at which the run is lost.
        checkpoint: the run's state at the last checkpoint; its moments are kept.
        part: that is lost; None: all.
    """
    forecast = predictor.forecast(history, target_of(workload, failure))
    return forecast, applied(predictor, history, forecast, failure, checkpoint, part) if forecast.feasible else None


def applied(
    predictor: StatePredictor,
    history: History,
    forecast: Forecast,
    failure: int,
    checkpoint: State,
    part: LostPart | None = None,
) -> State:
    """The state of a feasible forecast, exact outside of the lost part."""
    weights = {name: torch.empty_like(values) for name, values in checkpoint.weights.items()}
    for name, start, values in predictor.predict(history, forecast):
        weights[name][start : start + values.numel()] = values
    formed = replace(checkpoint, iteration=failure, weights=weights)
    return formed if part is None else part.complete(formed)


def in_random_direction(displacement: Tensors, generator: torch.Generator) -> Tensors:
    """Each tensor as long, in a random direction."""
    found = {}
    for name, values in displacement.items():
        direction = torch.randn(values.shape, generator=generator)
        found[name] = direction * (values.norm() / direction.norm())
    return found
