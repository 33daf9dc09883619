"""When this rank saves, and the result: the training thread's side of checkpoints."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.commit import refuse_superseded
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.progress import mark_life
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.resources import kept_bytes
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter, SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.job import Ending, Job, Rewind
from cpsr.journal import CheckpointRow, RankJournal
from cpsr.life.attention import Attention
from cpsr.life.loop import Loop, Steps
from cpsr.life.memory_snapshots import MemorySnapshots
from cpsr.life.policies import Whole
from cpsr.peers.host_memory import HostMemory
from cpsr.planner.plan import Plan
from cpsr.restart.restored_state import Restored
from cpsr.state.shard import Shard

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.planner.live.job_planner import JobPlanner

__all__ = ["Origin", "Saver", "disk_bytes", "report_save"]

logger = logging.getLogger(__name__)

Origin = Literal["trained", "predicted"]


# How long an exit after an error, when a restart is waiting, waits for a running save: what it holds is in shared
# memory as well.
EXIT_GRACE_SECONDS = 10.0


class Saver:
    """Takes snapshots when they are due, passes them to the writer, and reports their costs to the planner.

    All of it runs on the training thread. All ranks call `begin_checkpoint` at the same iterations, because the
    interval changes only by agreement.

    Args:
        store: its attempt rises when an iteration is saved again.
        policy: decides what each checkpoint holds.
        attention: is called for what `after_step` reports, and for another plan.
        exact: whether a state that cannot be saved ends the job; otherwise each checkpoint reports it.

    Attributes:
        saved_iteration: newest checkpoint; on ranks other than 0 it may be abandoned.
        on_saved: called with `saved_iteration`, when that is known.
        copied: the snapshot of a checkpoint that `finish` has completed at its last call; None: of none.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        memory: HostMemory,
        target: CheckpointTarget,
        planner: "JobPlanner",
        restored: Restored,
        loop: Loop,
        steps: Steps,
        policy: Whole,
        attention: Attention,
        *,
        exact: bool,
    ) -> None:
        self._exact, self._attention = exact, attention
        self._job, self._adapter, self._group, self._journal = job, job.adapter, job.group, job.journal
        self._config: CPSRConfig = job.config
        self.store = store
        self.pool = memory.pool
        self._host_memory = memory
        self._target = target
        self._writer = CheckpointWriter(
            store,
            self.pool,
            job.config.checkpoint.save_timeout_seconds,
            Retention(disk_limit_bytes=job.config.checkpoint.disk_limit_bytes),
            attention.call,
        )
        self._planner = planner
        self._loop, self._steps = loop, steps
        self._counted_from = self._last_due = restored.restored_iteration
        self._origins: dict[int, Origin] = {}
        self._policy = policy
        self.memory = MemorySnapshots(job, memory, planner, policy, self._small, restored.restored_iteration)
        self._begun_at = time.perf_counter()
        self._interval_seconds = 0.0  # between the last two checkpoints that were begun
        self.saved_iteration = restored.checkpoint_iteration
        self.copied: Snapshot | None = None
        self.on_saved: Callable[[int], None] = lambda iteration: None
        planning = {} if restored.scalars is None else restored.scalars.planning
        self.plan = planner.first_plan(planning)
        job.journal.record(self.plan.row(job.journal.life, restored.restored_iteration))
        target.on_report = attention.call
        target.start(store)

    def after_step(self) -> None:
        """A step is complete: report on saves."""
        self.surface()
        self._target.notify(self.saved_iteration)
        self._report_copies()

    def _small(self) -> dict[str, Any]:
        """The small state of a snapshot in host memory."""
        return replace(self._loop.state.capture(whole=False), experts=self._policy.state_dict()).without_learned()

    # Checkpoints

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is due after this iteration."""
        return self.pool.obstacle is None and iteration >= self.due_at

    @property
    def due_at(self) -> int:
        """The iteration of the next checkpoint."""
        return self._counted_from + self.plan.interval_iterations

    def count_from(self, iteration: int) -> None:
        """Count the iterations to the next checkpoint from this one, at which one was due."""
        self._counted_from = iteration

    def begin_checkpoint(self, iteration: int, *, whole: bool = False, own: bool = False) -> None:
        """Start the snapshot of a checkpoint; returns while it is being copied; a collective.

        Args:
            iteration: the finished one.
            whole: with everything.
            own: this rank copies all of its state, also what others of its machine could copy for it.
        """
        self._share_alike()
        contents = self._policy.due(iteration, whole=whole)
        if own:
            contents = replace(contents, left=None)
        if self.store.frozen is not None:
            self.store.frozen.agree(self._group)
        self._begin(iteration, contents)
        self.memory.after_checkpoint(iteration)

    def _share_alike(self) -> bool:
        """Learn from rank 0 what commits found; returns whether it is new that ranks differ.

        What is equal one rank copies for others. If it differs, each rank writes its own state.
        """
        if self._policy.writes is None:
            return False
        alike: bool | None = self._group.broadcast(self.store.alike)
        if alike is not False:
            self._policy.share_copies(bool(alike) and self._group.all(self.pool.shares))
            return False
        self._policy.write_own()
        self._host_memory.send_whole()
        if self.store.drifted is not None:
            self._journal.event(
                "ranks differ",
                f"{self.store.drifted}. State that one rank wrote for others is not committed. From now on each rank "
                "writes all of its own state, in later lives too. If the ranks "
                "should train one model, look for gradients that are not averaged, or for a faulty machine; once the "
                f"ranks are equal, {self._config.run_dir / DIFFERING} may be removed",
                level=logging.ERROR,
            )
        return True

    def _begin(self, iteration: int, contents: Contents) -> None:
        started = time.perf_counter()
        self._last_due, self.copied = iteration, None
        self.memory.at_checkpoint(iteration)  # also where this rank alone has no buffer
        self._planner.times.begun()
        self._interval_seconds, self._begun_at = started - self._begun_at, started
        self.memory.begin(iteration, contents, partial(self._captured, iteration), self._skip, disk=True)

    def _captured(self, iteration: int) -> dict[str, Any]:
        """The small state of a checkpoint."""
        planning = self._planner.state_dict(self.plan)
        self._steps.flush(wait=False)  # of those that a device still has, the checkpoint takes them itself
        small = replace(self._loop.state.capture(), planning=planning, experts=self._policy.state_dict())
        captured = small.to_tree()
        self._origins[iteration] = "predicted" if captured["origin"] == "predicted" else "trained"
        return captured

    def finish(self) -> None:
        """Wait for a running copy, whose source is about to change; the writer gets that of a checkpoint."""
        self.copied = None
        self.memory.before_update()
        running = self.pool.running
        try:
            snapshot = self.pool.finish()
        except (SaveError, UnsupportedEngineError) as error:
            if running is not None and not running.disk:
                self.memory.failed(running.iteration, error)
            else:
                self._skip(self._last_due, error)
            return
        if snapshot is None:
            return
        self._policy.copied(snapshot)
        if snapshot.disk:
            self.copied = snapshot
            self._writer.submit(snapshot)
        else:
            self.memory.complete(snapshot)

    def _skip(self, iteration: int, error: SaveError | UnsupportedEngineError | None) -> None:
        """Report why a checkpoint is not taken: the error, or that no buffer is free.

        Raises:
            UnsupportedEngineError: no later one could be taken either, and the mode is exact.
        """
        self._policy.saved(None)  # now: the outcome may be queued behind a slow save
        if error is None:
            self._writer.skip(iteration, "no host buffer is free: the disk is still writing earlier checkpoints")
            return
        lasting = isinstance(error, UnsupportedEngineError)
        if lasting and self._exact:
            newest = "there is none" if self.saved_iteration is None else f"the newest is of {self.saved_iteration}"
            raise UnsupportedEngineError(
                f"no checkpoint can be taken of iteration {iteration} or later ({newest}), and in mode 'exact' CPSR "
                f"does not train on without: {error}"
            ) from error
        self._writer.skip(iteration, f"{error}. No later checkpoint can be taken either" if lasting else str(error))

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being written; False after the timeout."""
        return self._writer.drain(timeout_seconds)

    def discard(self) -> None:
        """Drop a running snapshot (its iteration is about to be undone)."""
        self.memory.before_update()
        snapshot = self.pool.finish()
        if snapshot is not None:
            self.pool.release(snapshot)

    def save_now(self, iteration: int) -> bool:
        """Wait until this iteration is committed as a whole, saving it first if necessary; a collective.

        Returns:
            False where it is not, also where a disk does not answer.
        """
        self.finish()
        if not self._group.all(self.drain(self._config.checkpoint.save_timeout_seconds)):
            return False  # another save would wait behind the one that hangs
        if self._is_committed(iteration):
            return True
        self.store.attempt += 1  # a save of this iteration may be sparse, or have been abandoned just now
        if self._save_whole(iteration):
            return True
        # If ranks were found to differ in this one, save once more with each rank writing its own.
        if not self._share_alike():
            return False
        self.store.attempt += 1
        return self._save_whole(iteration)

    def _save_whole(self, iteration: int) -> bool:
        self.count_from(iteration)
        self.begin_checkpoint(iteration, whole=True)
        self.finish()
        return self._is_committed(iteration)

    def _is_committed(self, iteration: int) -> bool:
        """Whether this iteration is committed as a whole, according to rank 0, once no rank is writing."""
        self._writer.drain(self._config.checkpoint.save_timeout_seconds)
        self.surface()
        # A sparse checkpoint of this iteration may be committed, beside which a whole one has failed.
        return bool(self._group.broadcast(self.saved_iteration == iteration and self._policy.is_whole(iteration)))

    def surface(self) -> None:
        """Log and record how saves ended since the last call."""
        for outcome in self._writer.outcomes():
            report_save(self._journal, outcome, self._origins.pop(outcome.iteration, "trained"))
            if outcome.status in ("committed", "written"):
                self.saved_iteration = outcome.iteration
                self._planner.note(outcome)
                self.on_saved(outcome.iteration)
            self._policy.saved(outcome, self._interval_seconds)

    def _report_copies(self) -> None:
        for event in self._target.reports():
            self._journal.event(*event)

    # Rewinding and closing

    def set_aside(self, to: Rewind) -> None:
        """Set aside checkpoints of discarded steps, on all ranks together.

        Raises:
            SaveError: a disk did not answer in time.
            SupersededError: a newer life has begun.
        """
        timeout = self._config.checkpoint.save_timeout_seconds
        if not self._group.all(self.drain(timeout)):
            raise SaveError(
                f"a rank's disk did not finish a checkpoint within {timeout:g} s, and checkpoints must be set aside "
                f"now ({to.reason}); nothing was set aside: restart the job when the disk answers"
            )
        refuse_superseded(self._config.run_dir, self._journal.life)
        self.store.attempt += 1  # the same iterations may be saved again
        self._host_memory.forget_after(to.last_kept_iteration)
        if self._group.rank == 0:
            mark_life(self._config.run_dir, self._journal.life, self._host_memory.branch)
        self._policy.rewound()
        self.store.abandon_after(to.last_kept_iteration, to.reason)
        self._group.barrier()

    def rewound(self, to: Rewind) -> None:
        """Count intervals from the iteration of the state; its checkpoint becomes the newest one."""
        self.surface()  # now: the outcome of a discarded save must not be taken for that of a later one
        self.count_from(to.iteration)
        self.memory.restart(to.iteration)
        self._last_due = to.iteration
        self.saved_iteration = to.checkpoint_iteration

    def close(self, ending: Ending) -> None:
        """Wait for running writes and copy the last checkpoint: only briefly after an error, when a restart waits."""
        timeout = self._config.checkpoint.save_timeout_seconds
        try:
            self._writer.close(timeout if ending.in_order else EXIT_GRACE_SECONDS)
            self.surface()
        finally:
            self._target.notify(self.saved_iteration)
            self._target.close(timeout if ending.in_order else 0.0)
            self._report_copies()

    # The plan

    @property
    def plan(self) -> Plan:
        """The intervals, agreed on by all ranks."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._attention.call()  # what is due may be due sooner

    def adopt(self, plan: Plan, iteration: int) -> None:
        """Use an agreed plan from here on."""
        self.plan = plan
        self._journal.record(plan.row(self._journal.life, iteration))


def report_save(journal: RankJournal, outcome: SaveOutcome, origin: Origin) -> None:
    """Report how a save ended: an event if it was not committed, and a row in the journal on rank 0."""
    if outcome.status in ("failed", "skipped"):
        failed = outcome.status == "failed"
        what = f"checkpoint {outcome.iteration} {outcome.status}{f' on rank {journal.rank}' if failed else ''}"
        # Rank 0 learns why another rank has skipped one, and says so for all.
        level = logging.ERROR if failed else logging.WARNING if journal.rank == 0 else logging.DEBUG
        message = f"{what}: {outcome.reason}; training continues, earlier checkpoints are kept"
        journal.event(f"checkpoint {outcome.status}", message, outcome.iteration, level)
    if outcome.status == "written" or journal.rank != 0:
        return
    if outcome.status == "committed":
        logger.info(
            "checkpoint %d committed: %.1f MB, stall %.1f ms, durable after %.2f s",
            outcome.iteration,
            outcome.bytes / 1e6,
            1e3 * outcome.stall_seconds,
            outcome.write_seconds + outcome.commit_seconds,
        )
    journal.record(
        CheckpointRow(
            life=journal.life,
            iteration=outcome.iteration,
            status=outcome.status,
            reason=outcome.reason,
            bytes=outcome.bytes,
            stall_seconds=outcome.stall_seconds,
            write_seconds=outcome.write_seconds,
            commit_seconds=outcome.commit_seconds,
            origin=origin,
        )
    )
    journal.gather_events()


def disk_bytes(shard: Shard, config: CPSRConfig, share: float = 1.0) -> int:
    """Disk space of this rank's checkpoints: full ones, the one being written, and the weights of the history."""
    weights = sum(operator.parameter.values.nbytes for operator in shard.operators.values())
    return round(share * kept_bytes(shard.state_bytes, weights, config))
