"""SCAR: a running checkpoint of which small parts are renewed often, those first that have changed most."""

from dataclasses import replace

import torch

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.recovery.trajectory import Trajectory

__all__ = ["running_checkpoint"]

BLOCK_ELEMENTS = 1024
WARM_UP_INTERVALS = 2  # until the parts are of different ages


def running_checkpoint(trajectory: Trajectory, point: Point) -> State:
    """The running checkpoint at the failure, at the failure's place.

    It writes as many bytes as a whole checkpoint every interval: every 10 iterations the share of the blocks that has
    moved furthest since it was written. The moments go with the weights.

    Source: Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4 (priority checkpoints).
    """
    every = trajectory.workload.snapshot_iterations
    begin = max(0, point.checkpoint - WARM_UP_INTERVALS * point.interval)
    trainer = trajectory.at(begin)
    saved = trainer.state()
    for at in range(begin + every, point.failure + 1, every):
        trajectory.advance(trainer, at)
        saved = _renewed(saved, trainer.state(), every / point.interval)
    return replace(saved, iteration=point.failure)


def _renewed(saved: State, now: State, share: float) -> State:
    """The saved state with the blocks renewed whose weights have moved furthest, as many as the share allows."""
    moved = {
        name: torch.stack([part.norm() for part in torch.split(now.weights[name] - values, BLOCK_ELEMENTS)])
        for name, values in saved.weights.items()
    }
    every = torch.cat(list(moved.values()))
    least = every.sort(descending=True).values[max(0, round(share * len(every)) - 1)]
    chosen = {
        name: (distances >= least).repeat_interleave(BLOCK_ELEMENTS)[: saved.weights[name].numel()]
        for name, distances in moved.items()
    }

    def renewed(kept: Tensors, newest: Tensors) -> Tensors:
        return {name: torch.where(chosen[name], newest[name], values) for name, values in kept.items()}

    return replace(
        saved,
        weights=renewed(saved.weights, now.weights),
        moments={moment: renewed(values, now.moments[moment]) for moment, values in saved.moments.items()},
    )
