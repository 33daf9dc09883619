"""Published ways to come back from the loss of a part of the state: SCAR and CheckFree."""

from collections.abc import Collection
from dataclasses import replace

import torch

from cpsr.benchmarks.recovery.failure import Failure, Formed
from cpsr.benchmarks.recovery.lost import BLOCK
from cpsr.benchmarks.recovery.trainer import State, Tensors

__all__ = ["checkfree", "scar"]

SCAR_BLOCK_ELEMENTS = 1024
SCAR_WARM_UP_INTERVALS = 2  # until the parts are of different ages


def scar(failure: Failure) -> Formed:
    """SCAR's running checkpoint at the failure: small parts are renewed often, those first that have moved most.

    It writes as many bytes as a whole checkpoint every interval: every 10 iterations the share of the blocks that has
    moved furthest since it was written. The moments go with the weights.

    Source: Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4 (priority checkpoints).
    """
    trajectory, point = failure.trajectory, failure.point
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

    def renewed(kept: Tensors, newest: Tensors) -> Tensors:
        chosen = {name: (moved[name] >= least).repeat_interleave(SCAR_BLOCK_ELEMENTS) for name in kept}
        return {
            name: torch.where(chosen[name][: values.numel()], newest[name], values) for name, values in kept.items()
        }

    return replace(
        saved,
        weights=renewed(saved.weights, now.weights),
        moments={moment: renewed(values, now.moments[moment]) for moment, values in saved.moments.items()},
    )


def checkfree(failure: Failure) -> Formed:
    """The lost block as the weighted mean of those before and after it, without a checkpoint; None if it is no block.

    Each neighbour counts by its squared gradient norm, as its `exp_avg_sq` sums it up. The moments are formed likewise.

    Source: Blagoev et al., All is Not Lost: LLM Recovery without Checkpoints, Algorithm 1; there with the gradients of
    the last iteration.
    """
    lost: Collection[str] = failure.part.spans
    if not all(BLOCK.match(name) for name in lost):
        return Formed(None, "what was lost is no block")

    def beside(name: str, side: int) -> str:
        return BLOCK.sub(lambda block: f"blocks.{int(block[1]) + side}.", name, count=1)

    squares = failure.exact.moments["exp_avg_sq"]
    norms = {side: sum(float(squares[beside(name, side)].sum()) for name in lost) for side in (-1, 1)}
    before = norms[-1] / sum(norms.values())

    def formed(values: Tensors) -> Tensors:
        means = {name: before * values[beside(name, -1)] + (1 - before) * values[beside(name, 1)] for name in lost}
        return {**values, **means}

    moments = {moment: formed(values) for moment, values in failure.exact.moments.items()}
    state = replace(failure.exact, weights=formed(failure.exact.weights), moments=moments)
    return Formed(state, "the mean of the neighbours")
