"""Which rank copies, and which writes, the operators that several ranks of a data-parallel group hold (ADPS)."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cpsr.checkpoint.manifest import OperatorRecord
from cpsr.checkpoint.saved import fingerprint, operator_record
from cpsr.experts.sharding import adaptive_sharding
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, Shard

__all__ = ["Share", "WriteAssignment"]

# What is no expert is assigned in runs of operators: so many to a rank, of which at most one is too many or too few.
RUNS_PER_RANK, RUNS_MAX = 16, 1024

# Assignments of one life: as many as there are ways in which the experts of a checkpoint lie on ranks, few where they
# take turns; one takes 5 ms for 3000 operators.
_REMEMBERED_ASSIGNMENTS = 64


# What a rank holds of experts: expert -> hash of what describes its parameters, and their bytes.
_Experts = Mapping[str, tuple[str, int]]


class _Owner(NamedTuple):
    """The rank that writes an expert, and how many hold it."""

    rank: int
    holders: int


class Share(NamedTuple):
    """What other ranks do for this one.

    Attributes:
        writers: operators of this rank that another one writes -> that rank.
        left: of these, what other ranks of this machine copy; None: nothing is shared here.
    """

    writers: Mapping[str, int]
    left: frozenset[str] | None


class WriteAssignment:
    """Assigns each replicated operator to one of the ranks that hold it, for each checkpoint anew; a collective.

    An operator is replicated if ranks of one data-parallel group describe the same slices of it: with ZeRO-0 and
    DDP everything; under expert parallelism everything but experts, and each expert on the ranks that have it. Each
    commit checks that the replicas are equal (`cpsr.checkpoint.replicated`). An expert is always written by the same
    rank, which can so carry it. The rest is balanced by the bytes of experts that each rank has to write.

    Each machine copies all that its ranks hold, each operator by one of them: the one that writes it, if that is there.
    So what another machine has is never needed, and a rank copies what it writes.

    Args:
        shard: what this rank holds.
        units: operator -> its expert, by the same name on all ranks; of experts' parameters alone.
        data_parallel_ranks: this rank's group, itself included.
        group: all ranks.
        memory: this machine's shared memory, see `identity`; None: ranks do not divide the copies.

    Attributes:
        units: replicated operator -> its part of a host buffer.
        replicated: operators of this rank that others hold, too, described.
        share_bytes: what this rank writes of a checkpoint of everything, on average over such ranks.
        non_expert_share_bytes: of it, what is not of experts.

    Source: pec, section 3.2 (equal sharding of experts, adaptive sharding of the rest).
    """

    def __init__(
        self,
        shard: Shard,
        units: Mapping[str, str],
        data_parallel_ranks: Sequence[int],
        group: Group,
        *,
        memory: str | None = None,
    ) -> None:
        parameters: dict[str, list[OperatorState]] = {}
        for name, unit in units.items():
            parameters.setdefault(unit, []).append(shard.operators[name])
        own = {unit: (fingerprint(ones), sum(one.state_bytes for one in ones)) for unit, ones in parameters.items()}
        rest = fingerprint(one for name, one in shard.operators.items() if name not in units)
        gathered = group.gather([rest, own, memory])
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
            name: operator_record(replace(one, iteration=0)).described
            for name, one in shard.operators.items()
            if holders[name] > 1
        }
        self._expert_writers = {name: owner.rank for name, owner in mine.items() if owner.rank != group.rank}
        self._written = _bytes_of_owners(experts, owners)
        sizes = {name: shard.operators[name].state_bytes for name in self.replicated if name not in units}
        self._runs = _runs(sizes, min(RUNS_PER_RANK * len(self._ranks), RUNS_MAX))
        self._sizes = {run: sum(sizes[name] for name in names) for run, names in self._runs.items()}
        in_runs = {name: run for run, names in self._runs.items() for name in names}
        self.units = in_runs | {name: units[name] for name in self.replicated if name in units}
        places = {rank: (group.nodes[rank], gathered[rank][2]) for rank in experts}
        here = {rank: held for rank, held in experts.items() if places[rank] == places[group.rank]}
        # All or none take samples, also one that is alone on its machine: a restart compares them with those of others.
        shared = all(one[2] is not None for one in gathered) and len({*places.values()}) < len(places)
        self._here = [rank for rank in self._ranks if rank in here] if shared else []
        copiers = _owners(here, owners)
        self._experts_left = {name for name, unit in units.items() if copiers[unit, own[unit][0]].rank != group.rank}
        self._copied = _bytes_of_owners(here, copiers)
        self._assigned: dict[tuple[int, ...], Share] = {}  # bytes of experts of each rank -> assignment
        each = {name: one.state_bytes / holders[name] for name, one in shard.operators.items()}
        others = sum(values.nbytes for values in shard.others.values())
        self.non_expert_share_bytes = others + sum(size for name, size in each.items() if name not in units)
        self.share_bytes = others + sum(each.values())

    def share(self, chosen: Collection[str] | None) -> Share:
        """What others do for this rank; consistent on all ranks, without a collective.

        Args:
            chosen: experts that are saved; None: all.
        """
        loads = tuple(
            sum(size for unit, size in self._written[rank].items() if chosen is None or unit in chosen)
            for rank in self._ranks
        )
        if loads not in self._assigned:
            if len(self._assigned) >= _REMEMBERED_ASSIGNMENTS:
                self._assigned.clear()
            runs = _assigned(self._sizes, dict(zip(self._ranks, loads, strict=True)))
            self._assigned[loads] = Share(self._others(runs) | self._expert_writers, self._left(runs))
        return self._assigned[loads]

    def _left(self, writers: Mapping[str, int]) -> frozenset[str] | None:
        """What other ranks of this machine copy, if these write the runs; it copies all experts whatever is saved."""
        if not self._here:
            return None
        copied = {rank: sum(self._copied[rank].values()) for rank in self._here}
        here = {run: rank for run, rank in writers.items() if rank in copied}
        for run, rank in here.items():
            copied[rank] += self._sizes[run]
        elsewhere = {run: size for run, size in self._sizes.items() if run not in here}
        return frozenset(self._others(here | _assigned(elsewhere, copied)).keys() | self._experts_left)

    def _others(self, runs: Mapping[str, int]) -> dict[str, int]:
        """The operators of runs that are another rank's -> that rank."""
        return {name: rank for run, rank in runs.items() if rank != self._rank for name in self._runs[run]}


