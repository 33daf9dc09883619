"""Opens a run before the restore: its directory, journal, store and host memory."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from cpsr.checkpoint.commit import Missing
from cpsr.checkpoint.fence import claim_life, refuse_superseded, superseded
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.memory_removal import bytes_in_memory
from cpsr.checkpoint.progress import has_held_states, mark_life, newest_life
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.resources import check_disk, check_host_memory
from cpsr.checkpoint.run_directory import RunDirectory, open_run
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.config import CPSRConfig, ExpertsConfig
from cpsr.doctor.start import report_machine
from cpsr.elastic.rescue import Rescue
from cpsr.elastic.resharding import Resharding
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.moe.naming import experts_of
from cpsr.errors import SaveError
from cpsr.experts.completeness import wrong_experts
from cpsr.experts.saving import ExpertSaving
from cpsr.experts.units import trained_experts
from cpsr.job import Ending, Job, Rewind
from cpsr.journal import open_journal
from cpsr.life.loop import Loop
from cpsr.life.step_log import StepLog
from cpsr.peers.host_memory import HostMemory, claim_memory
from cpsr.ranks.group import Group
from cpsr.ranks.heartbeat import newest_claim
from cpsr.ranks.link import Opened, report
from cpsr.saving.saver import disk_bytes
from cpsr.service.process import ServiceProcess
from cpsr.state.frozen import FrozenWeights
from cpsr.state.shard import Shard

__all__ = ["OpenRun", "open_for_life"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """A run that is open for a life.

    Attributes:
        job: this rank's.
        steps: takes finished iterations.
        store: checkpoints on the disk.
        memory: host buffers, which outlive the process.
        target: copies of checkpoints elsewhere.
        experts: chooses the experts that a checkpoint saves; None: all of them.
        writes: assigns replicated state to the ranks that write it; None: each rank writes its own.
        previous_life: number and branch of the life before this one.
        previous_held: whether every rank had a state of it in host memory.
        free_bytes: host memory that CPSR leaves free.
    """

    job: Job
    steps: StepLog
    store: CheckpointStore
    memory: HostMemory
    target: CheckpointTarget
    experts: ExpertSaving | None
    writes: WriteAssignment | None
    previous_life: tuple[int, int]
    previous_held: bool
    free_bytes: int

    def set_aside(self, to: Rewind, drain: Callable[[float], bool]) -> None:
        """Set aside checkpoints of discarded steps, on all ranks together.

        Args:
            to: where the run continues.
            drain: waits for running saves, for so many seconds at most.

        Raises:
            SaveError: a disk did not answer in time.
            SupersededError: a newer life has begun.
        """
        job, timeout = self.job, self.job.config.checkpoint.save_timeout_seconds
        if not job.group.all(drain(timeout)):
            raise SaveError(
                f"a rank's disk did not finish a checkpoint within {timeout:g} s, and checkpoints must be set aside "
                f"now ({to.reason}); nothing was set aside: restart the job when the disk answers"
            )
        refuse_superseded(job.config.run_dir, job.journal.life)
        self.store.attempt += 1  # the same iterations may be saved again
        self.memory.forget_after(to.last_kept_iteration)
        if job.group.rank == 0:
            mark_life(job.config.run_dir, job.journal.life, self.memory.branch)
        if self.experts is not None:
            self.experts.forget()
        self.store.abandon_after(to.last_kept_iteration, to.reason)
        job.group.barrier()


def open_for_life(loop: Loop, config: CPSRConfig, opened: ExitStack, ending: Ending) -> OpenRun:
    """Open all that a life needs before it restores; a collective.

    Args:
        loop: the training.
        config: as given by the user.
        opened: closes the opened parts in reverse order.
        ending: of the life; final when it closes.

    Raises:
        CPSRError: see `CPSRRecovery`.
    """
    group, adapter, shard = Group(), loop.adapter, loop.adapter.shard()
    opened.callback(_close_group, group, ending)
    # Mode exact restores no expert older than its checkpoint, and so saves all of them.
    experts = None if config.mode == "exact" else ExpertSaving.of(adapter, shard, _repeatable(config), group)
    if experts is not None:
        opened.callback(experts.close)
    writes = _write_assignment(adapter, config, group, experts, shard)
    target = CheckpointTarget(config.checkpoint, config.run_dir, group)
    target.adopt_run()
    run, free_bytes = _open_directory(adapter, config, group, writes, shard)
    # A life that has claimed its number may not have trained.
    known = [*newest_life(config.run_dir), has_held_states(config.run_dir), newest_claim(config.run_dir)]
    life, branch, held, claimed = group.broadcast(known)
    journal = open_journal(config.run_dir, group, config.mode, max(life, claimed), config.journal.full_steps)
    job, steps = Job(adapter, group, config, run, shard, journal), StepLog(journal, loop.losses)
    opened.callback(_close_journal, job, steps, ending)
    claim_life(config.run_dir, journal.life, group)
    _start_beside(job, opened)
    store = _open_store(job, loop.state.frozen)
    job = replace(job, config=_predictable(job))
    if run.resized:  # before this life's own buffers take the place of what they have left
        Rescue(job, (life, branch), store.frozen).save()
        life, branch, held = journal.life, 0, False
    use = loop.learning.open(job, store)
    if use == "nothing":
        job = replace(job, config=job.config.model_copy(update={"mode": "exact"}))
    turns = experts is not None and config.memory.interval_iterations is not None
    memory = HostMemory(job, experts.units if experts is not None and turns else None)
    opened.callback(lambda: memory.close(in_order=ending.in_order, safe=ending.last_state_is_safe))
    if not memory.survives:
        job = replace(job, config=_without_shared_memory(job.config))
    if adapter.pipeline_stage is not None:
        memory.pool.copier.copy_in(loop.learning.bubbles)
    return OpenRun(job, steps, store, memory, target, experts, writes, (life, branch), held, free_bytes)


def _repeatable(config: CPSRConfig) -> ExpertsConfig:
    """With windows no layer has more capacity for a while: a repeated iteration would drop other tokens."""
    if not config.replay.enabled:
        return config.experts
    return config.experts.model_copy(update={"recovering_capacity_fraction": 0.0})


def _open_directory(
    adapter: EngineAdapter, config: CPSRConfig, group: Group, writes: WriteAssignment | None, shard: Shard
) -> tuple[RunDirectory, int]:
    """The run's directory, after a check that the machine has room.

    Returns:
        The directory, and the bytes of host memory that are left for this rank.
    """
    description = adapter.describe()
    run = open_run(config.run_dir, group, config.mode, description, config.elastic)
    claim_memory(run, group, shared=config.checkpoint.shared_memory)
    # Memory and disk space of an earlier life count as part of the requirement, since this life reuses them.
    reusable_bytes = bytes_in_memory(run.run_id, run.local_ranks)
    required_bytes = SnapshotPool.required_bytes(shard, config.memory.buffers)
    free_bytes = check_host_memory(required_bytes, len(run.local_ranks), reusable_bytes)
    share = 1.0 if writes is None else writes.share_bytes / max(1, shard.state_bytes)
    holders = 1 if config.checkpoint.replicated == "each" else len(adapter.data_parallel_ranks)
    own = disk_bytes(shard, config, share) + _frozen_bytes(shard, description["module"]["frozen"], holders)
    check_disk(config.run_dir, max(int(group.sum(own)) - run.checkpoint_bytes(), 0))
    return run, max(0, free_bytes - config.learning.memory_limit_bytes)


def _frozen_bytes(shard: Shard, shapes: Mapping[str, Sequence[int]], holders: int) -> int:
    """What this rank writes of the parameters outside the optimizer, once in a run.

    Args:
        shard: of this rank.
        shapes: of the whole parameters.
        holders: ranks that share out what they all hold whole.
    """
    return sum(
        values.nbytes // (holders if values.numel() == math.prod(shapes[name]) else 1)
        for name, values in shard.frozen.items()
    )


def _start_beside(job: Job, opened: ExitStack) -> None:
    """Report the run to the launcher and what is wrong with the machine, and start the service on rank 0."""
    launcher = report()
    if launcher is not None:
        launcher.open(Opened(str(job.run.path.absolute()), job.journal.life, job.group.size))
    report_machine(job)
    if job.group.rank == 0:
        service = ServiceProcess(job.config.service, job.config.run_dir, job.journal.event)
        opened.callback(service.close)
        service.start()


def _write_assignment(
    adapter: EngineAdapter, config: CPSRConfig, group: Group, experts: ExpertSaving | None, shard: Shard
) -> WriteAssignment | None:
    """Which rank writes which replicated state; None: each its own. A collective."""
    if config.checkpoint.replicated == "each":
        return None
    marker = config.run_dir / DIFFERING
    if not group.all(not marker.exists()):
        if group.rank == 0:
            logger.warning(
                "ranks with replicated state have differed before in this run (%s): each rank writes all of its own. "
                "Once they are equal, remove that file",
                marker,
            )
        return None
    units = experts_of(adapter.expert_naming(), shard.operators) if experts is None else experts.units
    writes = WriteAssignment.of(shard, units, adapter.data_parallel_ranks, group)
    if writes is not None and experts is not None:
        experts.shares_rest(writes.non_expert_share_bytes)
    return writes


def _open_store(job: Job, frozen: FrozenWeights) -> CheckpointStore:
    store = CheckpointStore(
        job.config.run_dir,
        job.group.rank,
        job.group.size,
        job.run.run_id,
        job.journal.life,
        fsync=job.config.checkpoint.fsync,
        missing=_missing_experts(job),
    )
    if not job.group.all(not frozen.tensors):  # else no rank has any
        places, fsync = job.adapter.frozen_places(), job.config.checkpoint.fsync
        store.frozen = FrozenFiles(frozen, job.group.rank, store.directory, fsync=fsync, places=places)
    if job.config.elastic.allows(job.group.size) or job.run.imported:
        store.reshard = Resharding(job.adapter, store.frozen).load
    if job.group.rank == 0:
        store.prepare()
    job.group.barrier()
    return store


def _missing_experts(job: Job) -> Missing | None:
    """The check that all ranks' parts of a checkpoint contain every expert; a collective."""
    naming = job.adapter.expert_naming()
    if naming is None:
        return None
    return partial(wrong_experts, naming=naming, trained=trained_experts(naming, job.shard, job.group))


