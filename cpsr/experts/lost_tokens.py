"""Tokens whose updates experts lost permanently in failures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import per_expert, zeros

__all__ = ["HARMLESS_MEAN_FRACTION", "HARMLESS_PORTION", "LostTokens", "MomentaryLoss"]

# Portion of lost tokens up to which the final loss equals that without failures (pec, Fig. 2).
HARMLESS_PORTION = 0.075
# The same as a fraction dropped in every layer (moetion, Table 1).
HARMLESS_MEAN_FRACTION = 0.03


@dataclass(frozen=True)
class MomentaryLoss:
    """Fractions of tokens lost, over the layers.

    Attributes:
        total: their sum, which grows with the number of layers (moetion, Eq. 6).
        mean: per layer, which is what the paper's Table 1 varies and its limit of 3% holds for.
    """

    total: float
    mean: float


class LostTokens:
    """Account of one run's failures.

    Lost tokens are compared with `assigned`: for each layer, input tokens times experts per token (T x TopK) over the
    training, each iteration once even if it was repeated. It includes tokens that experts dropped for lack of capacity.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._lost = zeros(layers)
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures so far."""
        return self._failures

    def add(self, lost: Sequence[ArrayLike]) -> None:
        """Add one failure: for each layer, `(experts,)` tokens that were not made up."""
        new = per_expert(self._layers, lost, "lost tokens")
        self._lost = tuple(old + more for old, more in zip(self._lost, new, strict=True))
        self._failures += 1

    def state_dict(self) -> dict[str, Any]:
        """Failures, and the tokens that each expert has lost by them, layer by layer."""
        return {"failures": self._failures, "lost": [layer.tolist() for layer in self._lost]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        self._lost = per_expert(self._layers, state["lost"], "lost tokens")
        self._failures = state["failures"]

    def by_layer(self, assigned: Sequence[float]) -> NDArray[numpy.float64]:
        """Fraction of each layer's tokens that was lost, `(layers,)`.

        Raises:
            ValueError: more was lost than assigned, or `assigned` is not finite or does not fit the layers.
        """
        lost, whole = self._compared(assigned)
        return numpy.divide(lost, whole, out=numpy.zeros_like(lost), where=whole > 0)

    def portion(self, assigned: Sequence[float]) -> float:
        """Portion of lost tokens: those of all failures and layers, over those assigned in all layers.

        0 before anything was assigned.

        Raises:
            ValueError: as `by_layer`.

        Source: pec, Eq. 4.
        """
        lost, whole = self._compared(assigned)
        return float(lost.sum() / whole.sum()) if whole.any() else 0.0

    def momentary(self, assigned: Sequence[float]) -> MomentaryLoss:
        """Sum and mean of the layers' fractions.

        Raises:
            ValueError: as `by_layer`.

        Source: moetion, Eq. 6.
        """
        fractions = self.by_layer(assigned)
        total = float(fractions.sum())
        return MomentaryLoss(total, total / len(fractions) if len(fractions) else 0.0)

    def is_harmless(self, assigned: Sequence[float]) -> bool:
        """Whether the loss is within what either paper found without effect on the final loss.

        Raises:
            ValueError: as `by_layer`.
        """
        mean = self.momentary(assigned).mean
        return self.portion(assigned) <= HARMLESS_PORTION and mean <= HARMLESS_MEAN_FRACTION

    def _compared(self, assigned: Sequence[float]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        whole = numpy.asarray(assigned, dtype=numpy.float64)
        lost = numpy.array([layer.sum() for layer in self._lost])
        if whole.shape != lost.shape:
            raise ValueError(f"assigned tokens of {whole.size} layers were given, and the model has {lost.size}")
        if not numpy.isfinite(whole).all():
            raise ValueError(f"assigned tokens of layers must be finite: {whole}")
        if not (lost <= whole).all():
            raise ValueError(f"layers lost {lost} of {whole} tokens: `assigned` is of the whole run, T x TopK a layer")
        return lost, whole
