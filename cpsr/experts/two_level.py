"""More experts in a snapshot than on the disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.operators import Expert, Operator
from cpsr.experts.policy import Policy
from cpsr.experts.popularity import PerExpert, Popularity

__all__ = ["TwoLevel", "TwoLevelSelection", "lost_in_two_levels"]


@dataclass(frozen=True)
class TwoLevelSelection:
    """What a step saves.

    Attributes:
        snapshot: to host memory.
        persisted: of it, to the disk.
    """

    snapshot: tuple[Operator, ...]
    persisted: tuple[Expert, ...]


class TwoLevel:
    """As many experts to host memory as a step overlaps, of which K of each layer go on to the disk.

    Persisted are those of the snapshot with the most tokens that the disk does not have, then those that are oldest
    there. So every expert that snapshots come back to is persisted in the end.

    Args:
        layers: of the model.
        snapshot: selects what goes to host memory; by bytes it takes as many as one iteration overlaps.
        persisted_per_layer: K of the disk; the paper's advice is 1.

    Raises:
        ConfigError: K is below 1.

    Source: pec, section 3.2, "Two-level PEC Saving and Recovery".
    """

    def __init__(self, layers: Sequence[ExpertLayer], snapshot: Policy, persisted_per_layer: int = 1) -> None:
        if persisted_per_layer < 1:
            raise ConfigError(f"at least 1 expert of each layer goes to the disk, not {persisted_per_layer}")
        self._layers = layers
        self._snapshot = snapshot
        self._count = persisted_per_layer

    def select(self, step: int, snapshot: Popularity, persisted: Popularity, budget: Budget) -> TwoLevelSelection:
        """Both sets.

        Args:
            step: number of the snapshot.
            snapshot: popularity by what host memory holds.
            persisted: popularity by what the disk holds.
            budget: of the snapshot.
        """
        chosen = tuple(self._snapshot.select(step, snapshot, budget))
        candidates = set(chosen)
        kept: list[Expert] = []
        for place in range(len(self._layers)):
            ordered = (Expert(place, index) for index in persisted.most_at_risk_first(place))
            kept += [expert for expert in ordered if expert in candidates][: self._count]
        return TwoLevelSelection(chosen, tuple(kept))


def lost_in_two_levels(
    layers: Sequence[ExpertLayer], snapshot: PerExpert, persisted: PerExpert, failed_ranks: Collection[int]
) -> PerExpert:
    """Tokens that a failure takes from each expert: from the disk on ranks that failed, from host memory on others.

    Args:
        layers: of the model.
        snapshot: for each layer, `(experts,)`: tokens that host memory does not have.
        persisted: the same, of the disk.
        failed_ranks: of the expert-parallel group, whose host memory is gone.
    """
    lost = []
    for layer, in_memory, on_disk in zip(layers, snapshot, persisted, strict=True):
        gone = [layer.owner(index) in failed_ranks for index in range(layer.experts)]
        lost.append(numpy.where(gone, on_disk, in_memory))
    return tuple(lost)
