"""What the ranks can reach at a restart: the newest checkpoint that all verify, and the states in their memories."""

import hashlib
import json
import logging
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.manifest import Manifest
from cpsr.checkpoint.memory_states import (
    MemoryState,
    belong_together,
    load_states,
    verify_memory_state,
)
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.saved import fingerprint
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tiers import Decision, Entry, Source, decide
from cpsr.checkpoint.verify import UnreadableFileError, read_manifest
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError
from cpsr.journal import FailureScope
from cpsr.peers.fetch import fetch
from cpsr.ranks.group import Group, this_node
from cpsr.replay.conversion import load_window
from cpsr.restart.experts import older_experts
from cpsr.state.shard import Shard

__all__ = ["MemorySources", "NewestCheckpoint", "acquired", "what_is_left"]

logger = logging.getLogger(__name__)


def acquired(pool: SnapshotPool, iteration: int, spare: Collection[str] = ()) -> Snapshot:
    """An empty snapshot to load a state into; see `SnapshotPool.acquire`.

    Raises:
        RecoveryError: every buffer is in use.
    """
    snapshot = pool.acquire(iteration, spare)
    if snapshot is None:
        raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
    return snapshot


class NewestCheckpoint:
    """Finds the newest whole checkpoint, on the disk or at the target of its copies; every method is a collective.

    Attributes:
        damaged: iteration -> what is wrong with a checkpoint that was skipped.
    """

    def __init__(
        self,
        group: Group,
        store: CheckpointStore,
        target: CheckpointTarget,
        pool: SnapshotPool,
        memory: "MemorySources",
    ) -> None:
        self._group = group
        self._store = store
        self._target = target
        self._pool = pool
        self._memory = memory
        self.damaged: dict[int, str] = {}

    def load(self, published_iteration: int | None, *, inexact: bool) -> Snapshot | None:
        """Load the newest checkpoint that can be used; damaged newer ones are set aside.

        No buffer is overwritten whose state the start may yet go on from, as long as there is another one.

        Args:
            published_iteration: the newest step that every rank had published; None where none is known.
            inexact: whether a checkpoint is acceptable with experts that were saved before it.

        Returns:
            This rank's part, in a buffer that is in use; None where the run has never committed a checkpoint.

        Raises:
            RecoveryError: checkpoints were committed, but none of them can be used.
            RunMismatchError: they belong to another model or to other slices of it.
        """
        passed_over: list[int] = []
        while (iteration := self._newest_usable(passed_over)) is not None:
            needed = self._memory.needed(iteration, published_iteration, inexact=inexact)
            snapshot = acquired(self._pool, iteration, needed)
            problem = self._load_into(snapshot)
            if problem is None and not inexact and self._only_with_older_experts(snapshot):
                logger.warning("checkpoint %d has experts that are older: mode 'exact' goes behind it", iteration)
                self._pool.release(snapshot)
                passed_over.append(iteration)
                continue
            if problem is None:
                self._set_damaged_aside()
                return snapshot
            self._pool.release(snapshot)
            self.damaged[iteration] = problem
            logger.error("checkpoint %d cannot be used; trying the next older one. %s", iteration, problem)
        self._require_none_committed(passed_over)
        return None

    def load_again(self, iteration: int) -> Snapshot:
        """Load a checkpoint of the run that is going on; this rank's part, in a buffer that is in use.

        Raises:
            RecoveryError: it cannot be used, or the file system cannot read it now.
        """
        snapshot = acquired(self._pool, iteration)
        problem = self._load_into(snapshot)
        if problem is not None:
            self._pool.release(snapshot)
            raise RecoveryError(f"checkpoint {iteration} cannot be used: {problem}. Start the job again")
        return snapshot

    def _load_into(self, snapshot: Snapshot) -> str | None:
        """Load every rank's part of a checkpoint.

        Returns:
            What is wrong with the checkpoint on any rank.

        Raises:
            RunMismatchError: a rank's part is of another model or split over ranks; every rank raises it.
            RecoveryError: a file system cannot read a file now: the checkpoint may be whole, and continuing from an
                older one would abandon it; every rank raises it.
        """
        rank, iteration = self._group.rank, snapshot.iteration
        kind, record = self._commit_record(iteration)
        if kind == "unreadable":
            raise RecoveryError(f"checkpoint {iteration} cannot be read now. {record}")
        if kind == "damage":
            return record
        problem = ""
        try:
            manifest = Manifest.parse(record.encode("ascii"))
            snapshot.scalars = self._store.load(iteration, snapshot.shard, manifest)
        except RunMismatchError as error:
            kind, problem = "mismatch", f"rank {rank}: {error}"
        except UnreadableFileError as error:
            kind, problem = "unreadable", f"rank {rank}: {error}"
        except CheckpointError as error:
            kind, problem = "damage", f"rank {rank}: {error}"
        found = self._group.gather([kind, problem])
        problems = {kind: "; ".join(text for one, text in found if one == kind) for kind, _ in found}
        if "mismatch" in problems:
            raise RunMismatchError(problems["mismatch"])
        if "unreadable" in problems:
            raise RecoveryError(f"checkpoint {iteration} cannot be read now. {problems['unreadable']}")
        return problems.get("damage")

    def _commit_record(self, iteration: int) -> tuple[str, str]:
        """A commit record as rank 0 reads it, for all ranks: it has a line for each file of each.

        Returns:
            An empty word and the content; or `unreadable` or `damage`, and what is wrong.
        """
        read: tuple[str, str] | None = None
        if self._group.rank == 0:
            try:
                read = "", read_manifest(self._store.directory_of(iteration)).to_bytes().decode("ascii")
            except UnreadableFileError as error:
                read = "unreadable", f"rank 0: {error}"
            except CheckpointError as error:
                read = "damage", f"rank 0: {error}"
        kind, text = self._group.broadcast(read)
        return kind, text

    def _newest_usable(self, passed_over: Sequence[int]) -> int | None:
        """The newest checkpoint that was not skipped, fetched first where the target has a newer one."""
        fetched = self._target.fetch(self._store, self.damaged)
        if fetched is not None:
            self.damaged.pop(fetched, None)
        known = self._store.catalogue() if self._group.rank == 0 else ()
        full = [info.iteration for info in known if info.full]
        usable = [iteration for iteration in full if iteration not in self.damaged and iteration not in passed_over]
        newest: int | None = self._group.broadcast(max(usable, default=None))
        return newest

    def _only_with_older_experts(self, snapshot: Snapshot) -> bool:
        """Whether experts are older than their checkpoint, and no state of its iteration or newer is in memory."""
        if older_experts(snapshot, self._group) is None:
            return False
        found = self._memory.decide(snapshot.iteration, None, snapshot.shard, stale=True, inexact=False)
        return found.exact[0].tier == "disk"

    def _set_damaged_aside(self) -> None:
        """Set damaged ones aside, once an older one is in memory: else they may be all that is left."""
        for iteration, problem in self.damaged.items():
            if self._group.rank == 0:
                self._store.quarantine(iteration, problem)
        if self.damaged:  # alike on all ranks
            self._group.barrier()

    def _require_none_committed(self, passed_over: Sequence[int]) -> None:
        """A run never starts from scratch after a commit."""
        remains = self._group.broadcast(self._store.remains() if self._group.rank == 0 else None)
        if passed_over:
            raise RecoveryError(
                f"checkpoints {passed_over} hold experts that are older than they are, and no older checkpoint is left "
                "whose experts are all of one iteration, as mode 'exact' needs. Nothing was changed: start with mode "
                "'auto', which predicts these experts or goes on with them as they are"
            )
        if remains:
            raise RecoveryError(
                f"none of the checkpoints of this run can be restored: "
                f"{'; '.join(self.damaged.values()) or 'none is whole'}. Nothing was changed; the directory holds "
                f"{', '.join(remains)}. Put checkpoints/ back from a backup, with its slabs, or use another run_dir to "
                "start anew"
            )


