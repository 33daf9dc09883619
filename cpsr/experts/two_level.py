"""More experts in a snapshot than on the disk."""

from collections.abc import Iterable, Sequence

import numpy

from cpsr.experts.layers import ExpertLayer
from cpsr.experts.operators import Expert
from cpsr.experts.popularity import Popularity

__all__ = ["copied_with"]


def copied_with(
    persisted: Iterable[Expert], layers: Sequence[ExpertLayer], in_memory: Popularity, overlapped_bytes: float
) -> frozenset[Expert]:
    """Experts to copy to host memory: those that go on to the disk, and as many more as an iteration overlaps.

    Of the others each rank takes those with the most tokens that host memory does not have, then those that are oldest
    there, while they fit. What goes to the disk is always among the copied, also where it alone takes longer. The paper
    chooses the other way round, first what is copied and of that what is persisted; so its K of the disk may change the
    turns in which experts come there, and here nothing does.

    Args:
        persisted: what a policy has selected for the disk, of all ranks.
        layers: of the model.
        in_memory: popularity by what host memory holds.
        overlapped_bytes: of experts, that each rank copies while one iteration runs.

    Source: pec, section 3.2, "Two-level PEC Saving and Recovery"; moetion, section 4.2.
    """
    copied = set(persisted)
    left: dict[int, float] = {}  # by rank
    for expert in copied:
        layer = layers[expert.layer]
        rank = layer.owner(expert.index)
        left[rank] = left.get(rank, overlapped_bytes) - layer.expert_bytes
    tokens, ages = in_memory.at_risk(layers)
    experts = [Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)]
    for place in numpy.lexsort((-ages, -tokens)).tolist():
        expert, layer = experts[place], layers[experts[place].layer]
        rank = layer.owner(expert.index)
        if expert not in copied and layer.expert_bytes <= left.get(rank, overlapped_bytes):
            copied.add(expert)
            left[rank] = left.get(rank, overlapped_bytes) - layer.expert_bytes
    return frozenset(copied)
