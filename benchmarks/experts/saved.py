"""What sparse snapshots have saved of one rank, in memory: operators of different ages, and their past weights."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cpsr.predictor.protocol import HistoryEntry
from cpsr.state import OperatorState, Shard

__all__ = ["HISTORY_SPAN_ITERATIONS", "Saved"]

HISTORY_SPAN_ITERATIONS = 400  # as a checkpoint store keeps it by default


class Saved:
    """Newest state of every operator, and its weights at each of its snapshots (a `History`).

    Args:
        shard: saved whole, to begin with.
        entry: when.
        scalars: counters and step counts then.
    """

    def __init__(self, shard: Shard, entry: HistoryEntry, scalars: Any) -> None:
        self.entries: tuple[HistoryEntry, ...] = ()
        self.operators = tuple(shard.operators)
        # Operator -> its snapshots, oldest first: iteration and weights.
        self._weights: dict[str, tuple[tuple[int, torch.Tensor], ...]] = dict.fromkeys(self.operators, ())
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self.save(shard, self.operators, entry, scalars)

    def save(self, shard: Shard, names: Iterable[str], entry: HistoryEntry, scalars: Any) -> None:
        """Copy these operators."""
        self.scalars = scalars
        oldest = entry.iteration - HISTORY_SPAN_ITERATIONS
        self.entries = (*(one for one in self.entries if one.iteration >= oldest), entry)
        for name in names:
            operator = shard.operators[name]
            taken = (entry.iteration, operator.parameter.values.to(torch.float32, copy=True))
            self._weights[name] = (*self._needed(name), taken)
            self._moments[name] = {key: moment.clone() for key, moment in operator.moments.items()}

    def fork(self) -> "Saved":
        """The same, which goes its own way from here; tensors are shared, since none is ever changed."""
        other = copy.copy(self)
        other._weights, other._moments = dict(self._weights), dict(self._moments)
        return other

    def put_back(self, shard: Shard, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the newest state of every operator into the engine's views.

        Args:
            shard: of the engine.
            weights: in place of the newest ones.
        """
        for name, operator in shard.operators.items():
            operator.parameter.values.copy_(weights.get(name, self.newest_weights(name)))
            _put_back_moments(operator, self._moments[name])

    def newest(self, operator: str) -> int:
        """Iteration of an operator's newest snapshot."""
        return self._weights[operator][-1][0]

    def newest_weights(self, operator: str) -> torch.Tensor:
        """Of an operator's newest snapshot, of this rank's slice; not to be changed."""
        return self._weights[operator][-1][1]

    def numel(self, operator: str) -> int:
        """Elements of this rank's slice."""
        return self.newest_weights(operator).numel()

    def taken_at(self, operator: str, entry: int) -> int:
        """Iteration of the operator's newest snapshot at that entry."""
        return self._at(operator, entry)[0]

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` at that entry, a view."""
        return self._at(operator, entry)[1][start:stop]

    def _at(self, operator: str, entry: int) -> tuple[int, torch.Tensor]:
        last = self.entries[entry].iteration
        return next(one for one in reversed(self._weights[operator]) if one[0] <= last)

    def _needed(self, name: str) -> tuple[tuple[int, torch.Tensor], ...]:
        """Snapshots that an entry still refers to."""
        snapshots, first = self._weights[name], self.entries[0].iteration
        before = [place for place, (iteration, _) in enumerate(snapshots) if iteration <= first]
        return snapshots[before[-1] :] if before else snapshots


def _put_back_moments(operator: OperatorState, moments: Mapping[str, torch.Tensor]) -> None:
    for key, moment in moments.items():
        operator.moments[key].copy_(moment)
