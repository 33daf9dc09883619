"""Tokens that a failure now would take from each expert."""

from collections.abc import Iterable, Sequence

import numpy
from numpy.typing import ArrayLike

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import PerExpert, per_expert, zeros

__all__ = ["UnsavedTokens"]


class UnsavedTokens:
    """What was routed to each expert since its last snapshot, for one place where snapshots are kept.

    Host memory, peers and disk hold different snapshots: each has a ledger of its own.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._tokens = zeros(layers)
        self._at_snapshot = zeros(layers)
        self._ages = zeros(layers)

    @property
    def tokens(self) -> PerExpert:
        """Since each expert's last snapshot until now: lost where training goes on from the failure."""
        return self._tokens

    @property
    def tokens_at_snapshot(self) -> PerExpert:
        """The same, until the last snapshot: lost where training goes back to it and repeats what came after."""
        return self._at_snapshot

    @property
    def ages(self) -> PerExpert:
        """Snapshots since each expert's last one."""
        return self._ages

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the tokens of one iteration: for each layer, `(experts,)`."""
        new = per_expert(self._layers, tokens, "tokens")
        self._tokens = tuple(old + more for old, more in zip(self._tokens, new, strict=True))

    def saved(self, experts: Iterable[Expert]) -> None:
        """Take note of one snapshot, which holds these experts.

        Raises:
            ValueError: there is no such expert; nothing was noted.
        """
        marks = tuple(numpy.zeros(layer.experts, dtype=bool) for layer in self._layers)
        for expert in experts:
            if not (0 <= expert.layer < len(marks) and 0 <= expert.index < marks[expert.layer].size):
                raise ValueError(f"the model has no {expert}")
            marks[expert.layer][expert.index] = True
        self._tokens = tuple(numpy.where(mark, 0.0, old) for mark, old in zip(marks, self._tokens, strict=True))
        self._ages = tuple(numpy.where(mark, 0.0, age + 1) for mark, age in zip(marks, self._ages, strict=True))
        self._at_snapshot = self._tokens

    def restored(self) -> None:
        """Take note of a recovery: every expert is what its snapshot holds, and nothing is unsaved."""
        self._tokens = self._at_snapshot = zeros(self._layers)
