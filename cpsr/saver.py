"""When this rank saves, and what becomes of it: the training thread's side of checkpoints."""

import statistics
import time
from collections.abc import Callable
from typing import Literal

from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter, SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.group import Group
from cpsr.planner.interval import Plan, fixed_plan, young_plan
from cpsr.record import Recorder
from cpsr.restore import Restored
from cpsr.scalars import Scalars
from cpsr.state import Shard

__all__ = ["Origin", "Saver", "disk_bytes"]

Origin = Literal["trained", "predicted"]

REPLAN_FRACTION = 0.1  # smaller changes are noise of the measurement; the cost is flat around its optimum
MEASURED_SAVES = 8  # the planner's stall and persist times are medians of this many


class Saver:
    """Takes snapshots when they are due, hands them to the writer, and plans the next.

    Everything here runs on the training thread. All ranks call `begin` at the same iterations, because the interval
    changes only by agreement.

    Args:
        adapter: the engine.
        pool: the host buffers.
        writer: persists snapshots in the background.
        store: whose attempt rises when an iteration is saved again.
        recorder: the journal.
        group: the ranks.
        config: the run's configuration.
        restored: where this life begins.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        pool: SnapshotPool,
        writer: CheckpointWriter,
        store: CheckpointStore,
        recorder: Recorder,
        group: Group,
        config: CPSRConfig,
        restored: Restored,
    ) -> None:
        self._adapter = adapter
        self._pool = pool
        self._writer = writer
        self._store = store
        self._recorder = recorder
        self._group = group
        self._config = config
        self._last_due = restored.restored_iteration
        self._saves: list[SaveOutcome] = []
        self._origins: dict[int, Origin] = {}
        self.saved_iteration = restored.checkpoint_iteration  # newest one; on other ranks than 0 it may be abandoned
        fixed = config.checkpoint.interval_iterations
        # Before anything is measured, Young's rule has no inputs and its minimum holds.
        self.plan: Plan = young_plan(0.0, 0.0, 0.0, config.planner) if fixed is None else fixed_plan(fixed)
        recorder.plan(self.plan, restored.restored_iteration)

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint belongs after this iteration."""
        return iteration - self._last_due >= self.plan.interval_iterations

    def begin(self, iteration: int, scalars: Callable[[], Scalars]) -> None:
        """Start the snapshot of a finished iteration; returns while it is being copied."""
        started = time.perf_counter()
        self._last_due = iteration
        try:
            captured = scalars()
            self._origins[iteration] = "predicted" if captured.origin == "predicted" else "trained"
            snapshot = self._pool.begin(self._adapter.shard(), iteration, captured.to_tree())
        except (SaveError, UnsupportedEngineError) as error:
            self._writer.skip(iteration, str(error))
            return
        if snapshot is None:
            self._writer.skip(iteration, "the disk is still writing earlier checkpoints; no host buffer is free")
            return
        snapshot.stall_seconds = time.perf_counter() - started

    def finish(self) -> None:
        """Wait for a running copy: the optimizer is about to change what is copied."""
        try:
            snapshot = self._pool.finish()
        except SaveError as error:
            self._writer.skip(self._last_due, str(error))
            return
        if snapshot is not None:
            self._writer.submit(snapshot)

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being copied or written; False when the time is out."""
        self.finish()
        settled = self._writer.drain(timeout_seconds)
        self.surface()
        return settled

    def discard(self) -> None:
        """Drop a running snapshot (its iteration is about to be undone)."""
        snapshot = self._pool.finish()
        if snapshot is not None:
            self._pool.release(snapshot)

    def save_now(self, iteration: int, scalars: Callable[[], Scalars]) -> bool:
        """Wait until this iteration is committed, saving it first if it is not; a collective."""
        self.finish()
        if self._is_committed(iteration):
            return True
        self._store.attempt += 1  # a save of this iteration may have been abandoned just now
        self.begin(iteration, scalars)
        self.finish()
        return self._is_committed(iteration)

    def restart(self, iteration: int, saved_iteration: int | None) -> None:
        """Count intervals from here, with that checkpoint as the newest one (after a roll-back, or a user's load)."""
        self.surface()  # now: the outcome of a save that was given up must not be taken for that of a later one
        self._last_due = iteration
        self.saved_iteration = saved_iteration

    def _is_committed(self, iteration: int) -> bool:
        """Rank 0's word, once nothing is under way any more on any rank."""
        self._writer.drain(self._config.checkpoint.save_timeout_seconds)
        self.surface()
        committed: bool = self._group.broadcast(self.saved_iteration == iteration)
        return committed

    def surface(self) -> None:
        """Log and record how saves ended since the last call."""
        for outcome in self._writer.outcomes():
            self._recorder.outcome(outcome, self._origins.pop(outcome.iteration, "trained"))
            if outcome.status in ("committed", "written"):
                self.saved_iteration = outcome.iteration
                self._saves = [*self._saves, outcome][-MEASURED_SAVES:]

    def propose(self, iteration_seconds: float) -> Plan | None:
        """A new plan from what was measured, where it differs enough from the one that holds."""
        if self._config.checkpoint.interval_iterations is not None or not self._saves or iteration_seconds <= 0:
            return None
        stall = statistics.median(save.stall_seconds for save in self._saves)
        persist = statistics.median(save.write_seconds + save.commit_seconds for save in self._saves)
        plan = young_plan(stall, iteration_seconds, persist, self._config.planner)
        changed = abs(plan.interval_iterations - self.plan.interval_iterations)
        return plan if changed > REPLAN_FRACTION * self.plan.interval_iterations else None

    def adopt(self, plan: Plan, iteration: int) -> None:
        """Let an agreed plan hold from here on."""
        self.plan = plan
        self._recorder.plan(plan, iteration)


def disk_bytes(shard: Shard, config: CPSRConfig) -> int:
    """What this rank's checkpoints will take: full ones, the one being written, and the weights of the history."""
    checkpoint = config.checkpoint
    rehearsed = int(config.rehearsal.budget_fraction > 0 and config.mode != "exact")  # keeps its checkpoint whole
    full = (checkpoint.full_checkpoints + 1 + rehearsed) * shard.state_bytes
    # Where the planner chooses, the interval is not known yet; what it will need is then said by the disk itself.
    interval = checkpoint.interval_iterations or config.planner.interval_max_iterations
    entries = max(checkpoint.history_min_checkpoints, checkpoint.history_span_iterations // interval + 1)
    weights = sum(operator.parameter.values.nbytes for operator in shard.operators.values())
    history = entries * weights
    if checkpoint.disk_limit_bytes is not None:
        history = min(history, max(checkpoint.disk_limit_bytes - full, 0))  # retention drops history first
    return full + history
