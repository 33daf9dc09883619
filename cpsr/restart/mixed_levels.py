"""Experts that a checkpoint holds of an earlier iteration, from the memory of machines that are left."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cpsr.checkpoint.memory_reader import ages_in_memory, load_memory_state
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.errors import CheckpointError
from cpsr.ranks.group import Group
from cpsr.restart.older_experts import older_operators
from cpsr.state.shard import Shard

__all__ = ["nearest", "take_nearer_experts"]

logger = logging.getLogger(__name__)


def take_nearer_experts(snapshot: Snapshot, states: Sequence[MemoryState], group: Group) -> int:
    """Replace older experts of a checkpoint by those in host memory that are nearer to its iteration; a collective.

    A machine that is left has snapshots, which the whole job cannot restart from because another machine is lost. Each
    expert comes whole, from one iteration on all ranks that hold parts of it. One that is newer than the checkpoint
    counts as of its iteration.

    Source: PEC, section 3.2, two-level recovery.

    Args:
        snapshot: this rank's part of the checkpoint, in a host buffer; its older operators are replaced.
        states: verified snapshots of this rank in memory.
        group: the ranks.

    Returns:
        Parameters that were replaced, on all ranks.

    Raises:
        CheckpointError: a state could not be read after all; the content of the snapshot is undefined.
    """
    older = older_operators(snapshot)
    there = [(state, ages_in_memory(state)) for state in states]
    own = {name: sorted({ages[name] for _, ages in there if name in ages}) for name in older}
    gathered = group.gather([older, own])
    chosen = nearest(snapshot.iteration, [part[0] for part in gathered], [part[1] for part in gathered])
    problem = None
    try:
        for state, ages in there:
            wanted = {name: at for name, at in chosen.items() if name in older and ages.get(name) == at}
            _take(snapshot, state, wanted)
    except CheckpointError as error:
        problem = str(error)
    problems = [one for one in group.gather(problem) if one is not None]
    if problems:
        raise CheckpointError("; ".join(problems))
    return int(group.sum(len(chosen.keys() & older.keys())))


def nearest(
    iteration: int, older: Sequence[Mapping[str, int]], there: Sequence[Mapping[str, Sequence[int]]]
) -> dict[str, int]:
    """Which iteration of each operator is taken from memory; only where it is nearer than what the checkpoint holds.

    Args:
        iteration: of the checkpoint.
        older: by rank: iterations of the older operators in the rank's part of it.
        there: by rank: for each of these, the iterations that lie in the rank's memory.
    """
    chosen = {}
    for name in sorted({name for part in older for name in part}):
        holders = [rank for rank, part in enumerate(older) if name in part]
        common = set.intersection(*(set(there[rank].get(name, ())) for rank in holders))
        held = min(older[rank][name] for rank in holders)
        best = min(common, key=lambda at: (abs(iteration - at), at), default=None)
        if best is not None and abs(iteration - best) < iteration - held:
            chosen[name] = best
    return chosen


def _take(snapshot: Snapshot, state: MemoryState, wanted: Mapping[str, int]) -> None:
    operators = snapshot.shard.operators
    into = Shard({name: operators[name] for name in wanted})
    if not wanted:
        return
    load_memory_state(state, into)
    operators.update(
        {name: replace(one, iteration=min(one.iteration, snapshot.iteration)) for name, one in into.operators.items()}
    )
