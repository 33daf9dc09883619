"""States in host memory, made a checkpoint of the ranks that left them, before another number of ranks restores it.

So what goes on reads one kind of source: a verified checkpoint, by ranges. Where every rank held all weights and
moments, one state is enough, whichever ranks are gone. Else a state of every old rank must be left, or a replica.
Emergency dumps count, too: the rest of their small state comes from the checkpoint before.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.memory_states import MemoryState, OpenState, load_states, room_for_memory_state
from cpsr.checkpoint.progress import read_progress
from cpsr.checkpoint.ranges import lacking_among
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.tiers import Entry, Source, decide, wholes
from cpsr.elastic.resharded_load import small_state_at_dump
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.job import Job
from cpsr.ranks.group import this_node
from cpsr.state.shard import Shard

__all__ = ["Rescue"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # states that are tried, before the checkpoint on the disk is taken


class Rescue:
    """Writes the newest state that the ranks before have left in host memory; every method is a collective.

    Args:
        job: of this life, of another number of ranks.
        first: oldest life and branch whose states are valid.
        frozen: files of this rank's parameters outside the optimizer; None: no rank has any.
    """

    def __init__(self, job: Job, first: tuple[int, int], frozen: FrozenFiles | None) -> None:
        self._job = job
        self._arena = Arena(job.run.run_id)
        self._frozen, self._checked = frozen, set[Path]()
        self._first = first
        self._node = this_node()
        self._nodes: list[str] = job.group.gather(self._node)
        # Experts have other names where other ranks have them.
        named = job.shard.operators if job.adapter.mixture is None else {}
        owned = {name: one.parameter.block is not None for name, one in named.items()}
        self._is_block: dict[str, bool] = {}
        for part in job.group.gather(owned):
            self._is_block.update(part)

    def save(self) -> None:
        """Commit the newest state that is whole and newer than every whole checkpoint; the journal says how it went.

        Raises:
            RecoveryError: there is no checkpoint, and states of all ranks before that could not be made one.
        """
        checkpoint, saved_by = self._newest_checkpoint()
        for sources in self._candidates(checkpoint, based=saved_by == self._job.run.previous_ranks):
            if self._save(sources, checkpoint):
                return
        if checkpoint < 0:
            self._refuse_to_begin_anew()

    def _refuse_to_begin_anew(self) -> None:
        """Raise RecoveryError beside states from which the ranks before could go on: all have one of that iteration."""
        before, ranks = self._job.run.previous_ranks, dict[tuple[int, str], set[int]]()
        found = [state for state in self._arena.list() if (state.life, state.branch) >= self._first]
        for part in self._job.group.gather([(state.iteration, state.kind, state.rank) for state in found]):
            for iteration, kind, rank in part:
                ranks.setdefault((iteration, kind), set()).add(rank)
        kinds = {"snapshot", "window"} if self._job.config.replay.enabled else {"snapshot"}
        whole = [at for (at, kind), there in ranks.items() if kind in kinds and len(there) == before]
        if whole:
            raise RecoveryError(
                f"the states of iteration {max(whole)} in host memory are all that is left of this run, and another "
                f"number of ranks cannot use them. Nothing was trained, and they stay: start with {before} ranks as "
                "before, or end them with `cpsr release` to begin anew"
            )

    def _save(self, sources: tuple[Source, ...], checkpoint: int) -> bool:
        group, iteration = self._job.group, sources[0].iteration
        problem = self._written(sources, checkpoint)
        problems = group.gather_present(problem)
        if group.rank == 0:
            problems += [] if problems else self._committed(iteration, len(sources))
            kind = "state rescued" if not problems else "state not rescued"
            ranks = f"{len(sources)} of the {self._job.run.previous_ranks} ranks before"
            message = f"the state of iteration {iteration} in host memory, of {ranks}, "
            message += f"could not be written: {'; '.join(problems)}" if problems else "is a checkpoint now"
            if any(one.entry is not None and one.entry.kind == "departure" for one in sources):
                message += f"; random states and registered objects are those of checkpoint {checkpoint}"
            self._job.journal.event(kind, message, iteration, logging.WARNING if problems else logging.INFO)
        return not group.broadcast(bool(problems))

    def _newest_checkpoint(self) -> tuple[int, int]:
        """Iteration of the newest whole checkpoint on the disk, -1 without one, and how many ranks saved it."""
        found = (-1, 0)
        if self._job.group.rank == 0:
            known = scan(self._job.run.path / "checkpoints").checkpoints
            found = max(((info.iteration, info.listing.world_size) for info in known if info.full), default=found)
        iteration, world_size = self._job.group.broadcast(found)
        return iteration, world_size

    def _candidates(self, newest: int, *, based: bool) -> list[tuple[Source, ...]]:
        """States newer than the checkpoint, the newest first, the same on all ranks: a source for each of their parts.

        Args:
            newest: iteration of the checkpoint.
            based: whether the ranks before saved it: an emergency dump has no complete small state, and takes the rest
                from there.
        """
        group, ranks = self._job.group, self._job.run.previous_ranks
        here, whole = self._entries(newest)
        reported = group.gather([vars(entry) for entry in here])
        entries = [Entry(**entry) for part in reported for entry in part]
        usable = [entry for entry in entries if based or entry.kind != "departure"]
        there = {entry.rank: entry.node for entry in usable}
        nodes = [there.get(rank, "") for rank in range(ranks)]
        # Ranks may have shared experts; and those before may have held parts where these hold all.
        if group.all(whole) and self._job.run.replicated and self._job.adapter.mixture is None:
            order = sorted(
                (one for one in wholes(nodes, usable) if _on_one_machine(one)),
                key=lambda one: (-one.iteration, one.entries[0].kind != "snapshot", one.rank, one.entries[0].node),
            )
            return [(replace(one, rank=0),) for one in order[:ATTEMPTS]]
        published = group.broadcast(self._published() if group.rank == 0 else None)
        decision = decide(nodes, usable, None if newest < 0 else newest, published, alike=range(ranks))
        exact = decision.exact if decision.exact and decision.exact[0].tier == "memory" else ()
        found = [decision.departed if decision.complete else (), exact]
        return [one for one in found if one and all(map(_on_one_machine, one))]

    def _published(self) -> int | None:
        """The newest step that the ranks before had all published; None where that cannot be read."""
        try:
            progress = read_progress(self._job.run.path, self._job.run.previous_ranks)
        except OSError as error:  # on this rank alone: the others wait for it
            logger.warning("emergency dumps are not used, since the ranks' counters cannot be read: %s", error)
            return None
        return None if progress is None else progress.iteration

    def _entries(self, newest: int) -> tuple[list[Entry], bool]:
        """This rank's share of the states in its machine's memory, verified; whether these have whole operators."""
        local = [rank for rank, node in enumerate(self._nodes) if node == self._node]
        found, whole = list[Entry](), True
        apart = (self._job.run.path / DIFFERING).exists()
        for state in self._arena.list():
            mine = local[state.rank % len(local)] == self._job.group.rank
            old = (state.life, state.branch) < self._first or state.oldest_iteration < state.iteration
            if not mine or old or state.iteration <= newest or state.kind == "window" or (apart and state.lacking):
                continue
            try:
                with OpenState(state) as slab:
                    whole &= slab.holds_whole_operators()
                parts = () if state.kind == "departure" else state.parts
                found.append(Entry(state.rank, state.iteration, state.kind, self._node, state.name, parts))
            except CheckpointError as error:
                logger.warning("a state in shared memory is not used: %s", error)
        return found, whole

    def _written(self, sources: Sequence[Source], checkpoint: int) -> str | None:
        """Write this rank's share of the parts; returns what went wrong."""
        job = self._job
        try:
            for source in sources:
                node = source.entries[0].node
                there = [rank for rank, one in enumerate(self._nodes) if one == node]
                if there[source.rank % len(there)] == job.group.rank:
                    self._write(source, len(sources), checkpoint)
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
        lacking = partial(lacking_among, self._is_block)
        return CheckpointStore(job.run.path, rank, ranks, job.run.run_id, job.journal.life, missing=lacking)

    def _write(self, source: Source, parts: int, checkpoint: int) -> None:
        """Write a part; its parameters outside the optimizer are those of a checkpoint, or of this job."""
        store, snapshot, outside = self._store(source.rank, parts), self._read(source, checkpoint), None
        if (mine := self._frozen) is not None:
            store.frozen = FrozenFiles(mine.weights, source.rank, store.directory, places=mine.places)
            assert source.own is not None
            ranks = self._job.run.previous_ranks
            outside = store.frozen.rescued(snapshot.scalars, source.own.rank, ranks, self._checked)
        store.write(snapshot, outside)

    def _read(self, source: Source, checkpoint: int) -> Snapshot:
        """A part, in memory of its own."""
        states = [self._arena.find(entry.name, entry.iteration) for entry in source.entries]
        room = room_for_memory_state(states[0])
        scalars = load_states(states, room)
        if states[0].kind == "departure":
            _require_finite(states[0], room)
            rank, run = states[0].rank, self._job.run
            directory = run.path / "checkpoints" / step_name(checkpoint)
            saved = SavedCheckpoint(directory).small_state(rank)
            progress = read_progress(run.path, run.previous_ranks)
            batches = {} if progress is None else progress.ranks.get(rank, {})
            scalars = small_state_at_dump(saved, scalars, source.iteration, batches)
        return Snapshot(source.iteration, room, scalars)


def _on_one_machine(source: Source) -> bool:
    return len({entry.node for entry in source.entries}) == 1


def _require_finite(state: MemoryState, room: Shard) -> None:
    for key, tensor in room.tensors():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{state.path.name} is not finite in {key}")
