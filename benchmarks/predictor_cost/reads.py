"""How much of a history a piece of work reads."""

from collections.abc import Sequence

import torch

from cpsr.predictor.protocol import History, HistoryEntry

__all__ = ["CountedHistory"]


class CountedHistory:
    """A history that counts what is read from it (a `History`).

    Attributes:
        values: weights read so far, twice where they were read twice.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self.values = 0

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """Those of the history."""
        return self._history.entries

    @property
    def operators(self) -> Sequence[str]:
        """Those of the history."""
        return self._history.operators

    def numel(self, operator: str) -> int:
        """As in the history."""
        return self._history.numel(operator)

    def taken_at(self, operator: str, entry: int) -> int:
        """As in the history."""
        return self._history.taken_at(operator, entry)

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """What the history returns, counted."""
        self.values += stop - start
        return self._history.read(operator, entry, start, stop)
