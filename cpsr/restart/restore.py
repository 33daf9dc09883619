"""Restores a run: chooses the state on all ranks together, loads it into the engine, and checks it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpsr.checkpoint.progress import Progress, read_for_all
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.moe.operators import experts_of
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.restart.choice import Candidate, Circumstances, Mode, all_from, candidates, choose
from cpsr.restart.experts import (
    OlderExperts,
    differing_operator,
    load_nearer_experts,
    older_experts,
    older_operators,
)
from cpsr.restart.injection import Injection
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restored_state import Refusal, RefusedError, Restored
from cpsr.restart.sources import MemorySources, NewestCheckpoint, acquired
from cpsr.state.small_state import Scalars

__all__ = ["Restored", "Restorer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Restart:
    """Facts that every source of one restart needs.

    Attributes:
        mode: `auto`, `predict` or `exact`, as far as this life can follow the configuration.
        checkpoint: this rank's part of the newest checkpoint, in a buffer that is in use; None without one.
        older: the experts that were saved before it, if any were.
        failure_iteration: f, the last step that every rank had finished; None where nothing is lost.
        exact_iteration: of the newest whole state; None without one.
        progress: the ranks' counters at the failure.
        load_seconds: wall time until the sources were known.
    """

    mode: Mode
    checkpoint: Snapshot | None
    older: OlderExperts | None
    failure_iteration: int | None
    exact_iteration: int | None
    progress: Progress | None
    load_seconds: float

    @property
    def checkpoint_iteration(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.iteration


def _report_missing(progress: Progress | None) -> None:
    for rank, why in progress.missing.items() if progress is not None else ():
        logger.warning("the step counter of rank %d %s: the failure step comes from the other ranks", rank, why)


class Restorer:
    """Restores one run into one engine; every method is a collective of all ranks.

    Args:
        target: where copies of checkpoints may come from.
        pool: the host buffers; the newest checkpoint stays in one while the restored state may be rolled back to it.
        inexact: whether a checkpoint is acceptable with experts that were saved before it; False where the user asked
            for mode `exact`.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        target: CheckpointTarget,
        pool: SnapshotPool,
        memory: MemorySources,
        prediction: StatePrediction,
        *,
        inexact: bool = True,
    ) -> None:
        self._job = job
        self._pool = pool
        self._memory = memory
        self._inexact = inexact
        self._injection = Injection(job, memory, prediction, store.frozen)
        self._newest = NewestCheckpoint(job.group, store, target, pool, memory)
        self._checkpoint: Snapshot | None = None

    @property
    def damaged(self) -> list[str]:
        """What is wrong with skipped checkpoints, by iteration."""
        return list(self._newest.damaged.values())

    def restore(self, mode: Mode) -> Restored:
        """Restore the engine to the best available state.

        Args:
            mode: `auto`, `predict` or `exact`, as far as this life can follow the configuration.

        Raises:
            RecoveryError: checkpoints were committed, but none of them can be read.
            RunMismatchError: the checkpoints belong to another model or to other slices of it.
        """
        started = time.perf_counter()
        group = self._job.group
        progress = read_for_all(self._job.config.run_dir, self._job.run.previous_ranks, group)
        if group.rank == 0:
            _report_missing(progress)
        published = None if progress is None else progress.iteration  # the newest that every rank has published
        checkpoint = self._checkpoint = self._newest.load(published, inexact=self._inexact)
        older = None if checkpoint is None else older_experts(checkpoint, group)
        c, shard = (None, None) if checkpoint is None else (checkpoint.iteration, checkpoint.shard)
        found = self._memory.decide(c, published, shard, stale=older is not None, inexact=self._inexact)
        failed_at = 0 if published is None else found.failure_after(published)
        f = failed_at if failed_at > (c or 0) else None  # else nothing is lost
        known = self._circumstances(mode, checkpoint, f)
        choice = choose(candidates(found, c, known, older_experts=older is not None), known)
        seconds = time.perf_counter() - started
        restart = _Restart(mode, checkpoint, older, f, found.exact_iteration, progress, seconds)
        restored = self._first_loaded(choice.order, restart, choice.refusal)
        if not restored.beginning.predicted:
            self.let_go()
        return replace(restored, left=self._memory.left)

    def let_go(self) -> None:
        """The restored state stays: the checkpoint before it is not needed in memory."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            self._pool.release(checkpoint)

    def _circumstances(self, mode: Mode, checkpoint: Snapshot | None, failure_iteration: int | None) -> Circumstances:
        group = self._job.group
        moves = self._job.config.predictor.move
        known = Circumstances(mode, self._inexact, failure_iteration, group.size, moves)
        if checkpoint is None or failure_iteration is None or mode == "exact":
            return known
        # From rank 0: the other ranks do not know the plan.
        planning = Scalars.from_tree(checkpoint.scalars).planning
        names = "memory_interval_iterations", "interval_iterations"
        known_by_0 = [planning.get(name) for name in names]
        if group.rank == 0:
            known_by_0 += [self._injection.failures.since(checkpoint.iteration)]
            known_by_0 += [self._injection.dumps.since(checkpoint.iteration)]
        every, interval, (failures, last_failure), (dumps, _) = group.broadcast(known_by_0)
        between = every is not None and every < (interval or 0)
        return replace(
            known,
            failures=failures,
            last_failure=last_failure,
            dumps=dumps,
            memory_interval_iterations=every if between else None,
        )

    def _first_loaded(self, order: Sequence[Candidate], restart: _Restart, refusal: Refusal | None) -> Restored:
        """Load the first candidate that can be loaded; `refusal` says why none of them is near the failure."""
        for candidate in order:
            try:
                restored = self._load(candidate, restart)
                if refusal is not None and not restored.predicted:
                    return restored.instead(refusal)
                lost = restored.lost_iterations > 0
                return replace(restored, reason=f"mode {restart.mode}: {restored.reason}") if lost else restored
            except RefusedError as error:
                refusal = refusal or error.refusal
            except CheckpointError as error:
                logger.warning("%s cannot be used, and the next state is tried: %s", _place(candidate), error)
        c = restart.checkpoint_iteration
        place = "no checkpoint" if c is None else f"checkpoint {c}"
        raise RecoveryError(
            f"the state in memory could not be read, and {place} holds experts that are older than it is, which mode "
            "'exact' does not take. Nothing was changed: start again, or with mode 'auto'"
        )

    def _load(self, candidate: Candidate, restart: _Restart) -> Restored:
        """Put one state into the engine.

        Raises:
            CheckpointError: it cannot be read, on every rank; the engine is as it was.
            RefusedError: it was refused, on every rank; the engine may hold anything.
        """
        if candidate.in_memory:
            return self._from_memory(candidate, restart)
        if restart.checkpoint is None:
            reason = "no checkpoint has been committed yet"
            return Restored(Beginning.SCRATCH, self._job.adapter.iteration, None, None, reason)
        if candidate.near_failure:
            return self._from_failure(candidate, restart, restart.checkpoint)
        return self._from_checkpoint(candidate, restart, restart.checkpoint)

    def _from_failure(self, candidate: Candidate, restart: _Restart, checkpoint: Snapshot) -> Restored:
        """The checkpoint first, then dumps or a prediction."""
        at = checkpoint.iteration
        sources = all_from("disk", at, len(candidate.parts))
        exact = self._injection.restore(checkpoint, sources, at, restart.failure_iteration, restart.load_seconds)
        if candidate.iteration > at:
            exact = replace(exact, data=self._injection.data_at(exact, restart.progress, candidate.iteration))
        recomputed = candidate.iteration - (restart.exact_iteration or 0) if restart.mode == "auto" else None
        return self._injection.advance(exact, candidate, checkpoint, recomputed)

    def _from_checkpoint(self, candidate: Candidate, restart: _Restart, checkpoint: Snapshot) -> Restored:
        """The newest checkpoint, with older experts from memory where that has nearer ones."""
        nearer = 0
        if restart.older is not None:
            units = experts_of(self._job.adapter.mixture, checkpoint.shard.operators)
            nearer = load_nearer_experts(checkpoint, units, self._memory.own, self._job.group)
        restored = self._whole(candidate, restart, checkpoint, restart.load_seconds)
        if restart.older is None:
            return restored
        older = older_experts(checkpoint, self._job.group) or OlderExperts(0, checkpoint.iteration)
        labelled = _with_older(restored, checkpoint, older)
        if not nearer:
            return labelled
        text = f"{nearer} more come from snapshots in the memory of machines that are left, nearer to the checkpoint"
        return replace(labelled, reason=f"{labelled.reason}; {text}")

    def _from_memory(self, candidate: Candidate, restart: _Restart) -> Restored:
        """A snapshot or window in this machine's host memory, or in that of a peer, from which it is fetched."""
        started = time.perf_counter()
        snapshot = self._loaded_from_memory(candidate, restart.checkpoint)
        older = older_experts(snapshot, self._job.group)
        seconds = restart.load_seconds + time.perf_counter() - started
        try:
            restored = self._whole(candidate, restart, snapshot, seconds)
        finally:
            self._pool.release(snapshot)
        return restored if older is None else _with_older(restored, snapshot, older)

    def _loaded_from_memory(self, candidate: Candidate, checkpoint: Snapshot | None) -> Snapshot:
        own = candidate.parts[self._job.group.rank]
        needed = {entry.name for part in candidate.parts for entry in part.entries}  # other ranks read them, too
        snapshot = acquired(self._pool, own.iteration, needed)
        try:
            self._memory.fetch(candidate.parts)
            # What the snapshot leaves out comes from the checkpoint.
            small = None if checkpoint is None else checkpoint.scalars
            snapshot.scalars = Scalars.with_learned(self._memory.load(own, snapshot.shard), small)
            differing = differing_operator(snapshot, self._job.group)
            if differing is not None:
                raise CheckpointError(f"ranks hold '{differing}' of different iterations: one had skipped a snapshot")
            self._load_frozen(snapshot, alone=checkpoint is None)
        except CheckpointError:
            self._pool.release(snapshot)
            raise
        if not candidate.is_window:  # of which the buffer holds no whole state
            self._pool.seal(snapshot)  # stamped with this life, in case it ends before its first snapshot
        return snapshot

    def _load_frozen(self, snapshot: Snapshot, *, alone: bool) -> None:
        """Give the engine its frozen weights; if one rank has none of them, all raise.

        Args:
            snapshot: from memory.
            alone: there is no other state to continue from.
        """
        problem = None
        try:
            self._injection.load_frozen(snapshot.scalars)
        except CheckpointError as error:
            problem = f"rank {self._job.group.rank}: {error}"
        problems = "; ".join(self._job.group.gather_present(problem))
        if problems and alone:
            raise RecoveryError(
                f"the state of iteration {snapshot.iteration} in memory is all that is left of this run, and cannot be "
                f"continued: {problems}. It stays in memory: start again with those weights, or end it with `cpsr "
                "release` to begin anew"
            )
        if problems:
            raise CheckpointError(problems)

    def _whole(self, candidate: Candidate, restart: _Restart, snapshot: Snapshot, load_seconds: float) -> Restored:
        """Load a whole state into the engine, and state the reason for it."""
        c, f = restart.checkpoint_iteration, restart.failure_iteration
        restored = self._injection.restore(snapshot, candidate.parts, c, f, load_seconds)
        place, lost = _place(candidate), restored.lost_iterations
        whole = f"exactly at {place}; nothing is lost" if candidate.beginning is Beginning.EXACT else f"at {place}"
        return replace(restored, reason=f"{lost} iterations are recomputed from {place}" if lost else whole)

    def inject(self, snapshot: Snapshot) -> None:
        """Put a snapshot of this life into the engine; see `Injection.put`."""
        self._injection.put(snapshot)

    def go_back(self, iteration: int, reason: str) -> Restored:
        """Restore a checkpoint of this life exactly, once later ones are set aside.

        Args:
            iteration: of the checkpoint.
            reason: for the user.

        Raises:
            RecoveryError: it cannot be used.
        """
        started = time.perf_counter()
        snapshot = self._newest.load_again(iteration)
        sources = all_from("disk", iteration, self._job.group.size)
        seconds = time.perf_counter() - started
        restored = self._injection.restore(snapshot, sources, iteration, None, seconds)
        self._pool.release(snapshot)
        return replace(restored, reason=reason)

    def roll_back(self, restored: Restored) -> Restored:
        """Abandon a predicted state: restore the checkpoint before it exactly, which is still in memory.

        Args:
            restored: how this life began, by prediction.
        """
        snapshot = self._checkpoint
        assert snapshot is not None  # until `let_go`
        assert restored.scalars is not None
        self._injection.inject(snapshot)
        older = older_experts(snapshot, self._job.group)
        aside = ""
        if older is not None:
            aside = f", with {older.parameters} parameters of experts from iteration {older.oldest_iteration} on"
        return replace(
            restored,
            beginning=Beginning.EXACT if older is None else Beginning.OLDER_EXPERTS,
            restored_iteration=snapshot.iteration,
            taken_at=older_operators(snapshot),
            reason=f"the predicted state diverged; recomputing from checkpoint {snapshot.iteration}{aside}",
            data=restored.scalars.data,
            cumulative_learning_rate=restored.scalars.cumulative_learning_rate,
        )


def _with_older(restored: Restored, snapshot: Snapshot, older: OlderExperts) -> Restored:
    """The same life, labelled: some experts are of earlier iterations."""
    before = snapshot.iteration - older.oldest_iteration
    return replace(
        restored,
        beginning=Beginning.OLDER_EXPERTS,
        reason=f"{restored.reason}; {older.parameters} parameters of experts are up to {before} iterations older and "
        "go on as they were",
        taken_at=older_operators(snapshot),
    )


def _place(candidate: Candidate) -> str:
    if candidate.is_window:
        return f"the window in memory that begins with iteration {candidate.iteration}"
    if candidate.in_memory:
        return f"the state of iteration {candidate.iteration} in memory"
    return f"checkpoint {candidate.iteration}"
