"""When this rank saves, and what becomes of it: the training thread's side of checkpoints."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from cpsr.checkpoint.shared import Shared
from cpsr.checkpoint.snapshot import Part, Snapshot, SnapshotPool
from cpsr.checkpoint.sparse import Sparse
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter, SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.expert_saving import ExpertSaving
from cpsr.group import Group
from cpsr.planner.cadence import Cadence, Savers
from cpsr.planner.plan import Plan
from cpsr.planning.job_planner import JobPlanner
from cpsr.predictor.prior import MIN_CHECKPOINTS
from cpsr.record import Recorder
from cpsr.restore import Restored
from cpsr.scalars import Scalars
from cpsr.state import Shard
from cpsr.write_sharing import WriteSharing

__all__ = ["Origin", "Saver", "disk_bytes"]

Origin = Literal["trained", "predicted"]
_PARTS: dict[Savers, Part] = {"all": "whole", "this": "weights", "others": "carried"}


class Saver:
    """Takes snapshots when they are due, hands them to the writer, and tells the planner what they cost.

    Everything here runs on the training thread. All ranks call `begin` at the same iterations, because the interval
    changes only by agreement.

    Args:
        adapter: the engine.
        pool: the host buffers.
        writer: persists snapshots in the background.
        store: whose attempt rises when an iteration is saved again.
        recorder: the journal.
        group: the ranks.
        planner: says with which plan a life begins, and is told of every save.
        config: the run's configuration.
        restored: where this life begins.
        experts: says which experts a checkpoint saves; None: all of them.
        writes: says which rank writes what several hold alike; None: each.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        pool: SnapshotPool,
        writer: CheckpointWriter,
        store: CheckpointStore,
        recorder: Recorder,
        group: Group,
        planner: JobPlanner,
        config: CPSRConfig,
        restored: Restored,
        experts: ExpertSaving | None = None,
        writes: WriteSharing | None = None,
    ) -> None:
        self._adapter = adapter
        self._pool = pool
        self._writer = writer
        self._store = store
        self._recorder = recorder
        self._group = group
        self._planner = planner
        self._config = config
        self._cadence = Cadence(group.rank, restored.restored_iteration)
        self._last_due = restored.restored_iteration
        self._origins: dict[int, Origin] = {}
        self._partial: set[int] = set()  # partial checkpoints under way
        self._partial_iteration: int | None = None  # newest partial one; it stands on the disk where it was committed
        self._carried: Snapshot | None = None  # handed over when the other ranks' copies are
        self._experts = experts
        self._writes = writes
        self._all_experts = True  # until a checkpoint of this attempt holds them, there is nothing to carry along
        self._sparse_iterations: set[int] = set()  # since the last that holds all experts of its own iteration
        if experts is not None and any(source.tier == "memory" for source in restored.sources):
            # What is in the engine may have younger experts than the checkpoint of its iteration, if there is one.
            self._sparse_iterations.add(restored.restored_iteration)
        self._begun_at = self._copying_since = time.perf_counter()
        self._interval_seconds = 0.0  # between the last two whole checkpoints that were begun
        # Newest whole one; on other ranks than 0 it may be abandoned.
        self.saved_iteration = restored.checkpoint_iteration
        planning = {} if restored.scalars is None else restored.scalars.planning
        self.plan: Plan = planner.first_plan(planning)
        recorder.plan(self.plan, restored.restored_iteration)
        self._warned = False
        self._warn_of_short_history()

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint belongs after this iteration."""
        return self._cadence.is_due(self.plan, iteration)

    def take(self, iteration: int) -> Part:
        """Count the checkpoint that is due after this iteration; returns what of it is this rank's, for `begin`."""
        return _PARTS[self._cadence.take(self.plan, iteration)]

    def begin(
        self, iteration: int, part: Part, scalars: Callable[[], Scalars], place: Callable[[], dict[str, Any]]
    ) -> None:
        """Start the snapshot of a finished iteration that is due; returns while it is being copied.

        Args:
            iteration: that is finished.
            part: what `take` said.
            scalars: captures the small state for a checkpoint of all ranks.
            place: captures what a partial checkpoint keeps of it.
        """
        if part == "whole":
            self._begin_for_all(iteration, scalars, whole=False)
            return
        self._partial.add(iteration)
        if part == "carried":
            self._carried = Snapshot(iteration, Shard({}), place(), part=part)
        else:
            self._begin(iteration, place, part)

    def _with_plan(self, scalars: Scalars) -> dict[str, Any]:
        experts = {} if self._experts is None else self._experts.state_dict()
        return replace(scalars, planning=self._planner.state_dict(self.plan), experts=experts).to_tree()

    def _begin_for_all(self, iteration: int, scalars: Callable[[], Scalars], *, whole: bool) -> None:
        """Start the snapshot for a checkpoint of all ranks, which agree on who writes what of it."""
        chosen = self._chosen(iteration, whole=whole)
        sparse = None
        if self._experts is not None:
            units = self._experts.units
            saved = frozenset(name for name, unit in units.items() if chosen is None or unit in chosen)
            copied = self._experts.copied
            names = None if copied is None else frozenset(name for name, unit in units.items() if unit in copied)
            sparse = Sparse(frozenset(units), saved, names)
        part: Part = "sparse" if chosen is not None and self._config.experts.memory == "saved" else "whole"
        self._begin(iteration, lambda: self._with_plan(scalars()), part, sparse, self._shared(chosen))

    def _chosen(self, iteration: int, *, whole: bool) -> frozenset[str] | None:
        """Experts that the next checkpoint saves, agreed by all ranks; None for all there are."""
        if self._experts is None:
            return None
        chosen = self._experts.choose(
            self.saved_iteration,
            whole=whole or self._all_experts,
            source_iteration=self._pool.source_iteration,
        )
        self._experts.began(iteration)
        self._all_experts = False
        if chosen is None:
            self._sparse_iterations.clear()
        else:
            self._sparse_iterations.add(iteration)
        return chosen

    def _shared(self, chosen: frozenset[str] | None) -> Shared | None:
        """What of this rank's operators others write, agreed by all ranks; None where each writes its own."""
        self._stop_sharing()
        return None if self._writes is None else self._writes.shared(chosen)

    def _stop_sharing(self) -> bool:
        """From now on each rank writes its own, where rank 0 has found that they differ; whether that is new."""
        if self._writes is None or self._group.all(self._store.drifted is None):
            return False
        self._writes = None
        if self._experts is not None:
            self._experts.shares_rest(None)
        if self._store.drifted is not None:
            self._recorder.event(
                "ranks differ",
                f"{self._store.drifted}. What one of them wrote for both is not committed, and from now on each writes "
                "all that it holds, in later lives too, as with checkpoint.replicated 'each'. Where the ranks are to "
                "train one model, look for gradients that are not averaged, or for a faulty machine; once they are "
                f"alike, {self._config.run_dir / DIFFERING} may be removed",
                level=logging.ERROR,
            )
        return True

    def _begin(
        self,
        iteration: int,
        scalars: Callable[[], dict[str, Any]],
        part: Part = "whole",
        sparse: Sparse | None = None,
        shared: Shared | None = None,
    ) -> None:
        started = time.perf_counter()
        self._last_due = iteration
        if part in ("whole", "sparse"):
            self._planner.begun()
            self._interval_seconds, self._begun_at = started - self._begun_at, started
        try:
            captured = scalars()
            self._origins[iteration] = "predicted" if captured["origin"] == "predicted" else "trained"
            snapshot = self._pool.begin(self._adapter.shard(), iteration, captured, part, sparse, shared)
        except (SaveError, UnsupportedEngineError) as error:
            self._all_experts = True  # at once: its outcome may wait behind a slow save
            self._writer.skip(iteration, str(error))
            return
        if snapshot is None:
            self._all_experts = True
            self._writer.skip(iteration, "the disk is still writing earlier checkpoints; no host buffer is free")
            return
        if sparse is not None and snapshot.sparse != sparse:
            # This rank alone had to copy all experts: next time all do, or replicas of one stay of different ages.
            self._all_experts = True
        self._copying_since = time.perf_counter()
        snapshot.stall_seconds = self._copying_since - started

    def before_update(self) -> None:
        """Wait for a running copy: the optimizer is about to change what is copied."""
        overlap_seconds = time.perf_counter() - self._copying_since
        snapshot = self.finish()
        if snapshot is not None and self._experts is not None and self._config.experts.memory == "overlapped":
            self._experts.note_copied(snapshot.copied_bytes, snapshot.copy_seconds, overlap_seconds)

    def finish(self) -> Snapshot | None:
        """Wait for a running copy, and give what was copied, if any was."""
        carried, self._carried = self._carried, None
        if carried is not None:
            self._writer.submit(carried)
        try:
            snapshot = self._pool.finish()
        except SaveError as error:
            self._all_experts = True
            self._writer.skip(self._last_due, str(error))
            return None
        if snapshot is not None:
            self._writer.submit(snapshot)
        return snapshot

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being copied or written; False when the time is out."""
        self.finish()
        settled = self._writer.drain(timeout_seconds)
        self.surface()
        return settled

    def discard(self) -> None:
        """Drop a running snapshot (its iteration is about to be undone)."""
        self._carried = None
        snapshot = self._pool.finish()
        if snapshot is not None:
            self._pool.release(snapshot)

    def save_now(self, iteration: int, scalars: Callable[[], Scalars]) -> bool:
        """Wait until this iteration is committed with all there is, saving it first if it is not; a collective."""
        self.finish()
        standing = self._committed_at(iteration)
        if standing == "whole":
            return True
        self._store.attempt += 1  # a save of this iteration may have been abandoned just now
        if standing == "partial":
            self._store.abandon_after(iteration - 1, "a whole checkpoint takes its place")
            self._group.barrier()
        if self._save_whole(iteration, scalars):
            return True
        # There is no next checkpoint of which each could write its own, where ranks were found to differ in this one.
        if not self._stop_sharing():
            return False
        self._store.attempt += 1
        return self._save_whole(iteration, scalars)

    def replace(self, iteration: int, scalars: Callable[[], Scalars]) -> bool:
        """Save an iteration that `save_now` has committed once more; a collective.

        Returns:
            Whether the new one is committed. Else, also where this process is killed meanwhile, the old one stands.
        """
        self._store.attempt += 1
        self._store.begin_replacement(iteration)
        self._group.barrier()
        standing, self.saved_iteration = self.saved_iteration, None
        replaced = self._save_whole(iteration, scalars)
        self.saved_iteration = standing
        self._store.settle_replacement()
        return replaced

    def _save_whole(self, iteration: int, scalars: Callable[[], Scalars]) -> bool:
        self._cadence.restart(iteration)
        self._begin_for_all(iteration, scalars, whole=True)
        self.finish()
        return self._committed_at(iteration) == "whole"

    def restart(self, iteration: int, saved_iteration: int | None) -> None:
        """Count intervals from here, with that checkpoint as the newest one (after a roll-back, or a user's load)."""
        self.surface()  # now: the outcome of a save that was given up must not be taken for that of a later one
        self._cadence.restart(iteration)
        self._last_due = iteration
        self.saved_iteration = saved_iteration
        self._partial_iteration = None
        self._all_experts = True

    def _committed_at(self, iteration: int) -> Literal["whole", "partial", "nothing"]:
        """Rank 0's word, once nothing is under way any more on any rank."""
        self._writer.drain(self._config.checkpoint.save_timeout_seconds)
        self.surface()
        standing: Literal["whole", "partial", "nothing"] = "nothing"
        if self.saved_iteration == iteration:
            standing = "partial" if iteration in self._sparse_iterations else "whole"
        elif self._partial_iteration == iteration:
            standing = "partial"
        agreed: Literal["whole", "partial", "nothing"] = self._group.broadcast(standing)
        return agreed

    def surface(self) -> None:
        """Log and record how saves ended since the last call."""
        for outcome in self._writer.outcomes():
            origin = self._origins.pop(outcome.iteration, "trained")
            if outcome.iteration in self._partial:
                self._partial.remove(outcome.iteration)
                self._surface_partial(outcome, origin)
                continue
            self._recorder.outcome(outcome, origin)
            if outcome.status in ("committed", "written"):
                self.saved_iteration = outcome.iteration
                self._planner.note(outcome)
                if self._experts is not None:
                    self._experts.note_saved(outcome.written_bytes, outcome.write_seconds, self._interval_seconds)
            else:
                self._all_experts = True  # what it was to carry along may be out of reach

    def _surface_partial(self, outcome: SaveOutcome, origin: Origin) -> None:
        """It is no checkpoint to whoever reads the journal's, and says nothing of what one costs."""
        if outcome.status not in ("committed", "written"):
            self._recorder.outcome(outcome, origin)
            return
        self._partial_iteration = outcome.iteration
        if outcome.status == "committed":
            durable = outcome.write_seconds + outcome.commit_seconds
            self._recorder.event(
                "partial checkpoint",
                f"checkpoint {outcome.iteration} holds the weights of the ranks that were due, and the others' of "
                f"before: durable after {durable:.2f} s, stall {1e3 * outcome.stall_seconds:.1f} ms. {outcome.reason}",
                outcome.iteration,
            )

    def adopt(self, plan: Plan, iteration: int) -> None:
        """Let an agreed plan hold from here on."""
        self.plan = plan
        self._recorder.plan(plan, iteration)
        self._warn_of_short_history()

    def _warn_of_short_history(self) -> None:
        """Say once where experts are saved too rarely for the history to hold what a prediction of them needs."""
        rounds = None if self._experts is None else self._experts.checkpoints_of_a_round
        if rounds is None or self._warned or self._group.rank != 0:
            return
        needed = MIN_CHECKPOINTS * rounds * self.plan.interval_iterations
        span = self._config.checkpoint.history_span_iterations
        if needed > span:
            self._warned = True
            self._recorder.event(
                "experts saved rarely",
                f"each expert is in one of {rounds} checkpoints, every {rounds * self.plan.interval_iterations} "
                f"iterations: for {MIN_CHECKPOINTS} snapshots of it, which a prediction needs, "
                f"checkpoint.history_span_iterations must be {needed} and is {span}. Until then experts go on as they "
                "were saved; or raise experts.experts_per_layer",
                level=logging.WARNING,
            )


def disk_bytes(shard: Shard, config: CPSRConfig, share: float = 1.0) -> int:
    """What this rank's checkpoints will take: full ones, the one being written, and the weights of the history.

    Args:
        shard: what it holds.
        config: the run's.
        share: of it that this rank writes.
    """
    checkpoint = config.checkpoint
    rehearsed = int(config.rehearsal.budget_fraction > 0 and config.mode != "exact")  # keeps its checkpoint whole
    copied = int(checkpoint.target is not None)  # stays whole while it is read
    full = (checkpoint.full_checkpoints + 1 + rehearsed + copied) * shard.state_bytes
    # Where the planner chooses, the interval is not known yet; what it will need is then said by the disk itself.
    interval = checkpoint.interval_iterations or config.planner.interval_max_iterations
    entries = checkpoint.history_checkpoints(interval)
    weights = sum(operator.parameter.values.nbytes for operator in shard.operators.values())
    history = entries * weights
    if checkpoint.disk_limit_bytes is not None:
        history = min(history, max(checkpoint.disk_limit_bytes - full, 0))  # retention drops history first
    return round(share * (full + history))
