"""Which rank writes the operators that several ranks of a data-parallel group hold (ADPS)."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cpsr.checkpoint.manifest import OperatorRecord
from cpsr.checkpoint.saved import operator_record
from cpsr.experts.sharding import adaptive_sharding
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, Shard

__all__ = ["WriteAssignment"]

# Assignments of one life: as many as there are ways in which the experts of a checkpoint lie on ranks, few where they
# take turns; one takes 5 ms for 3000 operators.
_REMEMBERED_ASSIGNMENTS = 64


# What a rank holds of experts: expert -> hash of what describes its parameters, and their bytes.
_Experts = Mapping[str, tuple[str, int]]


class _Owner(NamedTuple):
    """The rank that writes an expert, and how many hold it."""

    rank: int
    holders: int


class WriteAssignment:
    """Assigns each replicated operator to one of the ranks that hold it, for each checkpoint anew; a collective.

    An operator is replicated if ranks of one data-parallel group describe the same slices of it: with ZeRO-0 and
    DDP everything; under expert parallelism everything but experts, and each expert on the ranks that have it. Each
    commit checks that the replicas are equal (`cpsr.checkpoint.replicated`). An expert is always written by the same
    rank, which can so carry it. The rest is balanced by the bytes of experts that each rank has to write.

    Args:
        shard: what this rank holds.
        units: operator -> its expert, by the same name on all ranks; of experts' parameters alone.
        data_parallel_ranks: this rank's group, itself included.
        group: all ranks.

    Attributes:
        replicated: operators of this rank that others hold, too, described.
        share_bytes: what this rank writes of a checkpoint of everything, on average over such ranks.
        non_expert_share_bytes: of it, what is not of experts.

    Source: pec, section 3.2 (equal sharding of experts, adaptive sharding of the rest).
    """

    def __init__(
        self, shard: Shard, units: Mapping[str, str], data_parallel_ranks: Sequence[int], group: Group
    ) -> None:
        parameters: dict[str, list[OperatorState]] = {}
        for name, unit in units.items():
            parameters.setdefault(unit, []).append(shard.operators[name])
        own = {unit: (_hash(ones), sum(one.state_bytes for one in ones)) for unit, ones in parameters.items()}
        rest = _hash(one for name, one in shard.operators.items() if name not in units)
        gathered = group.gather([rest, own])
        experts: dict[int, _Experts] = {
            rank: {unit: (described, size) for unit, (described, size) in gathered[rank][1].items()}
            for rank in sorted(data_parallel_ranks)
        }
        owners = _owners(experts)
        mine = {name: owners[unit, own[unit][0]] for name, unit in units.items()}
        self._rank = group.rank
        self._ranks = tuple(rank for rank in experts if gathered[rank][0] == rest)
        holders = {name: mine[name].holders if name in mine else len(self._ranks) for name in shard.operators}
        self.replicated: Mapping[str, OperatorRecord] = {
            name: _described(one) for name, one in shard.operators.items() if holders[name] > 1
        }
        self._expert_writers = {name: owner.rank for name, owner in mine.items() if owner.rank != group.rank}
        self._written = {
            rank: {unit: size for unit, (described, size) in held.items() if owners[unit, described].rank == rank}
            for rank, held in experts.items()
        }
        sizes = {name: shard.operators[name].state_bytes for name in self.replicated if name not in units}
        # In this order they are assigned without being sorted again.
        self._sizes = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
        self._assigned: dict[tuple[int, ...], dict[str, int]] = {}  # bytes of experts of each rank -> assignment
        each = {name: one.state_bytes / holders[name] for name, one in shard.operators.items()}
        others = sum(values.nbytes for values in shard.others.values())
        self.non_expert_share_bytes = others + sum(size for name, size in each.items() if name not in units)
        self.share_bytes = others + sum(each.values())

    def writers(self, chosen: Collection[str] | None) -> dict[str, int]:
        """Operators of this rank that another one writes -> that rank; consistent on all ranks, without a collective.

        Args:
            chosen: experts that it saves; None: all.
        """
        loads = tuple(
            sum(size for unit, size in self._written[rank].items() if chosen is None or unit in chosen)
            for rank in self._ranks
        )
        if loads not in self._assigned:
            if len(self._assigned) >= _REMEMBERED_ASSIGNMENTS:
                self._assigned.clear()
            shares = zip(self._ranks, adaptive_sharding(self._sizes, loads).parts, strict=True)
            self._assigned[loads] = {name: rank for rank, part in shares if rank != self._rank for name in part}
        return self._assigned[loads] | self._expert_writers


def _owners(experts: Mapping[int, _Experts]) -> dict[tuple[str, str], _Owner]:
    """Expert and its description -> the rank that writes it: its holders in turn."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, held in experts.items():
        for unit, (described, _) in held.items():
            holders.setdefault((unit, described), []).append(rank)
    turns: Counter[tuple[int, ...]] = Counter()
    found: dict[tuple[str, str], _Owner] = {}
    for expert, ranks in sorted(holders.items()):
        found[expert] = _Owner(ranks[turns[tuple(ranks)] % len(ranks)], len(ranks))
        turns[tuple(ranks)] += 1
    return found


def _described(operator: OperatorState) -> OperatorRecord:
    return operator_record(replace(operator, iteration=0)).described


def _hash(operators: Iterable[OperatorState]) -> str:
    described = {one.name: _described(one).model_dump() for one in operators}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
