"""Opens a run: one script, from the user's configuration to an engine that trains on."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.buffers import slab_size
from cpsr.checkpoint.commit import Missing, claim_life
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.memory_states import BUFFERS, identity
from cpsr.checkpoint.progress import mark_life, newest_life
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.replicated import can_share
from cpsr.checkpoint.resources import check_disk, check_host_memory, host_buffers
from cpsr.checkpoint.run_directory import RunDirectory, checkpoint_bytes, open_run
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.config import CPSRConfig
from cpsr.doctor.machine import report_machine
from cpsr.elastic.memory_rescue import Rescue
from cpsr.elastic.resharded_load import Resharding
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.moe.operators import experts_of
from cpsr.engines.offload import offloaded_activations
from cpsr.engines.optimizer_state import second_moment_decay
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.job import Ending, Job
from cpsr.journal import open_journal
from cpsr.life.leaving import Leaving
from cpsr.life.loop import Loop, Steps
from cpsr.life.policies import SomeExperts, Whole
from cpsr.life.probation import Probation
from cpsr.life.recovery_message import announce, cause_of_failure
from cpsr.life.rehearsed_life import Rehearsed, rehearsed
from cpsr.life.saver import Saver, disk_bytes
from cpsr.life.step_boundary import Boundary
from cpsr.life.unsaved_objects import Unsaved
from cpsr.life.witnessing import Witnessing
from cpsr.peers.host_memory import HostMemory, claim_memory
from cpsr.ranks.agreement import Agreement
from cpsr.ranks.board import Board
from cpsr.ranks.group import Group
from cpsr.ranks.heartbeat import newer_life, newest_claim
from cpsr.ranks.link import Opened, report
from cpsr.restart.experts import with_lost_tokens
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restore import Restorer
from cpsr.restart.restored_state import Restored
from cpsr.restart.sources import MemorySources
from cpsr.service.process import ServiceProcess
from cpsr.state.frozen_parameters import FrozenWeights
from cpsr.state.loader_workers import prepared_workers
from cpsr.state.shard import Shard

if TYPE_CHECKING:
    from cpsr.experts.routed import RoutedTokens
    from cpsr.experts.saving import ExpertSaving
    from cpsr.life.life import Life
    from cpsr.planner.live.job_planner import JobPlanner
    from cpsr.verification.verification import Verification

__all__ = ["adopt", "open_life"]

logger = logging.getLogger(__name__)

DISCARDABLE = "the state may still be discarded, and a dump of it would be taken for the newest one"


def open_life(life: "Life", config: CPSRConfig, opened: ExitStack) -> None:
    """Open a run and restore its state into the engine; a collective.

    Args:
        life: gets its parts, and follows the engine from here on.
        config: as given by the user.
        opened: closes the opened parts in reverse order.

    Raises:
        CPSRError: see `CPSRRecovery`.
    """
    loop, adapter, ending, exact = life.loop, life.loop.adapter, life.ending, config.mode == "exact"
    handlers = opened.enter_context(ExitStack())  # restored last: another SIGTERM must not interrupt leaving
    opened.callback(loop.state.close)  # closed late: the last checkpoint asks the loader for its position

    # The ranks, and which of them saves what.
    group, shard = Group(), adapter.shard()
    opened.callback(_close_group, group, ending)
    # Mode exact restores no expert older than its checkpoint, and so saves all of them.
    chooses = config.experts.policy != "none" and not exact
    life.tokens = _routed_tokens(config, adapter, shard, group, chooses=chooses)
    if life.tokens is not None:
        opened.callback(life.tokens.close)
    life.experts = _expert_saving(config, adapter, shard, group, life.tokens) if chooses else None
    if life.experts is not None:
        opened.callback(life.experts.close)
    writes = _write_assignment(adapter, config, group, life.experts, shard)

    # The run's directory, the number of this life, and its journal.
    target = CheckpointTarget(config.checkpoint, config.run_dir, group)
    target.adopt_run()
    run, free_bytes = _open_directory(adapter, config, group, writes, shard)
    number, branch, held, claimed = _last_life(run, group)
    journal = open_journal(config.run_dir, group, config.mode, max(number, claimed))
    job = Job(adapter, group, config, run, shard, journal)
    life.steps = Steps(adapter, journal, loop.losses, loop.state.optimizers)
    opened.callback(_close_journal, job, life.steps, ending)
    claim_life(config.run_dir, journal.life, group)
    _start_beside(job, opened)

    # Checkpoints and host memory; from here on the configuration is what this life can follow.
    store = _open_store(job, loop.state.frozen)
    if run.resized:  # before this life's own buffers take the place of what they have left
        Rescue(job, (number, branch), store.frozen).save()
        number, branch, held = journal.life, 0, False
    _open_memory(life, job, store, writes, opened)
    _open_watches(life, opened)

    # The state: chosen by all ranks together, and put into the engine.
    known = (number, branch), held, life.memory.windows is not None
    left = MemorySources(run.run_id, group, shard, *known, shared=writes is not None)
    prediction = StatePrediction(life.job, store, loop.learning.predictor, loop.probes)
    life.restorer = Restorer(life.job, store, target, life.memory.pool, left, prediction, inexact=not exact)
    _restore(life, store)

    # What saves, and what runs beside the training.
    life.saver = Saver(
        life.job,
        store,
        life.memory,
        target,
        life.planner,
        life.restored,
        loop,
        life.steps,
        _policy(life, writes),
        life.attention,
        exact=exact,
    )
    opened.callback(life.saver.close, ending)
    life.verification = _verification(life, store)
    opened.callback(life.verification.close)
    life.verification.rewound(life.restored.checkpoint_iteration or 0)  # later ones are of an earlier life
    life.saver.on_saved = life.verification.note_committed
    _start_training(life, store, opened)

    # The engine.
    life.boundary.prepare()
    adapter.attach(life)
    opened.callback(adapter.detach)
    loop.own.attach(adapter)
    opened.callback(loop.own.detach)
    opened.callback(Unsaved(adapter, lambda: loop.state.objects, exact, journal.event).close)
    limit_bytes = life.job.config.engines.offload_activations_bytes
    opened.enter_context(offloaded_activations(adapter, limit_bytes, free_bytes, journal.event))
    opened.enter_context(prepared_workers())
    if life.stop.watch(handlers):
        life.boundary.emergency_dump.watch_sigterm(life.stop.note)
    if (launcher := report()) is not None:  # now, when what a life uses is imported
        launcher.tell_imports()
    opened.callback(life.verification.cancel)  # before the other hooks on the loop: its own lie on top of them
    life.steps.start_clock()


def adopt(life: "Life", restored: Restored) -> None:
    """Continue the loop and the account of experts from the state in the engine; a collective."""
    life.restored = with_lost_tokens(restored, life.experts, life.job.group)
    life.loop.state.adopt(life.restored)


def _open_watches(life: "Life", opened: ExitStack) -> None:
    """What follows the steps, the other ranks and the predictor."""
    loop, pool, windows = life.loop, life.memory.pool, life.memory.windows
    replays = None if windows is None else windows.replays
    life.witnessing = Witnessing(life.job, loop.state, loop.losses, life.steps, replays)
    opened.callback(life.witnessing.close)  # after the boundary, by when a GPU has completed the last steps
    life.board = Board.open(life.job.group)
    life.boundary = Boundary(life.job, life.board, pool, loop.state)
    opened.callback(life.boundary.close, life.ending)
    opened.callback(loop.learning.close)
    life.planner = _planner(life.job, loop)
    opened.callback(life.planner.close)


def _restore(life: "Life", store: CheckpointStore) -> None:
    """Put the best state into the engine, tell how the life begins, and let go of what does not lead to it."""
    job, loop, memory = life.job, life.loop, life.memory
    loop.state.hyperparameters.note_script()
    adopt(life, life.restorer.restore(job.config.mode))
    restored, iteration = life.restored, life.restored.restored_iteration
    store.abandon_after(iteration, f"the run continues from iteration {iteration}")
    memory.settle(restored.sources)
    job.group.barrier()  # no rank resets its counter before all have read where the run failed
    life.boundary.reset(iteration)
    if job.group.rank == 0:
        mark_life(job.config.run_dir, job.journal.life)
        job.run.adopt_ranks()
    memory.begin(iteration)
    cause = cause_of_failure(job)
    life.probation = Probation(job, restored, loop.losses, life.restorer.let_go, cause)
    life.boundary.no_dump = DISCARDABLE if life.probation.active else None
    life.witnessing.compare_after(iteration)
    announce(job, restored, cause, life.restorer.damaged, life.witnessing.outlook(restored.lost_iterations))
    if loop.state.notice is not None and job.group.rank == 0:
        job.journal.event("hyperparameters", loop.state.notice, iteration, logging.WARNING)
    if restored.scalars is not None:
        life.planner.load_state_dict(restored.scalars.planning, replicates=bool(memory.links))


def _start_training(life: "Life", store: CheckpointStore, opened: ExitStack) -> None:
    """Start what learns and plans beside the loop, and follow the loop."""
    job, loop = life.job, life.loop
    loop.learning.start(job, store)
    life.planner.on_proposal = life.attention.call
    life.planner.start(job.config.run_dir, job.journal)
    for link in life.memory.links:
        link.on_replica = life.planner.times.replica
    loop.begin_life(job)
    loop.events.begin_life(job, life.saver.saved_iteration, loop.tail.defer_here)
    life.agreement = Agreement(job.group, life.board, lambda: life.stop.made, life.propose_plan)
    opened.callback(life.agreement.close)
    if job.group.size > 1:
        agreement = life.agreement
        life.memory.pool.occupancy.join(agreement.hold, agreement.held, agreement.ordered)
    if life.memory.replicates:
        life.saver.memory.send_by(life.agreement.sender)
    asked = rehearsed()
    life.rehearsed = None if asked is None else Rehearsed(asked, job)
    life.leaving = Leaving(job, life.ending, life.stop, loop, life.boundary, life.saver, life.witnessing)


def _last_life(run: RunDirectory, group: Group) -> tuple[int, int, bool, int]:
    """Number and branch of the last life, whether every rank held a state, and the newest number that was claimed.

    A life that has claimed its number may not have trained. Where the run's directory was lost, the newest states in
    host memory are of the last life.
    """
    number, branch, held, claimed = group.broadcast([*newest_life(run.path), newest_claim(run.path)])
    if number < 0:
        states = [[state.life, state.branch] for state in Arena(run.run_id).list()]
        number, branch = max(group.gather(max(states, default=[number, branch])))
    return number, branch, held, claimed


def _open_memory(
    life: "Life", job: Job, store: CheckpointStore, writes: WriteAssignment | None, opened: ExitStack
) -> None:
    """Adjust the configuration to what this life can follow, the only place that does, and open its host memory.

    Each adjustment is reported once: predicting that the optimizers rule out here, predicting that lacks memory by the
    learner, and shared memory that is absent by the host memory.
    """
    config, loop, ending = job.config, life.loop, life.ending
    obstacle = next(iter(job.group.gather_present(job.adapter.prediction_obstacle())), None)
    if obstacle is not None and config.mode != "exact":
        if job.group.rank == 0:
            message = (
                f"no state is predicted, and recoveries recompute from the newest state that is whole: {obstacle}. All "
                "state is saved and restored exactly"
            )
            job.journal.event("predicting is off", message, level=logging.WARNING)
        learning = config.learning.model_copy(update={"budget_fraction": 0.0})
        config = config.model_copy(update={"mode": "exact", "learning": learning})
    use = loop.learning.open(replace(job, config=config), store)
    if use == "nothing":
        config = config.model_copy(update={"mode": "exact"})
    fixed = config.checkpoint.interval_iterations is not None
    if use != "learning" and config.planner.policy == "theorem1" and not fixed and job.group.rank == 0:
        message = (
            "planner.policy theorem1 needs to know how the predictor's error falls, and learning is off: the interval "
            "stays as it is. Set learning.budget_fraction above 0 if it is 0, or planner.policy to cpsr"
        )
        job.journal.event("theorem1 holds", message, level=logging.WARNING)
    experts = None if life.experts is None else life.experts.in_memory
    units = {} if experts is None else dict(experts.units)
    units |= {} if writes is None else writes.units
    if config.replay.enabled and (found := next(iter(job.group.gather_present(job.adapter.replay_obstacle())), None)):
        raise UnsupportedEngineError(
            f"replay.enabled: {found}, and a window would restore another value. Nothing was saved; set replay.enabled "
            "to false, or keep that number as a tensor with a dimension"
        )
    memory = life.memory = HostMemory(replace(job, config=config), units, experts, alike=writes is not None)
    opened.callback(lambda: memory.close(in_order=ending.in_order, safe=ending.last_state_is_safe))
    if not memory.survives:
        checkpoint = config.checkpoint.model_copy(update={"shared_memory": False})
        config = config.model_copy(update={"checkpoint": checkpoint})
    life.job = replace(job, config=config)
    if job.adapter.pipeline is not None:
        memory.pool.engine.copy_in(loop.learning.bubbles)


def _planner(job: Job, loop: Loop) -> "JobPlanner":
    from cpsr.planner.live.job_planner import JobPlanner

    return JobPlanner(
        job.config,
        job.group.rank,
        job.group.size,
        job.shard.parameters,
        second_moment_decay(job.adapter.optimizers),
        loop.learning.predictor.accuracy,
    )


def _verification(life: "Life", store: CheckpointStore) -> "Verification":
    from cpsr.verification.verification import Verification

    off = None
    if life.tokens is not None:
        off = "the tokens of its experts are counted, which a repeated step would change"
    elif life.memory.windows is not None:
        off = "it keeps windows of snapshots (replay.enabled)"
    return Verification(life.job, store, life.memory.pool, life.restorer.inject, life.loop.state.objects, off)


def _routed_tokens(
    config: CPSRConfig, adapter: EngineAdapter, shard: Shard, group: Group, *, chooses: bool
) -> "RoutedTokens | None":
    """Counts the tokens of a mixture's experts, where a policy or the order of windows needs them. A collective.

    Raises:
        ConfigError, UnsupportedEngineError: see `RoutedTokens.of`; a policy chooses, and the model has no experts.
    """
    if not chooses and not config.replay.enabled:
        return None
    from cpsr.experts.routed import RoutedTokens

    try:
        tokens = RoutedTokens.of(adapter, shard, group)
    except (ConfigError, UnsupportedEngineError) as error:
        if chooses:
            raise
        if group.rank == 0:
            logger.warning("tokens are not counted, and windows take experts in the order of the model: %s", error)
        return None
    if tokens is None and chooses:
        raise ConfigError(
            f"experts.policy = {config.experts.policy!r}, and the model has no layers of experts that CPSR knows: set "
            "it to none, or tell TorchAdapter of them (experts=MixtureOfExperts(...))"
        )
    return tokens


def _expert_saving(
    config: CPSRConfig, adapter: EngineAdapter, shard: Shard, group: Group, tokens: "RoutedTokens | None"
) -> "ExpertSaving":
    """What chooses the experts that a checkpoint saves. A collective."""
    from cpsr.experts.saving import ExpertSaving

    experts = config.experts
    if config.replay.enabled:  # no layer has more capacity for a while: a repeated iteration would drop other tokens
        experts = experts.model_copy(update={"recovering_capacity_fraction": 0.0})
    assert tokens is not None
    assert adapter.mixture is not None
    return ExpertSaving(tokens, adapter.mixture, shard, experts, group)


def _policy(life: "Life", writes: WriteAssignment | None) -> Whole:
    """What decides what each checkpoint holds."""
    if life.experts is None:
        return Whole(writes, life.tokens)
    return SomeExperts(life.experts, writes, life.restored)


def _open_directory(
    adapter: EngineAdapter, config: CPSRConfig, group: Group, writes: WriteAssignment | None, shard: Shard
) -> tuple[RunDirectory, int]:
    """The run's directory, after a check that the machine has room.

    Returns:
        The directory, and the bytes of host memory that are left for this rank.
    """
    from cpsr.learning.learning import LIMIT_BYTES

    description = adapter.describe()
    run = open_run(config.run_dir, group, config.mode, description, config.elastic)
    claim_memory(run, group, shared=config.checkpoint.shared_memory)
    # Memory and disk space of an earlier life count as part of the requirement, since this life reuses them.
    reusable_bytes = Arena(run.run_id).taken_by(BUFFERS, run.local_ranks)
    required_bytes = host_buffers(config) * slab_size(shard).bytes
    free_bytes = check_host_memory(required_bytes, len(run.local_ranks), reusable_bytes)
    share = 1.0 if writes is None else writes.share_bytes / max(1, shard.state_bytes)
    holders = len(adapter.data_parallel_ranks)
    own = disk_bytes(shard, config, share) + _frozen_bytes(shard, description["module"]["frozen"], holders)
    taken_bytes = checkpoint_bytes(config.run_dir) if group.rank == 0 else 0
    check_disk(config.run_dir, max(int(group.sum(own - taken_bytes)), 0))
    return run, max(0, free_bytes - LIMIT_BYTES)


def _frozen_bytes(shard: Shard, shapes: Mapping[str, Sequence[int]], holders: int) -> int:
    """What this rank writes of the parameters outside the optimizer, once in a run."""
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
    adapter: EngineAdapter, config: CPSRConfig, group: Group, experts: "ExpertSaving | None", shard: Shard
) -> WriteAssignment | None:
    """Which rank copies and writes which replicated state; None: each its own. A collective."""
    marker = config.run_dir / DIFFERING
    if not group.all(not marker.exists()):
        if group.rank == 0:
            logger.warning(
                "ranks with replicated state have differed before in this run (%s): each rank writes all of its own. "
                "Once they are equal, remove that file",
                marker,
            )
        return None
    units = experts_of(adapter.mixture, shard.operators) if experts is None else experts.units
    memory = identity() if can_share(shard) else None
    writes = WriteAssignment(shard, units, adapter.data_parallel_ranks, group, memory=memory)
    if group.all(not writes.replicated):
        return None
    if experts is not None:
        experts.shares_rest(writes.non_expert_share_bytes)
    return writes


def _open_store(job: Job, frozen: FrozenWeights) -> CheckpointStore:
    store = CheckpointStore(
        job.config.run_dir,
        job.group.rank,
        job.group.size,
        job.run.run_id,
        job.journal.life,
        missing=_missing_experts(job),
    )
    if not job.group.all(not frozen.tensors):  # else no rank has any
        store.frozen = FrozenFiles(frozen, job.group.rank, store.directory, places=job.adapter.frozen_places())
    if job.config.elastic.allows(job.group.size):
        store.reshard = Resharding(job.adapter, store.frozen).load
    if job.group.rank == 0:
        store.prepare()
    job.group.barrier()
    return store


def _missing_experts(job: Job) -> Missing | None:
    """The check that all ranks' parts of a checkpoint contain every expert; a collective."""
    mixture = job.adapter.mixture
    if mixture is None:
        return None
    from cpsr.experts.completeness import wrong_experts
    from cpsr.experts.saving import trained_experts

    return partial(wrong_experts, naming=mixture.naming, trained=trained_experts(mixture, job.shard, job.group))


def _close_group(group: Group, ending: Ending) -> None:
    if ending.in_order:  # otherwise leaving the group would wait for a dead peer
        group.close()


def _close_journal(job: Job, steps: Steps, ending: Ending) -> None:
    steps.flush(wait=True)
    if ending.in_order:
        _await_others(job)
    job.journal.close(ending.how)
    newest = newer_life(job.run.path, job.journal.life) is None
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
