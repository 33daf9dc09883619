"""Experts that are older than the last checkpoint, moved up to it."""

from typing import Any

import torch

from cpsr.benchmarks.experts.saved import Saved
from cpsr.benchmarks.experts.training import PEAK_LEARNING_RATE
from cpsr.predictor.protocol import StatePredictor, Target

__all__ = ["predicted"]


def predicted(predictor: StatePredictor, saved: Saved) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of all operators at the last checkpoint: as they were saved there, or predicted up to there.

    Returns:
        The weights, and how many stale operators were `predicted` and `held`, for want of snapshots of their own.
    """
    newest = saved.entries[-1]
    forecast = predictor.forecast(saved, Target(newest.iteration, newest.time, PEAK_LEARNING_RATE))
    weights = {name: torch.empty(saved.numel(name)) for name in saved.operators}
    for name, start, values in predictor.predict(saved, forecast):
        weights[name][start : start + values.numel()] = values
    stale = sum(saved.newest(name) < newest.iteration for name in saved.operators)
    held = int(forecast.settings["held_operators"])
    return weights, {"predicted": stale - held, "held": held}