class MemorySources:
    """The states in all machines' memories, and one decision over them; every method is a collective.

    Args:
        run_id: identity of the run.
        group: the ranks.
        shard: the engine's views; only names and slices are looked at.
        first: oldest life and branch whose states are valid; the run has abandoned earlier ones.
        held: whether every rank had a state of that life in memory.
        windows: whether windows are looked at.
        shared: whether states are joined of what several ranks hold; not where these are known to differ.

    Attributes:
        left: what the failure has left, by the states that `decide` found in the machines' memory, valid or not; None
            where they tell nothing.
        own: this rank's verified snapshots on its machine, newer than the checkpoint; then of other ranks' what they
            lack.
    """

    left: FailureScope | None = None

    def __init__(
        self,
        run_id: str,
        group: Group,
        shard: Shard,
        first: tuple[int, int],
        held: bool = False,
        windows: bool = False,
        shared: bool = True,
    ) -> None:
        self._windows, self._shared = windows, shared
        self._arena = Arena(run_id)
        self._group = group
        self._first, self._all_held = first, held
        self._node = this_node()
        self._pieces = {
            name: [list(one.parameter.global_shape), one.parameter.offset, one.parameter.numel]
            for name, one in shard.operators.items()
        }
        self._pieces_hash = _hash(self._pieces)
        self._fetched: dict[Entry, MemoryState] = {}
        self.own: list[MemoryState] = []
        # A start looks before and after it has loaded its checkpoint, and reads each state once.
        self._is_whole = cache(_is_whole)

    def needed(self, checkpoint_iteration: int, published_iteration: int | None, *, inexact: bool) -> set[str]:
        """Files of the states that the ranks may go on from, before they know what a checkpoint holds; a collective.

        Dumps are among them, which may serve more ranks than is known yet, and whatever is of the iteration of the
        checkpoint, not verified: that may be damaged, or have older experts. For the arguments see `decide`.
        """
        found = self._found(checkpoint_iteration, published_iteration, None, stale=False, inexact=inexact)
        taken = {entry.name for source in (*found.exact, *found.departed) for entry in source.entries}
        more = [one for one in self._arena.list() if one.kind == "departure" or one.iteration == checkpoint_iteration]
        return taken | {state.name for state in more}

    def decide(
        self,
        checkpoint_iteration: int | None,
        published_iteration: int | None,
        checkpoint: Shard | None,
        *,
        stale: bool = False,
        inexact: bool = True,
    ) -> Decision:
        """The sources of all ranks among the states that they can reach; see `cpsr.checkpoint.tiers.decide`.

        Args:
            checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
            published_iteration: the newest step that every rank had published; None where none is known.
            checkpoint: this rank's part of it; its hash shows which ranks have the same state.
            stale: whether some rank's part of the checkpoint has experts that are older than it is.
            inexact: whether states with experts of an earlier iteration are looked at.
        """
        decision = self._found(checkpoint_iteration, published_iteration, checkpoint, stale=stale, inexact=inexact)
        return replace(decision, departed=()) if self._parts_replicas(decision.departed) else decision

    def _found(
        self,
        checkpoint_iteration: int | None,
        published_iteration: int | None,
        checkpoint: Shard | None,
        *,
        stale: bool,
        inexact: bool,
    ) -> Decision:
        nodes = self._group.nodes
        newest = -1 if checkpoint_iteration is None else checkpoint_iteration - stale
        here = self._arena.list()
        states = self._catalogue(here, nodes, newest)
        self.own = [state for state in states if state.rank == self._group.rank and state.kind == "snapshot"]
        self.own += [part for state in self.own if self._shared for other in here if (part := _lacked(state, other))]
        held = [self._held(here, place) for place in ("own", "replica")]
        pieces = None if checkpoint is None else self._pieces_hash
        found = self._group.gather([_small_iterations(states), *held, pieces])
        own, kept, small_parts = ([one[place] for one in found] for place in (1, 2, 0))
        self.left = what_is_left(own, kept, told=self._all_held)
        small = {iteration for part in small_parts for iteration in part}
        entries = [entry for state in states if (entry := self._entry(state, small)) is not None]
        entries = [entry for entry in entries if inexact or not entry.older]
        reported = self._group.gather([vars(entry) for entry in entries])
        return decide(
            nodes,
            [Entry(**entry) for part in reported for entry in part],
            checkpoint_iteration,
            published_iteration,
            alike=self._alike(checkpoint, [one[3] for one in found]),
            stale=stale,
        )

    def _alike(self, checkpoint: Shard | None, pieces: list[str]) -> list[int]:
        """By rank, the first one with the same part of the checkpoint; all ranks have one, or none has.

        Only ranks that own the same slices, as `pieces` tells, can have the same state, and nothing else is hashed.
        """
        if checkpoint is None or len({*pieces}) == len(pieces):
            return list(range(self._group.size))
        several = pieces.count(pieces[self._group.rank]) > 1
        words = self._group.gather(_fingerprint(checkpoint) if several else None)
        first = {word: rank for rank, word in reversed(list(enumerate(words)))}
        return [rank if word is None else first[word] for rank, word in enumerate(words)]

    def _parts_replicas(self, departed: Sequence[Source]) -> bool:
        """Whether an operator of a rank whose state would be predicted is in the dump of another rank, too.

        Predicted on one rank and dumped on the other, it would differ between them from then on. So it is where ranks
        hold some operators alike and others not, as under tensor parallelism.
        """
        lost = [source.rank for source in departed if source.tier == "predicted"]
        if not lost or len(lost) == len(departed):
            return False
        parts: list[dict[str, list[Any]]] = self._group.gather(self._pieces)
        for source in departed:
            for rank in lost if source.tier != "predicted" else ():
                alike = [name for name, piece in parts[rank].items() if parts[source.rank].get(name) == piece]
                if alike:
                    if self._group.rank == 0:
                        logger.warning(
                            "the dumps of the ranks that did not fail are not used: rank %d has lost its state, and "
                            "it held %r alike with rank %d: predicted beside the dump it would differ from that",
                            rank,
                            alike[0],
                            source.rank,
                        )
                    return True
        return False

    def fetch(self, sources: Sequence[Source]) -> None:
        """Fetch states of other machines to the ranks that take them.

        Raises:
            CheckpointError: a state did not arrive; on every rank.
        """
        self._fetched = fetch(self._arena, self._group, self._group.nodes, sources)

    def load(self, source: Source, into: Shard) -> Any:
        """Copy this rank's state out of memory and return its scalars; if one rank fails, all raise.

        The operators of `into` get the iterations at which they were taken.

        Raises:
            CheckpointError: a state is no longer whole; the content of `into` on other ranks is undefined.
        """
        problem, scalars = None, None
        try:
            states = [
                self._fetched.get(entry) or self._arena.find(entry.name, entry.iteration) for entry in source.entries
            ]
            if states:
                windows = states[0].kind == "window"
                scalars = load_window(states[0], into) if windows else load_states(states, into)
            for fetched in self._fetched.values():
                if fetched.kind != "window":  # that is replayed from its file
                    fetched.path.unlink(missing_ok=True)
            self._fetched = {}
        except CheckpointError as error:
            problem = f"rank {self._group.rank}: {error}"
        problems = self._group.gather_present(problem)
        if problems:
            raise CheckpointError("; ".join(problems))
        return scalars

    def _held(self, here: Sequence[MemoryState], place: Literal["own", "replica"]) -> list[int]:
        """Ranks of whose states of the last life one lies in this machine's memory, of any branch."""
        return sorted({one.rank for one in here if one.place == place and one.life >= self._first[0]})

    def _catalogue(self, here: Sequence[MemoryState], nodes: list[str], after: int) -> list[MemoryState]:
        """The states that this rank verifies: its own, and a share of the replicas in its machine's memory."""
        local = [rank for rank, node in enumerate(nodes) if node == self._node]
        whole = []
        for state in here:
            verifier = state.rank if state.rank in local else local[state.rank % len(local)]
            if verifier != self._group.rank or (state.life, state.branch) < self._first or state.iteration <= after:
                continue
            if state.kind == "upstream" or (state.kind == "window" and not self._windows):
                continue
            if self._is_whole(state):
                whole.append(state)
        return whole

    def _entry(self, state: MemoryState, small: Container[int]) -> Entry | None:
        """The report on a state; with its parts only where it lacks some, or one of `small` may need them."""
        if state.lacking and not self._shared:
            return None
        joined = state.kind == "small" or (state.kind == "snapshot" and (state.iteration in small or state.is_shared))
        older = state.oldest_iteration < state.iteration
        place = self._node, state.name
        parts = state.parts if joined else ()
        return Entry(state.rank, state.iteration, state.kind, *place, parts, older, state.newest_iteration)