def _predictable(job: Job) -> CPSRConfig:
    """The configuration of a life whose optimizers say why no later state can be predicted; a collective."""
    config = job.config
    obstacle = next((why for why in job.group.gather(job.adapter.prediction_obstacle()) if why is not None), None)
    if obstacle is None or config.mode == "exact":
        return config
    if job.group.rank == 0:
        message = (
            f"no state is predicted, and recoveries recompute from the newest state that is whole: {obstacle}. All "
            "state is saved and restored exactly"
        )
        job.journal.event("predicting is off", message, level=logging.WARNING)
    learning = config.learning.model_copy(update={"budget_fraction": 0.0})
    return config.model_copy(update={"mode": "exact", "learning": learning})


def _without_shared_memory(config: CPSRConfig) -> CPSRConfig:
    """The configuration of a life in which some rank's snapshots do not survive: none is planned or taken."""
    checkpoint = config.checkpoint.model_copy(update={"shared_memory": False})
    return config.model_copy(update={"checkpoint": checkpoint})


def _close_group(group: Group, ending: Ending) -> None:
    if ending.in_order:  # otherwise leaving the group would wait for a dead peer
        group.close()


def _close_journal(job: Job, steps: StepLog, ending: Ending) -> None:
    steps.flush(wait=True)
    if ending.in_order:
        _await_others(job)
    job.journal.close(ending.how)
    newest = superseded(job.run.path, job.journal.life) is None
    if ending.how != "error" and job.group.rank == 0 and newest:
        job.run.mark_ended(ending.how, ending.iteration)


def _await_others(job: Job) -> None:
    """Wait until all ranks have recorded their last rows, which rank 0 gathers into the journal."""
    # Another rank's writer may take as long as a save is allowed to, and so may its copy to the target.
    timeout = 2 * job.config.checkpoint.save_timeout_seconds
    try:
        job.group.reduce(torch.zeros(1, device="cpu"), timeout_seconds=timeout)
    except RuntimeError as error:
        logger.warning(
            "another rank did not finish its records; later rows of it are only in %s until the next life: %s",
            job.config.run_dir / "events",
            error,
        )
