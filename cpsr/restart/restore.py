"""Restore a run: choose the state on all ranks together, load it into the engine, and check it."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cpsr.checkpoint.progress import Progress, read_progress
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tiers import Source
from cpsr.errors import RecoveryError
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.planner.ways import Prices
from cpsr.restart.choice import Candidate, Circumstances, Mode, candidates, choose
from cpsr.restart.comparison import compared
from cpsr.restart.engine_state import EngineState
from cpsr.restart.ladder import Ladder
from cpsr.restart.near_failure import FromFailure, NearFailure
from cpsr.restart.newest_checkpoint import NewestCheckpoint
from cpsr.restart.older_experts import older_experts, older_operators
from cpsr.restart.prediction import PredictionSettings, StatePrediction
from cpsr.restart.restored import Refusal, Restored
from cpsr.restart.sources import (
    FromCheckpoint,
    FromMemory,
    FromScratch,
    FromWeights,
    Restart,
    StateSource,
    bring,
)
from cpsr.restart.weights_alone import NewestWeights, WeightsAlone
from cpsr.state.scalars import Scalars

__all__ = ["Restored", "Restorer"]

logger = logging.getLogger(__name__)


class Restorer:
    """Restores one run into one engine; every method is a collective of all ranks.

    Args:
        job: of this life.
        store: the run's checkpoints.
        target: where copies of checkpoints may come from.
        pool: the host buffers; the restored checkpoint stays in its recovery buffer.
        ladder: states in host memory.
        prediction: predicts the state at the failure.
        inexact: whether a checkpoint is acceptable with experts that were saved before it, or with weights alone;
            False where the user asked for mode `exact`.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        target: CheckpointTarget,
        pool: SnapshotPool,
        ladder: Ladder,
        prediction: StatePrediction,
        *,
        inexact: bool = True,
    ) -> None:
        self._job = job
        self._pool = pool
        self._ladder = ladder
        self._prediction = prediction
        self._inexact = inexact
        self._engine = EngineState(job.adapter, prediction.predictor, store.frozen)
        weights = NewestWeights(job.adapter, job.group, store, pool)
        self._newest = NewestCheckpoint(job.group, store, target, pool, ladder, weights)
        self._near = NearFailure(job, ladder, prediction, self._engine)

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
        found = self._newest.load(inexact=self._inexact)
        weights = found if isinstance(found, WeightsAlone) else None
        checkpoint = None if isinstance(found, WeightsAlone) else found
        self._pool.occupancy.pin()  # another state that is tried, and cannot be read, must not overwrite the checkpoint
        try:
            sources, refusal, compare = self._choose(mode, checkpoint, weights, started)
            restored = bring(sources, refusal)
        finally:
            self._pool.occupancy.unpin()
        if weights is not None:
            self._pool.release(weights.snapshot)
        if restored is None:
            at = "no checkpoint" if checkpoint is None else f"checkpoint {checkpoint.iteration}"
            raise RecoveryError(
                f"the state in memory could not be read, and {at} holds experts that are older than it is, which mode "
                "'exact' does not take. Nothing was changed: start again, which looks for an older checkpoint; or with "
                "mode 'auto'"
            )
        return replace(restored, left=self._ladder.left, compared=compare(restored.sources))

    def _choose(
        self, mode: Mode, checkpoint: Snapshot | None, weights: WeightsAlone | None, started: float
    ) -> tuple[list[StateSource], Refusal | None, Callable[[Sequence[Source]], str]]:
        group = self._job.group
        c = None if checkpoint is None else checkpoint.iteration
        older = None if checkpoint is None else older_experts(checkpoint, group)
        progress = read_progress(self._job.config.run_dir, self._job.run.previous_ranks)
        published = self._published(progress)
        shard = None if checkpoint is None else checkpoint.shard
        found = self._ladder.decide(c, published, shard, stale=older is not None, inexact=self._inexact)
        failed_at = 0 if published is None else found.failure_after(published)
        at = None if weights is None else weights.snapshot.iteration
        f = failed_at if failed_at > (c or at or 0) else None  # else nothing is lost
        known = self._circumstances(mode, checkpoint, f)
        there = candidates(found, c, known, older_experts=older is not None, weights_iteration=at)
        choice = choose(there, known)
        restart = Restart(mode, c, f, progress, time.perf_counter() - started)
        catch_up = self._job.config.experts.stale == "catch_up"

        def source(candidate: Candidate) -> StateSource:
            if candidate.in_memory:
                small = None if checkpoint is None else checkpoint.scalars
                alone = checkpoint is None and weights is None
                beside = self._engine, group, self._ladder, self._pool
                return FromMemory(candidate, restart, *beside, small, catch_up, alone)
            if weights is not None:
                return FromWeights(candidate, restart, self._engine, weights)
            if checkpoint is None:
                return FromScratch(candidate, self._job.adapter.iteration)
            if candidate.near_failure:
                lost = candidate.iteration - (found.exact_iteration or 0) if mode == "auto" else None
                share = candidate.lost_ranks / group.size
                settings = PredictionSettings(lost, share, older_experts=older is not None)
                return FromFailure(candidate, restart, self._engine, self._near, checkpoint, settings)
            return FromCheckpoint(candidate, restart, self._engine, checkpoint, older, catch_up, group, self._ladder)

        compare = partial(compared, there, c, known)
        return [source(candidate) for candidate in choice.order], choice.refusal, compare

    def _circumstances(self, mode: Mode, checkpoint: Snapshot | None, failure_iteration: int | None) -> Circumstances:
        group = self._job.group
        known = Circumstances(mode, self._inexact, failure_iteration, group.size)
        if checkpoint is None or failure_iteration is None:
            return known
        # From rank 0: the other ranks do not know the plan.
        planning = Scalars.from_tree(checkpoint.scalars).planning
        names = "mode", "memory_interval_iterations", "interval_iterations", "prices"
        planned, every, interval, prices = group.broadcast([planning.get(name) for name in names])
        between = every is not None and every < (interval or 0)
        known = replace(known, prices=Prices.of_tree(prices))
        if mode == "exact":
            return known
        failures, last_failure = self._near.failures.of(checkpoint.iteration)
        dumps, _ = self._near.dumps.of(checkpoint.iteration)
        return replace(
            known,
            planned=planned,
            failures=failures,
            last_failure=last_failure,
            dumps=dumps,
            memory_interval_iterations=every if between else None,
        )

    def _published(self, progress: Progress | None) -> int | None:
        """The newest iteration that every rank has published; None where no rank has."""
        for rank, why in progress.missing.items() if progress is not None and self._job.group.rank == 0 else ():
            logger.warning("the step counter of rank %d %s: the failure step comes from the other ranks", rank, why)
        published: int | None = self._job.group.broadcast(None if progress is None else progress.iteration)
        return published

    def roll_back(self, restored: Restored) -> Restored:
        """Abandon a predicted state: restore the checkpoint in the recovery buffer exactly.

        Args:
            restored: how this life began, by prediction.

        Raises:
            RecoveryError: the recovery buffer does not hold that checkpoint.
        """
        snapshot = self._pool.recovery
        if snapshot is None or snapshot.iteration != restored.checkpoint_iteration or restored.scalars is None:
            raise RecoveryError(
                f"checkpoint {restored.checkpoint_iteration} is no longer in memory; restart the job with mode 'exact' "
                "to recompute from it"
            )
        self.inject(snapshot)
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

    def inject(self, snapshot: Snapshot) -> None:
        """Put a snapshot's tensors and the engine's scalars back, exactly."""
        self._engine.inject(snapshot)
