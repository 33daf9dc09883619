"""The predictor among the ranks: who learns from a replicated operator, and collectives that make all predict alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cpsr.checkpoint.saved import fingerprint
from cpsr.experts.sharding import adaptive_sharding
from cpsr.predictor.protocol import Ranks
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["Exchange"]


class Exchange(Ranks):
    """The predictor's collectives over a group; to make one is a collective.

    Operators are replicated where every rank of the data-parallel group has the same slice of each (ZeRO-0, DDP). Each
    of these ranks then learns from about as many bytes of weights. Elsewhere a rank learns from all of its own.

    Args:
        group: all ranks.
        shard: of this rank.
        data_parallel_ranks: the group of this rank, itself included.
    """

    def __init__(self, group: Group, shard: Shard, data_parallel_ranks: Sequence[int]) -> None:
        self._group = group
        self.trains = group.rank == 0
        self._owners: dict[str, int] = {}
        members = tuple(sorted(data_parallel_ranks))
        identities = group.gather([members, fingerprint(shard.operators.values())])
        if len(members) > 1 and all(identities[member] == identities[group.rank] for member in members):
            sizes = {name: one.parameter.values.nbytes for name, one in sorted(shard.operators.items())}
            shared_out = adaptive_sharding(sizes, [0] * len(members))
            self._owners = {name: member for member, part in zip(members, shared_out, strict=True) for name in part}
        own = {name: [one.parameter.offset, one.parameter.numel] for name, one in shard.operators.items()}
        parts: list[dict[str, list[int]]] = group.gather(own)
        self._holders = {name: sum(part.get(name) == piece for part in parts) for name, piece in own.items()}

    def is_mine(self, operator: str) -> bool:
        """Whether this rank learns from that operator."""
        return self._owners.get(operator, self._group.rank) == self._group.rank

    def portion(self, operator: str) -> float:
        """What this rank's products count for in `reduce`, so that each element counts once.

        It is the same for all elements of an operator, wherever a mesh of ranks replicates it.
        """
        return 1.0 if self._owners else 1.0 / self._holders.get(operator, 1)

    def agree(self, entries: Sequence[int]) -> Sequence[int]:
        """History entries that any rank must leave out, so that all predict from the same ones."""
        return sorted({entry for part in self._group.gather(list(entries)) for entry in part})

    def reduce(self, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum float64 matrices by operator over the ranks that have one; returns those of all operators.

        Raises:
            ValueError: ranks have matrices of different sizes for one operator (on every rank).
        """
        parts: list[dict[str, int]] = self._group.gather({name: len(matrix) for name, matrix in products.items()})
        sizes = {name: size for part in parts for name, size in part.items()}
        for name, size in sizes.items():
            found = {part.get(name, size) for part in parts}
            if len(found) > 1:
                raise ValueError(f"'{name}' has {sorted(found)} differences on different ranks: their histories differ")
        if not sizes:
            return {}
        nothing = torch.zeros(max(sizes.values()) ** 2, dtype=torch.float64, device="cpu")
        own = [products[name].reshape(-1) if name in products else nothing[: size**2] for name, size in sizes.items()]
        summed = torch.split(self._group.reduce(torch.cat(own)), [size**2 for size in sizes.values()])
        return {name: one.view(size, size) for (name, size), one in zip(sizes.items(), summed, strict=True)}

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank: plain data, or a tensor that has the same shape everywhere."""
        if not isinstance(value, torch.Tensor):
            return self._group.broadcast(value)
        return self._group.reduce(value.clone() if self._group.rank == 0 else torch.zeros_like(value))
