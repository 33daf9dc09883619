from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from cpsr.predictor.protocol import HistoryEntry

MakeHistory = Callable[..., "SeriesHistory"]


class SeriesHistory:
    """A history in memory: one mapping of tensors per checkpoint; notes the largest piece that is read."""

    def __init__(
        self,
        entries: Sequence[HistoryEntry],
        weights: Sequence[Mapping[str, torch.Tensor]],
        taken: Mapping[str, Sequence[int]] | None = None,
        widen: bool = False,
    ) -> None:
        self.entries = tuple(entries)
        self._weights = weights
        self._taken = dict(taken or {})
        self._widen = widen
        self.largest_piece = 0

    @property
    def operators(self) -> Sequence[str]:
        return list(self._weights[0]) if self._weights else []

    def numel(self, operator: str) -> int:
        return self._weights[0][operator].numel()

    def taken_at(self, operator: str, entry: int) -> int:
        return self._taken[operator][entry] if operator in self._taken else self.entries[entry].iteration

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        self.largest_piece = max(self.largest_piece, stop - start)
        piece = self._weights[entry][operator].flatten()[start:stop]
        return piece.float() if self._widen else piece


@pytest.fixture(scope="session")
def make_history() -> MakeHistory:
    """Build a history: `make_history(iterations, weights, learning_rate=1.0, taken=None, times=None, widen=False)`.

    `widen` reads weights stored in half precision as float32.
    """

    def make(
        iterations: Sequence[int],
        weights: Sequence[Mapping[str, torch.Tensor]],
        learning_rate: float = 1.0,
        taken: Mapping[str, Sequence[int]] | None = None,
        times: Sequence[float] | None = None,
        widen: bool = False,
    ) -> SeriesHistory:
        at = [i * learning_rate for i in iterations] if times is None else times
        entries = [HistoryEntry(i, time, learning_rate) for i, time in zip(iterations, at, strict=True)]
        return SeriesHistory(entries, weights, taken, widen)

    return make
