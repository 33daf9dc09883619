"""Experts that have lost tokens, until later tokens make up for them."""

from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import PerExpert, per_expert, zeros

__all__ = ["Recovering"]


class Recovering:
    """Which experts take more tokens than others, and for how long.

    While its capacity is raised by a fraction, an expert is assumed to process that fraction more. Its loss is made up
    when this fraction of the tokens routed to it since then equals the lost tokens.

    Args:
        layers: of the model.
        fraction: by which capacity is raised, the paper's 10% by default; 0: nothing recovers.

    Source: moetion, section 6, "Resuming Training from Failures".
    """

    def __init__(self, layers: Sequence[ExpertLayer], fraction: float = 0.1) -> None:
        self._layers = layers
        self._fraction = fraction
        self._missing = zeros(layers)

    @property
    def missing(self) -> PerExpert:
        """Tokens that are still to be made up."""
        return self._missing

    @property
    def in_layers(self) -> tuple[bool, ...]:
        """For each layer, whether one of its experts recovers."""
        return tuple(bool(layer.any()) for layer in self._missing)

    def lost(self, tokens: Sequence[ArrayLike]) -> None:
        """Add one failure: for each layer, `(experts,)` tokens."""
        if self._fraction > 0:
            more = per_expert(self._layers, tokens, "lost tokens")
            self._missing = tuple(old + new for old, new in zip(self._missing, more, strict=True))

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the tokens routed since then: for each layer, `(experts,)`."""
        routed = per_expert(self._layers, tokens, "tokens")
        self._missing = tuple(
            numpy.maximum(old - self._fraction * new, 0.0) for old, new in zip(self._missing, routed, strict=True)
        )

    def state_dict(self) -> list[list[float]]:
        """Missing tokens, layer by layer."""
        return [layer.tolist() for layer in self._missing]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        missing = per_expert(self._layers, state, "tokens to make up")
        self._missing = missing if self._fraction > 0 else zeros(self._layers)