def _lacked(own: MemoryState, other: MemoryState) -> MemoryState | None:
    """What another rank's snapshot has of one that lacks it, not verified; None: nothing."""
    if other.kind != "snapshot" or other.iteration != own.iteration or not belong_together(own.parts, other.parts):
        return None
    wanted = {part.name: part for part in own.parts if not part.word}
    given = {part.of for part in other.parts if part.name in wanted and wanted[part.name].is_given_by(part)}
    operators = {
        name: one
        for name, one in other.operators.items()
        if one.part in given and name in own.lacking and own.lacking[name].part == one.part
    }
    rest = {name: one for name, one in other.operators.items() if name not in operators}
    return replace(other, operators=operators, lacking={**other.lacking, **rest}) if operators else None


def _is_whole(state: MemoryState) -> bool:
    problem = verify_memory_state(state)
    if problem is not None:
        logger.warning("a state in shared memory is not used: %s", problem)
    return problem is None


def _small_iterations(states: Sequence[MemoryState]) -> list[int]:
    return [state.iteration for state in states if state.kind == "small"]


def what_is_left(own: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]], *, told: bool) -> FailureScope | None:
    """What a failure has left of the ranks' states; None where that does not show.

    Without replicas the failure of one machine loses states as well. It is told by the other machines' own ones.

    Args:
        own: for each rank, the ranks of which buffers of their own lie in its machine's memory.
        replicas: for each rank, the ranks whose replicas do.
        told: whether every rank had a state; else it may be missing for another reason than the failure.
    """
    if all(rank in here for rank, here in enumerate(own)):
        return "process"
    if not told:
        return None
    anywhere = {rank for here in (*own, *replicas) for rank in here}
    survived = not any(replicas) and any(rank in here for rank, here in enumerate(own))
    return "machine" if survived or anywhere.issuperset(range(len(own))) else "everything"


def _hash(pieces: dict[str, list[Any]]) -> str:
    """Of which elements of which operators a rank owns."""
    return hashlib.sha256(json.dumps(sorted(pieces.items())).encode()).hexdigest()


def _fingerprint(shard: Shard) -> str:
    """Hash of names, shapes, weights and moments; of buffers names and shapes alone.

    Ranks that train separate models may have the same shapes. A rank that uses another's state also uses its running
    statistics.
    """
    others = [(name, str(values.dtype), tuple(values.shape)) for name, values in sorted(shard.others.items())]
    return f"{fingerprint(shard.operators.values(), values=True)} {others}"
