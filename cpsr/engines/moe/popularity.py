"""What is known of the experts' load when a policy selects."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.layers import ExpertLayer

__all__ = ["OVERDUE_ROUNDS", "PerExpert", "Popularity", "overdue", "per_expert", "shares", "zeros"]

# One array `(experts,)` of float64 for each layer of experts.
PerExpert = tuple[NDArray[numpy.float64], ...]

# An expert that was in no snapshot for as many rounds as this goes first, whatever its load; a round saves all experts
# of its layer once if they take turns. So about a sixteenth of the places at most go to it, and experts with more
# than a sixteenth of the mean tokens have their turn by their load before that.
OVERDUE_ROUNDS = 16


@dataclass(frozen=True)
class Popularity:
    """The experts' load, alike on all ranks.

    Attributes:
        scores: how popular each expert is, by any of the measures.
        unsaved_tokens: routed to each expert since its last snapshot.
        ages: snapshots since each expert's last one; older ones go first where the tokens are equal, and so does the
            oldest of a layer when it is `overdue`: experts to which little or nothing is routed have their turn too.
    """

    scores: PerExpert
    unsaved_tokens: PerExpert
    ages: PerExpert

    def at_risk(self, layers: Sequence[ExpertLayer]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Unsaved tokens and ages as policies read them, `(experts of all layers,)` each.

        Raises:
            ValueError: they are not of these layers, or a number is negative or not finite.
        """
        tokens = per_expert(layers, self.unsaved_tokens, "unsaved tokens")
        ages = per_expert(layers, self.ages, "ages")
        # The empty array is for a model without layers.
        return numpy.concatenate([*tokens, []]), numpy.concatenate([*ages, []])

    @cached_property
    def shares(self) -> NDArray[numpy.float64]:
        """Each expert's part of its layer by the scores, `(experts of all layers,)`.

        Raises:
            ValueError: a score is negative or not finite.
        """
        scores = numpy.concatenate([*self.scores, []])
        if not numpy.isfinite(scores).all() or (scores < 0).any():
            raise ValueError(f"scores must be finite and not negative: {scores}")
        return numpy.concatenate([*shares(self.scores), []])


def overdue(ages: NDArray[numpy.float64], rounds: ArrayLike) -> NDArray[numpy.bool_]:
    """Marks the expert of each row that goes first whatever its load: the oldest, after `OVERDUE_ROUNDS` rounds.

    One a row at most, so that popularity decides where the rest of a layer's places go.

    Args:
        ages: snapshots since each expert's last one, `(..., experts)`.
        rounds: snapshots in which all experts of a row would be saved once, `(...)`.
    """
    found = ages >= OVERDUE_ROUNDS * numpy.asarray(rounds)[..., None]
    found &= numpy.arange(ages.shape[-1]) == numpy.expand_dims(ages.argmax(axis=-1), -1)
    return found


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
