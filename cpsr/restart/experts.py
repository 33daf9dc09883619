"""Experts that are older than the state they come with: how old, nearer ones in memory, and the tokens they have lost.

A checkpoint may leave experts out. After a restart these go on as they were saved before it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cpsr.checkpoint.memory_states import MemoryState, load_states, verify_memory_state
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.ranks.group import Group
from cpsr.restart.restored_state import Restored
from cpsr.state.shard import Shard

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.saving import ExpertSaving

__all__ = [
    "OlderExperts",
    "differing_operator",
    "load_nearer_experts",
    "nearest",
    "older_experts",
    "older_operators",
    "with_lost_tokens",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OlderExperts:
    """Older experts over all ranks' parts of one checkpoint.

    Attributes:
        parameters: how many were saved before it.
        oldest_iteration: when the oldest of them was.
    """

    parameters: int
    oldest_iteration: int


def older_operators(snapshot: Snapshot) -> dict[str, int]:
    """This rank's operators that were saved before the checkpoint that they are in -> when."""
    operators = snapshot.shard.operators
    return {name: one.iteration for name, one in operators.items() if one.iteration < snapshot.iteration}


def older_experts(snapshot: Snapshot, group: Group) -> OlderExperts | None:
    """Older experts that any rank has loaded; a collective. None where there are none."""
    ages = older_operators(snapshot).values()
    gathered = group.gather([len(ages), min(ages, default=snapshot.iteration)])
    count = sum(part[0] for part in gathered)
    return OlderExperts(count, min(part[1] for part in gathered)) if count else None


def differing_operator(snapshot: Snapshot, group: Group) -> str | None:
    """An operator of which ranks hold slices, or copies, of different iterations; a collective. None: there is none."""
    found: dict[str, set[int]] = {}
    for part in group.gather(older_operators(snapshot)):
        for name, at in part.items():
            found.setdefault(name, set()).add(at)
    own = snapshot.shard.operators
    differing = [name for name, ages in found.items() if name in own and ages != {own[name].iteration}]
    return next((name for part in group.gather(sorted(differing)[:1]) for name in part), None)


def load_nearer_experts(
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
    there = [(state, state.ages) for state in states]
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
            logger.warning("experts in host memory are not used: %s", problem)
        return 0
    loaded = set[str]()
    for state, some in wanted:
        loaded |= _load(snapshot, state, [name for name in some if name not in loaded])
    return int(group.sum(len(loaded)))


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


def _load(snapshot: Snapshot, state: MemoryState, names: Sequence[str]) -> set[str]:
    if not names:
        return set()
    operators = snapshot.shard.operators
    into = Shard({name: operators[name] for name in names})
    load_states([state], into)
    operators.update(
        {name: replace(one, iteration=min(one.iteration, snapshot.iteration)) for name, one in into.operators.items()}
    )
    return set(names)


def with_lost_tokens(restored: Restored, experts: "ExpertSaving | None", group: Group) -> Restored:
    """Add the tokens that experts have lost to the guard's measurements; a collective."""
    if experts is None or restored.scalars is None:
        return restored
    experts.load_state_dict(restored.scalars.experts)
    if group.all(not restored.taken_at):
        return restored
    checkpoint, units, ages = restored.scalars.iteration, experts.units, dict[str, int]()
    for name in restored.taken_at.keys() & units.keys():
        ages[units[name]] = min(restored.taken_at[name], ages.get(units[name], checkpoint))
    lost = experts.restored(ages, checkpoint)
    return replace(restored, guard={**restored.guard, "lost_tokens": lost})
