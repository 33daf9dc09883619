"""What is known of the experts' load when a policy selects."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.experts.layers import ExpertLayer

__all__ = ["PerExpert", "Popularity", "per_expert", "shares", "zeros"]

# One array `(experts,)` of float64 for each layer of experts.
PerExpert = tuple[NDArray[numpy.float64], ...]


@dataclass(frozen=True)
class Popularity:
    """The experts' load, alike on all ranks.

    Attributes:
        scores: how popular each expert is, by any of the measures.
        unsaved_tokens: routed to each expert since its last snapshot.
        ages: snapshots since each expert's last one; older ones go first where the tokens are equal, so that experts
            to which nothing is routed have their turn too.
    """

    scores: PerExpert
    unsaved_tokens: PerExpert
    ages: PerExpert

    def most_at_risk_first(self, layer: int) -> list[int]:
        """Indices of a layer's experts: most unsaved tokens first, then oldest snapshot, then lowest index."""
        order = numpy.lexsort((-self.ages[layer], -self.unsaved_tokens[layer]))
        return [int(index) for index in order]


def per_expert(layers: Sequence[ExpertLayer], values: Sequence[ArrayLike], what: str) -> PerExpert:
    """One number for each expert, checked against the layers.

    Args:
        layers: of the model.
        values: for each layer, `(experts,)`.
        what: the numbers are, for the message.

    Raises:
        ValueError: layers or experts are missing, or a number is negative or not finite.
    """
    if len(values) != len(layers):
        raise ValueError(f"{what} of {len(values)} layers were given, and the model has {len(layers)}")
    arrays = tuple(numpy.array(value, dtype=numpy.float64) for value in values)
    for layer, array in zip(layers, arrays, strict=True):
        if array.shape != (layer.experts,):
            raise ValueError(f"{what} of layer {layer.name!r} have shape {array.shape}, not ({layer.experts},)")
        if not numpy.isfinite(array).all() or (array < 0).any():
            raise ValueError(f"{what} of layer {layer.name!r} must be finite and not negative: {array}")
    return arrays


def zeros(layers: Sequence[ExpertLayer]) -> PerExpert:
    """Nothing yet, of any expert."""
    return tuple(numpy.zeros(layer.experts) for layer in layers)


def shares(scores: PerExpert) -> PerExpert:
    """Each expert's part of its layer; equal parts where the whole layer has nothing."""
    found = []
    for layer in scores:
        total = layer.sum()
        found.append(layer / total if total > 0 else numpy.full(layer.shape, 1 / layer.size))
    return tuple(found)