def _runs(sizes: Mapping[str, int], count: int) -> dict[str, list[str]]:
    """Operators that follow each other, in runs of about equally many bytes: the run's name -> the operators'."""
    least, found, filled = sum(sizes.values()) / max(1, count), dict[str, list[str]](), math.inf
    for name, size in sizes.items():
        if filled >= least:
            filled = 0
            run = found[f"run {len(found)}"] = []
        run.append(name)
        filled += size
    return found


def _assigned(sizes: Mapping[str, int], loads: Mapping[int, int]) -> dict[str, int]:
    """Each of these -> the rank that takes it, of those that have so many bytes to do already."""
    parts = adaptive_sharding(sizes, list(loads.values()))
    return {name: rank for rank, part in zip(loads, parts, strict=True) for name in part}


def _bytes_of_owners(
    experts: Mapping[int, _Experts], owners: Mapping[tuple[str, str], _Owner]
) -> dict[int, dict[str, int]]:
    """The bytes of each rank's own experts."""
    return {
        rank: {unit: size for unit, (described, size) in held.items() if owners[unit, described].rank == rank}
        for rank, held in experts.items()
    }


def _owners(
    experts: Mapping[int, _Experts], known: Mapping[tuple[str, str], _Owner] | None = None
) -> dict[tuple[str, str], _Owner]:
    """Expert and its description -> its owner: as known, where that is one of these ranks; else its holders in turn."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, held in experts.items():
        for unit, (described, _) in held.items():
            holders.setdefault((unit, described), []).append(rank)
    turns: Counter[tuple[int, ...]] = Counter()
    found: dict[tuple[str, str], _Owner] = {}
    for expert, ranks in sorted(holders.items()):
        if known is not None and known[expert].rank in experts:
            found[expert] = known[expert]
            continue
        found[expert] = _Owner(ranks[turns[tuple(ranks)] % len(ranks)], len(ranks))
        turns[tuple(ranks)] += 1
    return found
