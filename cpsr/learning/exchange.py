"""Collectives that make all ranks predict alike: damaged checkpoints, products of slices, rank 0's network."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["Exchange"]


class Exchange:
    """The predictor's collectives over a group; every rank calls them equally often and in the same order."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._holders: dict[str, int] = {}

    def open(self, group: Group) -> None:
        """Use this group from now on; before, this rank is alone."""
        self._group = group

    def count_holders(self, shard: Shard) -> None:
        """Find out how many ranks own the same elements as this one, of each operator."""
        if self._group is None:
            return
        own = {name: [one.parameter.offset, one.parameter.numel] for name, one in shard.operators.items()}
        parts: list[dict[str, list[int]]] = self._group.gather(own)
        self._holders = {name: sum(part.get(name) == piece for part in parts) for name, piece in own.items()}

    def portion(self, operator: str) -> float:
        """What this rank's products count for in `reduce`, so that each element counts once; 1 before `count_holders`.

        It is the same for all elements of an operator, wherever a mesh of ranks replicates it.
        """
        return 1.0 / self._holders.get(operator, 1)

    def agree(self, entries: Sequence[int]) -> Sequence[int]:
        """History entries that any rank must leave out, so that all predict from the same ones."""
        if self._group is None:
            return entries
        return sorted({entry for part in self._group.gather(list(entries)) for entry in part})

    def reduce(self, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum float64 matrices by operator over the ranks that have one; returns those of all operators.

        Raises:
            ValueError: ranks have matrices of different sizes for one operator (on every rank).
        """
        if self._group is None:
            return dict(products)
        sizes: dict[str, set[int]] = {}
        for part in self._group.gather({name: len(matrix) for name, matrix in products.items()}):
            for name, size in part.items():
                sizes.setdefault(name, set()).add(size)
        for name, found in sizes.items():
            if len(found) > 1:
                raise ValueError(f"'{name}' has {sorted(found)} differences on different ranks: their histories differ")
        shapes = {name: (size, size) for name in sorted(sizes) for size in sizes[name]}
        everything = [
            products.get(name, torch.zeros(shape, dtype=torch.float64, device="cpu")).reshape(-1)
            for name, shape in shapes.items()
        ]
        if not everything:
            return {}
        total = self._group.reduce(torch.cat(everything))
        parts = torch.split(total, [rows * columns for rows, columns in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def broadcast(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's numbers and tensors, on every rank; tensors have the same shapes everywhere."""
        if self._group is None:
            return shared
        plain = {name: value for name, value in shared.items() if not isinstance(value, torch.Tensor)}
        tensors = {name: value for name, value in shared.items() if isinstance(value, torch.Tensor)}
        numbers: dict[str, Any] = self._group.broadcast(plain)
        return {**numbers, **{name: self._from_first(value) for name, value in tensors.items()}}

    def _from_first(self, value: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        return self._group.reduce(value.clone() if self._group.rank == 0 else torch.zeros_like(value))
