"""Which rank writes what several ranks of a data-parallel group hold alike (ADPS)."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cpsr.checkpoint.loading import operator_record
from cpsr.checkpoint.shared import Shared
from cpsr.experts.sharding import adaptive_sharding
from cpsr.group import Group
from cpsr.state import OperatorState, Shard

__all__ = ["Holding", "WriteSharing"]

# Shares of one life: as many as there are ways in which the experts of a checkpoint lie on ranks, few where they take
# turns; one takes 5 ms for 3000 operators.
_REMEMBERED_SHARES = 64


@dataclass(frozen=True)
class Holding:
    """What one rank holds.

    Attributes:
        rest: hash of what describes its operators but for experts' parameters.
        units: expert -> hash of what describes its parameters, and their bytes.
    """

    rest: str
    units: Mapping[str, tuple[str, int]]

    @staticmethod
    def of(shard: Shard, units: Mapping[str, str]) -> "Holding":
        """What a shard holds; `units` as for `WriteSharing.of`."""
        parameters: dict[str, list[OperatorState]] = {}
        for name, unit in units.items():
            parameters.setdefault(unit, []).append(shard.operators[name])
        described = {unit: (_hash(ones), sum(one.state_bytes for one in ones)) for unit, ones in parameters.items()}
        return Holding(_hash(one for name, one in shard.operators.items() if name not in units), described)


class _Owner(NamedTuple):
    """The rank that writes an expert, and how many hold it."""

    rank: int
    holders: int


class WriteSharing:
    """Shares out what ranks hold alike over those that hold it, for each checkpoint anew.

    Alike is, by its description, what ranks of one data-parallel group hold in the same slices: everything with ZeRO-0
    and DDP; with experts that ranks share, everything but those, and each expert on the ranks that replicate it.
    Whether it is alike in truth is seen at each commit (`cpsr.checkpoint.shared`). An expert is always written by the
    same rank, which can so carry it along; the rest is shared out by what experts each rank has to write.

    Made by `of`.

    Args:
        shard: what this rank holds.
        units: operator -> its expert, of experts' parameters alone.
        rank: this one.
        holdings: of the ranks of its data-parallel group, ascending.

    Attributes:
        share_bytes: what this rank writes of a checkpoint of everything, on average over such ranks.
        non_expert_share_bytes: of it, what is not of experts.

    Source: pec, section 3.2 (equal sharding of experts, adaptive sharding of the rest).
    """

    def __init__(self, shard: Shard, units: Mapping[str, str], rank: int, holdings: Mapping[int, Holding]) -> None:
        own, owners = holdings[rank], _owners(holdings)
        mine = {name: owners[unit, own.units[unit][0]] for name, unit in units.items()}
        self._rank = rank
        self._units = units
        self._ranks = tuple(other for other, held in holdings.items() if held.rest == own.rest)
        holders = {name: mine[name].holders if name in mine else len(self._ranks) for name in shard.operators}
        self._alike = {
            name: operator_record(one).described for name, one in shard.operators.items() if holders[name] > 1
        }
        self._expert_writers = {name: owner.rank for name, owner in mine.items() if owner.rank != rank}
        self._written = {
            other: {
                unit: size for unit, (described, size) in held.units.items() if owners[unit, described].rank == other
            }
            for other, held in holdings.items()
        }
        sizes = {name: shard.operators[name].state_bytes for name in self._alike if name not in units}
        # In this order they are shared out without being sorted again.
        self._sizes = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
        self._shares: dict[tuple[int, ...], dict[str, int]] = {}
        each = {name: one.state_bytes / holders[name] for name, one in shard.operators.items()}
        others = sum(values.nbytes for values in shard.others.values())
        self.non_expert_share_bytes = others + sum(size for name, size in each.items() if name not in units)
        self.share_bytes = others + sum(each.values())

    @staticmethod
    def of(
        shard: Shard, units: Mapping[str, str], data_parallel_ranks: Sequence[int], group: Group
    ) -> "WriteSharing | None":
        """Find out what ranks hold alike; a collective.

        Args:
            shard: what this rank holds.
            units: operator -> its expert, by the same name on all ranks; of experts' parameters alone.
            data_parallel_ranks: this rank's group, itself included.
            group: all ranks.

        Returns:
            None where no rank of the job holds anything that another one holds too.
        """
        own = Holding.of(shard, units)
        told = group.gather([own.rest, own.units])
        members = sorted(data_parallel_ranks)
        holdings = {
            rank: Holding(told[rank][0], {unit: tuple(one) for unit, one in told[rank][1].items()}) for rank in members
        }
        found = WriteSharing(shard, units, group.rank, holdings)
        return None if group.all(not found._alike) else found

    def shared(self, chosen: Collection[str] | None) -> Shared:
        """Who writes what in a checkpoint; the same word on all ranks, without asking them.

        Args:
            chosen: experts that it saves; None: all.
        """
        loads = tuple(self._load(rank, chosen) for rank in self._ranks)
        if loads not in self._shares:
            if len(self._shares) >= _REMEMBERED_SHARES:
                self._shares.clear()
            self._shares[loads] = self._others_share(loads)
        carried = (name for name in self._expert_writers if chosen is not None and self._units[name] not in chosen)
        return Shared(self._alike, self._shares[loads] | self._expert_writers, frozenset(carried))

    def _load(self, rank: int, chosen: Collection[str] | None) -> int:
        """Bytes of experts that a rank writes."""
        return sum(size for unit, size in self._written[rank].items() if chosen is None or unit in chosen)

    def _others_share(self, loads: Sequence[int]) -> dict[str, int]:
        parts = adaptive_sharding(self._sizes, loads).parts
        shares = zip(self._ranks, parts, strict=True)
        return {name: rank for rank, part in shares if rank != self._rank for name in part}


def _owners(holdings: Mapping[int, Holding]) -> dict[tuple[str, str], _Owner]:
    """Expert and what describes it -> who writes it: those that hold it, in turn."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, held in holdings.items():
        for unit, (described, _) in held.units.items():
            holders.setdefault((unit, described), []).append(rank)
    turns: Counter[tuple[int, ...]] = Counter()
    found: dict[tuple[str, str], _Owner] = {}
    for expert, ranks in sorted(holders.items()):
        found[expert] = _Owner(ranks[turns[tuple(ranks)] % len(ranks)], len(ranks))
        turns[tuple(ranks)] += 1
    return found


def _hash(operators: Iterable[OperatorState]) -> str:
    described = {one.name: operator_record(one).described.model_dump() for one in operators}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
