"""What sparse snapshots have saved of one rank, in memory: operators of different ages."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cpsr.state.shard import OperatorState, Shard

__all__ = ["Saved"]


class Saved:
    """The newest snapshot of every operator.

    Args:
        shard: saved whole, to begin with.
        iteration: when.
        scalars: counters and step counts then.

    Attributes:
        iteration: of the newest checkpoint.
        scalars: of the newest checkpoint.
        operators: their names.
    """

    def __init__(self, shard: Shard, iteration: int, scalars: Any) -> None:
        self.operators = tuple(shard.operators)
        self._taken: dict[str, int] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self.save(shard, self.operators, iteration, scalars)

    def save(self, shard: Shard, names: Iterable[str], iteration: int, scalars: Any) -> None:
        """Copy these operators."""
        self.iteration, self.scalars = iteration, scalars
        for name in names:
            operator = shard.operators[name]
            self._taken[name] = iteration
            self._weights[name] = operator.parameter.values.clone()
            self._moments[name] = {key: moment.clone() for key, moment in operator.moments.items()}

    def fork(self) -> "Saved":
        """The same, which goes its own way from here; tensors are shared, since none is ever changed."""
        other = copy.copy(self)
        other._taken, other._weights, other._moments = dict(self._taken), dict(self._weights), dict(self._moments)
        return other

    def put_back(self, shard: Shard) -> None:
        """Write the newest state of every operator into the engine's views."""
        for name, operator in shard.operators.items():
            operator.parameter.values.copy_(self._weights[name])
            _put_back_moments(operator, self._moments[name])

    def newest(self, operator: str) -> int:
        """Iteration of an operator's newest snapshot."""
        return self._taken[operator]


def _put_back_moments(operator: OperatorState, moments: Mapping[str, torch.Tensor]) -> None:
    for key, moment in moments.items():
        operator.moments[key].copy_(moment)
