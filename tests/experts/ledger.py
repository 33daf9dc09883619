"""Tokens that a failure now would take from each expert, by plain bookkeeping."""

from collections.abc import Iterable, Sequence

import numpy
from numpy.typing import ArrayLike

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import zeros
from cpsr.experts.policies import Load


class Ledger:
    """What was routed to each expert since its last snapshot, and snapshots since then."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self.tokens, self.ages = zeros(layers), zeros(layers)

    @property
    def load(self) -> Load:
        """As a policy sees it, which goes by unsaved tokens."""
        tokens, ages = (tuple(layer.copy() for layer in of) for of in (self.tokens, self.ages))
        return Load(tokens, ages)

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        for layer, new in zip(self.tokens, tokens, strict=True):
            layer += numpy.asarray(new, dtype=numpy.float64)

    def saved(self, experts: Iterable[Expert]) -> None:
        for age in self.ages:
            age += 1
        for expert in experts:
            self.tokens[expert.layer][expert.index] = self.ages[expert.layer][expert.index] = 0
