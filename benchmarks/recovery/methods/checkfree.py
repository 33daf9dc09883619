"""CheckFree: a lost pipeline stage as the weighted mean of its neighbours, without any checkpoint."""

from collections.abc import Collection
from dataclasses import replace

from cpsr.benchmarks.recovery.lost import BLOCK
from cpsr.benchmarks.recovery.trainer import State, Tensors

__all__ = ["mean_of_neighbours"]


def mean_of_neighbours(survived: State, lost: Collection[str]) -> State | None:
    """The state at the failure with the lost block made of the blocks before and after it; None if it is no block.

    Each neighbour counts by its squared gradient norm, as its `exp_avg_sq` sums it up. The moments are formed likewise.

    Source: Blagoev et al., All is Not Lost: LLM Recovery without Checkpoints, Algorithm 1; there with the gradients of
    the last iteration.
    """
    if not all(BLOCK.match(name) for name in lost):
        return None
    beside = {side: {name: _beside(name, side) for name in lost} for side in (-1, 1)}
    norms = {
        side: sum(float(survived.moments["exp_avg_sq"][name].sum()) for name in names.values())
        for side, names in beside.items()
    }
    before = norms[-1] / sum(norms.values())

    def formed(values: Tensors) -> Tensors:
        means = {name: before * values[beside[-1][name]] + (1 - before) * values[beside[1][name]] for name in lost}
        return {**values, **means}

    return replace(
        survived,
        weights=formed(survived.weights),
        moments={moment: formed(values) for moment, values in survived.moments.items()},
    )


def _beside(name: str, side: int) -> str:
    """The same parameter of the block so many further on."""
    return BLOCK.sub(lambda block: f"blocks.{int(block[1]) + side}.", name, count=1)
