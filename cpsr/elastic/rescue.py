"""States in host memory, made a checkpoint of the ranks that left them, before another number of ranks restores it.

So what goes on reads one kind of source: a verified checkpoint, by ranges. Where every rank held all weights and
moments, one state is enough, whichever ranks are gone. Else a state of every old rank must be left, or a replica.
"""

import logging
import threading
from collections.abc import Sequence

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.memory_reader import (
    owned_word_in_memory,
    room_for_memory_state,
    verify_memory_state,
)
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tiers import Entry, Source, decide, state_of
from cpsr.errors import CheckpointError
from cpsr.job import Job
from cpsr.peers.small import load_states
from cpsr.ranks.group import this_node

__all__ = ["Rescue"]

logger = logging.getLogger(__name__)


class Rescue:
    """Writes the newest state that the ranks before have left in host memory; every method is a collective.

    Args:
        job: of this life, of another number of ranks.
        first: oldest life and branch whose states are valid.
    """

    def __init__(self, job: Job, first: tuple[int, int]) -> None:
        self._job = job
        self._first = first
        self._node = this_node()
        self._nodes: list[str] = job.group.gather(self._node)

    def save(self) -> None:
        """Commit the newest state that is whole and newer than every whole checkpoint; the journal says how it went."""
        group = self._job.group
        sources = self._sources() if group.all(self._can_be_dealt()) else ()
        if not sources:
            return
        iteration = sources[0].iteration
        problem = self._written(sources)
        problems = [one for one in group.gather(problem) if one is not None]
        if group.rank == 0:
            problems += [] if problems else self._committed(iteration, len(sources))
            kind = "state rescued" if not problems else "state not rescued"
            ranks = f"{len(sources)} of the {self._job.run.previous_ranks} ranks before"
            message = f"the state of iteration {iteration} in host memory, of {ranks}, "
            message += f"could not be written: {'; '.join(problems)}" if problems else "is a checkpoint now"
            self._job.journal.event(kind, message, iteration, logging.WARNING if problems else logging.INFO)
        group.barrier()

    def _can_be_dealt(self) -> bool:
        """Whether states in memory tell all that a checkpoint must: of blocks and of frozen parameters they do not."""
        shard = self._job.shard
        return not shard.frozen and all(one.parameter.block is None for one in shard.operators.values())

    def _sources(self) -> tuple[Source, ...]:
        """A source for each part of the checkpoint, the same on all ranks; empty where nothing newer is whole."""
        group, ranks = self._job.group, self._job.run.previous_ranks
        whole = [info.iteration for info in scan(self._job.run.path / "checkpoints").checkpoints if info.full]
        newest = group.broadcast(max(whole, default=-1))
        reported = group.gather([vars(entry) for entry in self._entries(newest)])
        entries = [Entry(**entry) for part in reported for entry in part]
        if self._job.run.replicated and self._job.adapter.expert_naming() is None:  # ranks may have shared experts
            own = [entry for entry in entries if entry.kind == "snapshot"]
            found = max(own, key=lambda entry: (entry.iteration, -entry.rank, entry.node), default=None)
            return () if found is None else (Source(0, "memory", found.iteration, found),)
        there = {entry.rank: entry.node for entry in entries}
        nodes = [there.get(rank, "") for rank in range(ranks)]
        decision = decide(nodes, entries, newest, None, alike=range(ranks), remote=True)
        exact = decision.exact if decision.exact and decision.exact[0].tier == "memory" else ()
        return exact if all(len({entry.node for entry in one.entries}) == 1 for one in exact) else ()

    def _entries(self, newest: int) -> list[Entry]:
        """This rank's share of the states in its machine's memory, verified."""
        local = [rank for rank, node in enumerate(self._nodes) if node == self._node]
        found = []
        for state in memory_states(self._job.run.run_id):
            mine = local[state.rank % len(local)] == self._job.group.rank
            old = (state.life, state.branch) < self._first or state.oldest_iteration < state.iteration
            if not mine or old or state.iteration <= newest or state.kind == "departure":
                continue
            problem = verify_memory_state(state)
            if problem is None:
                owned = state.owned if state.kind == "small" else owned_word_in_memory(state)
                found.append(Entry(state.rank, state.iteration, state.kind, self._node, state.path.name, owned))
            else:
                logger.warning("a state in shared memory is not used: %s", problem)
        return found

    def _written(self, sources: Sequence[Source]) -> str | None:
        """Write this rank's share of the parts; returns what went wrong."""
        job = self._job
        try:
            for source in sources:
                node = source.entries[0].node
                there = [rank for rank, one in enumerate(self._nodes) if one == node]
                if there[source.rank % len(there)] == job.group.rank:
                    self._store(source.rank, len(sources)).write(_read(source))
        except (CheckpointError, OSError) as error:
            return f"rank {job.group.rank}: {error}"
        return None

    def _committed(self, iteration: int, parts: int) -> list[str]:
        timeout = self._job.config.checkpoint.save_timeout_seconds
        try:
            result = self._store(0, parts).commit(iteration, timeout, threading.Event())
        except CheckpointError as error:
            return [str(error)]
        return [] if result.committed else [result.reason]

    def _store(self, rank: int, ranks: int) -> CheckpointStore:
        job = self._job
        fsync = job.config.checkpoint.fsync
        return CheckpointStore(job.run.path, rank, ranks, job.run.run_id, job.journal.life, fsync=fsync)


def _read(source: Source) -> Snapshot:
    """A part, in memory of its own."""
    states = [state_of(entry) for entry in source.entries]
    room = room_for_memory_state(states[0])
    return Snapshot(source.iteration, room, load_states(states, room))
