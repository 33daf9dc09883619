"""Experts that a checkpoint holds of an earlier iteration, from the memory of machines that are left."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cpsr.checkpoint.memory_reader import ages_in_memory, load_memory_state, verify_memory_state
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["nearest", "take_nearer_experts"]

logger = logging.getLogger(__name__)


def take_nearer_experts(
    snapshot: Snapshot, units: Mapping[str, str], states: Sequence[MemoryState], group: Group
) -> int:
    """Replace older experts of a checkpoint by those in host memory that are nearer to its iteration; a collective.

    A machine that is left has snapshots, which the whole job cannot restart from because another machine is lost. Each
    expert comes whole, from one iteration on all ranks that hold parts of it. One that is newer than the checkpoint
    counts as of its iteration. If a state cannot be read after all, the checkpoint stays as it is.

    Source: PEC, section 3.2, two-level recovery.

    Args:
        snapshot: this rank's part of the checkpoint, in a host buffer; its older operators are replaced.
        units: operator -> its expert.
        states: verified snapshots of this rank in memory.
        group: the ranks.

    Returns:
        Parameters that were replaced, on all ranks.
    """
    held: dict[str, int] = {}
    for name, operator in snapshot.shard.operators.items():
        if name in units:
            held[units[name]] = min(operator.iteration, held.get(units[name], operator.iteration))
    names = {unit: [name for name in snapshot.shard.operators if units.get(name) == unit] for unit in held}
    there = [(state, ages_in_memory(state)) for state in states]
    own = {unit: sorted(_iterations(names[unit], [ages for _, ages in there])) for unit in held}
    gathered = group.gather([held, own])
    chosen = nearest(snapshot.iteration, [part[0] for part in gathered], [part[1] for part in gathered])
    wanted = [
        (state, [name for unit in held for name in names[unit] if ages.get(name, -1) == chosen.get(unit)])
        for state, ages in there
    ]
    problem = next((text for state, some in wanted if some and (text := verify_memory_state(state))), None)
    if not group.all(problem is None):
        if problem is not None:
            logger.warning("experts are not taken from host memory: %s", problem)
        return 0
    taken = set[str]()
    for state, some in wanted:
        taken |= _take(snapshot, state, [name for name in some if name not in taken])
    return int(group.sum(len(taken)))


def nearest(
    iteration: int, held: Sequence[Mapping[str, int]], there: Sequence[Mapping[str, Sequence[int]]]
) -> dict[str, int]:
    """Which iteration of each expert is taken from memory; only where it is nearer than what the checkpoint holds.

    Args:
        iteration: of the checkpoint.
        held: by rank: iteration of each expert in the rank's part of the checkpoint.
        there: by rank: for each of these, the iterations of which the rank's memory has all its parts.
    """
    chosen = {}
    for unit in sorted({unit for part in held for unit in part}):
        holders = [rank for rank, part in enumerate(held) if unit in part]
        common = set.intersection(*(set(there[rank].get(unit, ())) for rank in holders))
        best = min(common, key=lambda at: (abs(iteration - at), at), default=None)
        if best is not None and abs(iteration - best) < iteration - min(held[rank][unit] for rank in holders):
            chosen[unit] = best
    return chosen


def _iterations(names: Sequence[str], ages: Sequence[Mapping[str, int]]) -> set[int]:
    """Iterations of which one state has all of these operators."""
    found = [{state.get(name, -1) for name in names} for state in ages]
    return {at for iterations in found if len(iterations) == 1 for at in iterations if at >= 0}


def _take(snapshot: Snapshot, state: MemoryState, names: Sequence[str]) -> set[str]:
    if not names:
        return set()
    operators = snapshot.shard.operators
    into = Shard({name: operators[name] for name in names})
    load_memory_state(state, into)
    operators.update(
        {name: replace(one, iteration=min(one.iteration, snapshot.iteration)) for name, one in into.operators.items()}
    )
    return set(names)
