"""CheckFree: a lost pipeline stage as the weighted mean of its neighbours, without any checkpoint."""

import re
from collections.abc import Collection
from dataclasses import replace

from cpsr.benchmarks.recovery.trainer import State, Tensors

__all__ = ["mean_of_neighbours"]

BLOCK = re.compile(r"(blocks\.)(\d+)(\..*)")


def mean_of_neighbours(survived: State, lost: Collection[str]) -> State | None:
    """The state at the failure with the lost block made of the blocks before and after it; None if it is no block.

    Each neighbour counts by its squared gradient norm, as its `exp_avg_sq` sums it up. The moments are formed likewise.

    Source: Blagoev et al., All is Not Lost: LLM Recovery without Checkpoints, Algorithm 1; there with the gradients of
    the last iteration.
    """
    matches = {name: BLOCK.fullmatch(name) for name in lost}
    if not all(matches.values()):
        return None
    beside = {
        side: {name: f"{match[1]}{int(match[2]) + side}{match[3]}" for name, match in matches.items() if match}
        for side in (-1, 1)
    }
    norms = {
        side: sum(float(survived.exp_avg_sq[name].sum()) for name in names.values()) for side, names in beside.items()
    }
    before = norms[-1] / sum(norms.values())

    def formed(values: Tensors) -> Tensors:
        means = {name: before * values[beside[-1][name]] + (1 - before) * values[beside[1][name]] for name in lost}
        return {**values, **means}

    return replace(
        survived,
        weights=formed(survived.weights),
        exp_avg=formed(survived.exp_avg),
        exp_avg_sq=formed(survived.exp_avg_sq),
    )
