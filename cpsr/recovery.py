"""One life of a run: the context manager that users put around their training loop."""

import logging
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch

from cpsr.checkpoint.commit import Missing
from cpsr.checkpoint.memory import held_bytes
from cpsr.checkpoint.progress import ProgressCounter, mark_life, newest_life
from cpsr.checkpoint.resources import check_disk, check_host_memory
from cpsr.checkpoint.snapshot import Part, SnapshotPool
from cpsr.checkpoint.store import DIFFERING, CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter
from cpsr.config import CPSRConfig
from cpsr.coordinator.bubble_log import BubbleLog
from cpsr.coordinator.lag import SLOPE_LOSSES_MAX
from cpsr.coordinator.memory import allot_memory
from cpsr.coordinator.offload import offloaded_activations
from cpsr.coordinator.pace import bubbles_of, pace_of
from cpsr.coordinator.recovered import RecoveredLag
from cpsr.coordinator.schedule import Rehearsals
from cpsr.departure import Departure, undisturbed
from cpsr.engines import adapt, require_loader
from cpsr.errors import ConfigError, SaveError
from cpsr.exchange import Exchange
from cpsr.exits import BEGAN, Exit, cause_of, exits_of, forget_exits, note_exit
from cpsr.expert_saving import ExpertSaving, trained_experts
from cpsr.experts.completeness import wrong_experts
from cpsr.experts.naming import experts_of
from cpsr.first_batches import FirstBatches
from cpsr.group import Group, Votes
from cpsr.host_memory import HostMemory, claim_memory
from cpsr.ladder import Ladder
from cpsr.launch.link import Opened, report, restart_obstacle
from cpsr.learner import Learner
from cpsr.liveness import Liveness
from cpsr.loader import ResumableLoader
from cpsr.loader_workers import prepared_workers
from cpsr.loop_tail import LoopTail
from cpsr.losses import LossRecorder, Step
from cpsr.planner.plan import Plan
from cpsr.planning.inputs import Situation
from cpsr.planning.job_planner import JobPlanner
from cpsr.planning.recovery_cost import Schedule
from cpsr.predictor.vitp import VITPPredictor
from cpsr.probes import LossFunction, Probes
from cpsr.record import Recorder
from cpsr.recovery_message import recovery_message
from cpsr.recovery_watch import RecoveryWatch, start_watch
from cpsr.restore import Restored, Restorer
from cpsr.run_state import RunState
from cpsr.rundir import RunDirectory, open_run
from cpsr.saver import Saver, disk_bytes
from cpsr.scalars import Scalars
from cpsr.service_process import ServiceProcess
from cpsr.sharing import Sharing
from cpsr.state import Shard
from cpsr.target.target import CheckpointTarget
from cpsr.terminal import log_to_terminal
from cpsr.unsaved import Unsaved
from cpsr.write_sharing import WriteSharing

__all__ = ["CPSRRecovery"]

logger = logging.getLogger(__name__)

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM
TIMED_ITERATIONS = 50  # the planner's iteration time is the median of this many
# What the loop does after its last step, and saving that, may take so long; launchers kill 30 s after asking.
LEAVE_SECONDS = 20.0
FIRST_PLAN_ITERATIONS = 10  # of a life, after which their time is known well enough to plan anew


class CPSRRecovery:
    """Snapshots a training run, and brings it back near the point of failure.

    Args:
        engine: what `deepspeed.initialize` returned, or a `cpsr.engines.torch.TorchAdapter`.
        config: a `CPSRConfig`, a mapping, or the path of a YAML or JSON file; None reads the `"cpsr"` block of the
            DeepSpeed configuration.
        loss_fn: loss of one batch of your loader, without backward; needed for the guard's loss veto where the module
            does not return its loss. On pipelines, give it together with `probe_batches`. Rehearsals then train on it
            too, so it must be the very loss that your loop trains on; they are off where it differs from that.
        probe_batches: held-out batches for the loss veto; by default the last few inputs before each checkpoint.
        mode: overrides the configured mode.

    Raises (on entering):
        ConfigError: the configuration is not usable.
        UnsupportedEngineError: the engine keeps state out of sight.
        RunMismatchError: the run directory belongs to another model or world size.
        ResourceError: host memory or disk are short.
        RecoveryError: there are checkpoints, but none can be read.

    Example::

        with CPSRRecovery(engine, "cpsr.yaml") as recovery:
            for batch in recovery.resume(loader):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()

    Nothing but the optimizer may change the weights between two steps: a snapshot is copied while the next forward
    and backward run, and is complete before the next update.
    """

    # Opened by __enter__
    _group: Group
    _run: RunDirectory
    _recorder: Recorder
    _store: CheckpointStore
    _target: CheckpointTarget
    _learns: bool
    _memory: HostMemory
    _pool: SnapshotPool
    _departure: Departure
    _liveness: Liveness
    _restorer: Restorer
    _progress: ProgressCounter
    _writer: CheckpointWriter
    _planner: JobPlanner
    _saver: Saver
    _bubble_log: BubbleLog
    _rehearsals: Rehearsals
    _votes: Votes
    _tail: LoopTail
    _first_batches: FirstBatches
    _restored: Restored
    _opened: ExitStack
    _experts: ExpertSaving | None

    def __init__(
        self,
        engine: Any,
        config: CPSRConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        loss_fn: LossFunction | None = None,
        probe_batches: Sequence[Any] | None = None,
        mode: Literal["auto", "predict", "exact"] | None = None,
    ) -> None:
        self._adapter = adapt(engine)
        self.config = _configuration(engine, config, mode)
        self._loss_fn = loss_fn
        self._probes = Probes(self._adapter, self.config.guard.probe_batches, loss_fn, probe_batches)
        self._losses = LossRecorder(self.config.journal.flush_iterations)
        self._exchange = Exchange()
        self._sharing = Sharing()
        self._predictor = VITPPredictor(
            **self.config.predictor.settings(),
            trains=self._adapter.rank == 0,
            agree=self._exchange.agree,
            reduce=self._exchange.reduce,
            broadcast=self._exchange.broadcast,
            share=self._sharing,
        )
        self._nothing_learned = self._predictor.state_dict()
        self._bubbles = bubbles_of(self._adapter)
        budget = self.config.predictor.learning_budget_fraction
        self._learner = Learner(self._predictor, pace_of(self._adapter, self._bubbles, budget, self._tell_starved))
        waiting = partial(self._bubbles.waiting, "data")
        self._state = RunState(self._adapter, self._losses, self._probes, self._learner, waiting)
        self._iteration_seconds: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._watch: RecoveryWatch | None = None
        self._recovered: RecoveredLag | None = None
        self._watched: dict[str, Any] = {}
        self._recovery_id: str | None = None
        self._stop = False
        self._last_is_safe = True
        self._entered = False
        self._sent: Plan | None = None
        self._stepped = time.perf_counter()
        self._learning_rate = 0.0
        self._ending: Literal["clean", "sigterm", "error"] = "error"

    # What users call

    def __enter__(self) -> "CPSRRecovery":
        log_to_terminal(self._adapter.rank)
        with ExitStack() as opened:
            self._open(opened)
            self._opened = opened.pop_all()
        self._entered = True
        return self

    @property
    def iteration(self) -> int:
        """Optimizer steps taken; authoritative also after a restart or a roll-back."""
        return self._adapter.iteration

    @property
    def epoch(self) -> int:
        """Complete passes over the data: begin your own loop over passes here."""
        return self._state.position.epoch

    @property
    def restored(self) -> Restored:
        """How this life began."""
        return self._restored

    @property
    def plan(self) -> Plan:
        """The checkpoint interval that holds now, and why."""
        return self._saver.plan

    def resume(self, loader: Iterable[Any], *, epochs: int | None = None, repeat: bool = False) -> ResumableLoader:
        """Iterate over the loader, beginning after the batch of the restored step.

        Args:
            loader: a `DataLoader`, or any iterable that deals the same batches after a restart.
            epochs: passes over the data of the whole run, those before a restart included. By default the iteration
                ends with the present pass, for a loop of your own: `for epoch in range(recovery.epoch, epochs)`.
            repeat: never end (use it instead of DeepSpeed's `RepeatingLoader`).

        The result is an iterator, also good as a pipeline's `data_iter`. After a roll-back it goes back by itself.

        Raises:
            ConfigError: outside the `with` block, where nothing is restored yet; or both `epochs` and `repeat`.
            UnsupportedEngineError: a loader of another package that would not deal the same batches again.
        """
        if not self._entered:
            raise ConfigError(
                "resume() belongs inside the `with CPSRRecovery(...)` block: before it nothing is restored"
            )
        if repeat and epochs is not None:
            raise ConfigError(f"resume(epochs={epochs}, repeat=True): give one of the two")
        require_loader(loader)
        stream = self._state.stream(loader, epochs, repeat)
        if self._watch is not None and not stream.can_seek:
            self._recorder.event(
                "watch",
                "the data iterator is one-shot: should the predicted state diverge, it cannot be rolled back in this "
                "process; give resume() the DataLoader itself",
                level=logging.WARNING,
            )
        return stream

    def register(self, name: str, stateful: Any) -> None:
        """Save and restore an object of yours with every checkpoint; before the loop.

        Args:
            name: unique in the run and the same after a restart.
            stateful: has `state_dict` and `load_state_dict`; or a generator of torch, NumPy or Python; or a dictionary,
                whose content is the state. Its state must be plain data and tensors.

        Raises:
            ConfigError: the name is taken, or it is none of these.
        """
        self._state.register(name, stateful)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with undisturbed(), self._opened:
            self._bubble_log.record(self.iteration)  # before rank 0 takes the other ranks' rows over for the last time
            if kind not in (None, _Leave):
                self._abandon(error)
            if kind is None:
                try:
                    self._tail.finish()  # may leave: it was asked to after the last step
                    self._votes.finish()
                    self._group.barrier()  # every rank is at its end; a dead one raises here and not in the last save
                except _Leave:
                    self._end_left()
                    raise
                except BaseException as failure:
                    self._abandon(failure)
                    raise
                self._departure.leave_in_order()
                self._liveness.finish()
                self._save_last()
                self._ending = "clean"
                self._end_unfinished_watch()
            elif kind is _Leave:
                self._end_left()

    def _end_left(self) -> None:
        self._votes.finish()
        self._ending = "sigterm"
        self._end_unfinished_watch()

    def _end_unfinished_watch(self) -> None:
        if self._watch is not None:
            reason = "the life ended before the watch"
            self._end_watch("kept", {"status": "unfinished", "iteration": self.iteration, "reason": reason})

    def _abandon(self, error: BaseException | None) -> None:
        """The group is broken: keep the state of the last step boundary, and watch the others no longer."""
        note_exit(self._run.path, self._recorder.life, Exit(self._group.rank, error=_one_line(error)))
        self._departure.dump(f"the training loop was left with {type(error).__name__}")
        self._liveness.close(ended=False)

    def _give_up(self, reason: str) -> None:
        """Another rank is gone, or the training hangs: this process ends, from another thread."""
        note_exit(self._run.path, self._recorder.life, Exit(self._group.rank, left=reason))
        self._departure.leave(reason)

    # What the adapter calls, on the training thread

    def before_update(self) -> None:
        """The optimizer is about to change the state that a snapshot may still be copying."""
        self._liveness.sign()
        self._tail.finish()
        self._learning_rate = self._adapter.learning_rate()
        self._saver.before_update()

    def state_changes(self) -> None:
        """From here to the end of the step the state is of no iteration."""
        self._departure.begin_update()

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins: it changes buffers and random states."""
        self._liveness.sign()
        self._tail.finish()
        if self._experts is not None:
            self._experts.begin_forward()
        self._probes.on_forward(args, kwargs)
        self._rehearsals.on_forward(args, kwargs)

    def on_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's loss."""
        self._liveness.sign()
        self._losses.add(loss)
        self._rehearsals.on_loss(loss)

    def wait_begins(self, place: str) -> None:
        """The thread is about to wait for another pipeline stage."""
        self._bubbles.begin(place)

    def wait_ends(self) -> None:
        """It goes on."""
        self._bubbles.end()

    def after_step(self, iteration: int, applied: bool) -> None:
        """One step is complete: publish, save if due, and agree on what comes next."""
        self._bubbles.end_iteration()
        self._tail.after_step()
        self._first_batches.after_step()
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        if applied:
            self._state.count_update(self._learning_rate)
        if self._experts is not None:
            self._experts.end_iteration(iteration, applied)
        self._progress.publish(iteration, self._state.position.batches)
        self._at_boundary(iteration)
        self._liveness.step(iteration)
        self._iteration_seconds.append(seconds)
        self._planner.step(seconds)
        self._note(self._losses.end_iteration(Step(iteration, self._learning_rate, seconds, applied)))
        self._saver.surface()
        self._learn()
        with self._liveness.busy():
            if self._watch is not None and self._diverges(iteration):
                return
        # While a predicted state is watched it is not committed: it may yet be given up, and the checkpoint it came
        # from must stay the newest.
        if self._watch is None and self._saver.is_due(iteration):
            self._tail.put_off(partial(self._begin_checkpoint, iteration, self._saver.take(iteration)))
        elif iteration == self._restored.restored_iteration + FIRST_PLAN_ITERATIONS:
            self._planner.consider(self._situation(iteration))  # a failure has changed the rate
        if self._recovered is not None and iteration >= self._recovered.due_iteration:
            self._tell_lag(self._recovered, iteration)
        self._departure.begin_update()  # a rehearsal tries another state out
        with self._liveness.busy():
            if self._rehearsals.after_step(iteration, applied, seconds, self._capture):
                self._stepped = time.perf_counter()
        self._departure.end_update(iteration)
        if iteration % self.config.stop_check_iterations == 0:
            self._vote(iteration)

    def before_external_load(self) -> None:
        """The user's own load_checkpoint is about to overwrite what a snapshot may still be copying."""
        self._departure.begin_update()
        self._tail.drop()
        self._saver.finish()

    def after_external_load(self, iteration: int) -> None:
        """The state is no longer the one that the committed checkpoints lead to: set them aside and save this one."""
        replaced = "the user's load_checkpoint replaced the state"
        if self._watch is not None:
            self._end_watch("kept", {"status": "ended", "iteration": iteration, "reason": replaced})
        self._forget_after(iteration - 1, replaced)
        self._state.history_start = iteration
        with self._learner.held():  # what was learned is of weights that do not lead here
            self._predictor.load_state_dict(self._nothing_learned)
        self._losses.restart([])
        batches = self._state.position.batches
        self._progress.reset(iteration, batches)
        self._at_boundary(iteration)
        self._saver.restart(iteration, None)
        with self._liveness.busy():
            saved = self._saver.save_now(iteration, self._capture)
        told = (
            "is committed" if saved else "could not be committed: a failure before the next checkpoint goes behind it"
        )
        self._recorder.event(
            "external load",
            f"load_checkpoint went to iteration {iteration}: that state {told}; checkpoints of later iterations were "
            f"set aside; the data goes on after batch {batches}, where the loader stands",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )

    # Opening and closing a life

    def _open(self, opened: ExitStack) -> None:
        """Open everything; what was opened is closed in reverse order, also when a later part refuses to."""
        handlers = opened.enter_context(ExitStack())  # put back last: leaving must not be cut short by another SIGTERM
        self._group = Group()
        self._exchange.open(self._group)
        opened.callback(self._close_group)
        shard, asked = self._adapter.shard(), self.config.mode
        free_bytes, last_life = self._open_run(opened, shard)
        self._open_store(shard)
        self._open_memory(opened, shard)
        self._restorer = Restorer(
            self._adapter,
            self._group,
            self._store,
            self._pool,
            Ladder(self._run.run_id, self._group, shard, last_life, self.config.peers),
            self._predictor,
            self._probes,
            self.config,
            self._target,
            older_experts=asked != "exact",
        )
        self._open_signs_of_life(opened)
        opened.callback(self._close_learner)
        self.config = self._possible(self.config, shard)
        self._planner = JobPlanner(
            self.config,
            self._group.rank,
            shard.parameters,
            self._adapter.second_moment_decay(),
            lambda: self._learner.ask(self._predictor.accuracy),
        )
        opened.callback(self._planner.close)
        self._begin()
        self._pool.mark_boundary()
        opened.callback(self._close_target)
        opened.callback(self._close_writer)
        self._adapter.attach(self)
        opened.callback(self._adapter.detach)
        unsaved = Unsaved(self._adapter, lambda: self._state.objects, asked == "exact", self._recorder.event)
        opened.callback(unsaved.close)
        opened.enter_context(
            offloaded_activations(self._adapter, self.config.coordinator, free_bytes, self._recorder.event)
        )
        opened.enter_context(prepared_workers())
        self._handle_sigterm(handlers)

    def _open_run(self, opened: ExitStack, shard: Shard) -> tuple[int, tuple[int, int]]:
        """The run's directory and journal, once the machine was found to have room.

        Returns:
            Bytes of host memory that are left for this rank; life and branch that were the last before this one.
        """
        adapter, config, group = self._adapter, self.config, self._group
        # Mode exact restores no expert that is older than its checkpoint, and so saves all of them.
        self._experts = None if config.mode == "exact" else ExpertSaving.of(adapter, shard, config.experts, group)
        if self._experts is not None:
            opened.callback(self._experts.close)
        self._writes = self._write_sharing(shard)
        share = 1.0 if self._writes is None else self._writes.share_bytes / max(1, shard.state_bytes)
        self._target = CheckpointTarget(config.checkpoint, config.run_dir, group)
        self._target.adopt_run()
        run = self._run = open_run(config.run_dir, group, config.mode, adapter.describe())
        claim_memory(run, group, shared=config.checkpoint.shared_memory)
        # What an earlier life left, here and on the disk, is part of what is needed, not in its way.
        held = held_bytes(run.run_id, run.local_ranks)
        free_bytes = check_host_memory(SnapshotPool.required_bytes(shard), len(run.local_ranks), held)
        free_bytes = max(0, free_bytes - config.predictor.memory_limit_bytes)
        check_disk(config.run_dir, max(int(group.sum(disk_bytes(shard, config, share))) - run.checkpoint_bytes(), 0))
        last_life, last_branch = group.broadcast(newest_life(config.run_dir))
        self._recorder = Recorder(config.run_dir, group, config.mode, last_life, config.journal.full_steps)
        opened.callback(self._close_record)
        launcher = report()
        if launcher is not None:
            launcher.open(Opened(str(run.path.absolute()), self._recorder.life, group.size))
        if group.rank == 0:
            service = ServiceProcess(config.service, config.run_dir, self._recorder.event)
            opened.callback(service.close)
            service.start()
        return free_bytes, (last_life, last_branch)

    def _write_sharing(self, shard: Shard) -> WriteSharing | None:
        """Who writes what ranks hold alike; None: each. A collective."""
        adapter, config = self._adapter, self.config
        if config.checkpoint.replicated == "each":
            return None
        noted = config.run_dir / DIFFERING
        if not self._group.all(not noted.exists()):
            if self._group.rank == 0:
                told = (
                    "ranks that were to hold the same have differed before in this run (%s): each writes all of its own"
                )
                logger.warning(f"{told}. Once they are alike, remove that file", noted)
            return None
        experts, naming = self._experts, adapter.expert_naming()
        units = experts_of(naming, shard.operators) if experts is None else experts.units
        writes = WriteSharing.of(shard, units, adapter.data_parallel_ranks, self._group)
        if writes is not None and experts is not None:
            experts.shares_rest(writes.non_expert_share_bytes)
        return writes

    def _open_store(self, shard: Shard) -> None:
        group = self._group
        self._store = CheckpointStore(
            self.config.run_dir,
            group.rank,
            group.size,
            self._run.run_id,
            self._recorder.life,
            fsync=self.config.checkpoint.fsync,
            missing=self._missing_experts(shard),
        )
        if group.rank == 0:
            self._store.prepare()
        group.barrier()

    def _open_memory(self, opened: ExitStack, shard: Shard) -> None:
        """What host memory is for: the predictor, and snapshots that outlive the process."""
        adapter, group, tell = self._adapter, self._group, self._recorder.event
        ranks = adapter.data_parallel_ranks
        self._sharing.open(group, shard, ranks, self._store.directory)
        on_disk: int = group.broadcast(len(self._store.catalogue()) if group.rank == 0 else None)
        use = allot_memory(self._predictor, len(shard.operators), on_disk, self.config, group, tell)
        self._learns = use == "learning"
        if use == "nothing":
            self.config = self.config.model_copy(update={"mode": "exact"})
        self._memory = HostMemory(self._run, self._recorder.life, group, shard, ranks, self.config, tell)
        opened.callback(lambda: self._memory.close(in_order=self._ending != "error", safe=self._last_is_safe))
        self._pool = self._memory.pool
        if adapter.pipeline_stage is not None:
            self._pool.copy_in(self._bubbles)

    def _open_signs_of_life(self, opened: ExitStack) -> None:
        """What ranks tell each other of, and how this one leaves when another is gone."""
        config, rank = self.config, self._group.rank
        self._departure = Departure(
            self._dump,
            self._recorder.event,
            config.liveness.sigterm_grace_seconds,
            lambda: self._liveness.obstacle(),
            self._recorder.flush,
        )
        opened.callback(self._departure.close)
        self._liveness = Liveness(
            config.run_dir,
            self._recorder.life,
            rank,
            self._group.size,
            config.liveness,
            self._give_up,
            self._recorder.event,
        )
        opened.callback(lambda: self._liveness.close(ended=self._ending != "error"))
        self._liveness.start()
        self._progress = ProgressCounter(config.run_dir / "progress" / f"rank-{rank:05d}")
        opened.callback(self._progress.close)

    def _missing_experts(self, shard: Shard) -> Missing | None:
        """What tells whether all ranks' parts of a checkpoint make up the experts; a collective."""
        naming = self._adapter.expert_naming()
        if naming is None:
            return None
        return partial(wrong_experts, naming=naming, trained=trained_experts(naming, shard, self._group))

    def _possible(self, config: CPSRConfig, shard: Shard) -> CPSRConfig:
        """The configuration, with one interval for all ranks where their own ones are not possible."""
        if config.planner.intervals != "per_rank":
            return config
        held_twice = self._exchange.held_twice(shard)
        if held_twice is not None:
            why = (
                f"ranks hold the same elements of '{held_twice}', and predicted from weights of different ages these "
                "would differ. All ranks take one interval; ZeRO splits the weights over the ranks"
            )
        elif config.experts.policy != "none":
            why = f"experts.policy {config.experts.policy!r} needs checkpoints of all ranks. All take one interval"
        else:
            return config
        if self._group.rank == 0:
            told = f"planner.intervals 'per_rank' is not possible: {why}"
            self._recorder.event("one interval", told, level=logging.WARNING)
        return config.model_copy(update={"planner": config.planner.model_copy(update={"intervals": "common"})})

    def _begin(self) -> None:
        """Restore, and start this life from there."""
        config, group = self.config, self._group
        restored = self._restored = self._with_lost_tokens(self._restorer.restore(config.mode))
        iteration = restored.restored_iteration
        self._state.take(restored)
        # Partial checkpoints of iterations that come again; what a prediction rests on stays.
        self._store.abandon_after(iteration, f"the run goes on from iteration {iteration}")
        group.barrier()  # nobody resets its counter before all have read where the run failed
        self._progress.reset(iteration, self._state.position.batches)
        if group.rank == 0:
            mark_life(config.run_dir, self._recorder.life)
        self._memory.begin(iteration)
        self._watch = start_watch(restored, config.guard, group, self._losses)
        if self._watch is not None:
            self._pool.pin()  # the checkpoint stays in memory until the watch is over
        cause = self._cause()
        self._recovery_id = self._recorder.restored(restored, cause, config.mode, self._watch is not None)
        if restored.predicted and not restored.partly_predicted:
            before = self._recorder.losses_before(iteration, SLOPE_LOSSES_MAX)
            self._recovered = RecoveredLag(before, iteration)
        self._announce(cause)
        self._writer = CheckpointWriter(self._store, self._pool, config.checkpoint)
        if restored.scalars is not None:
            self._planner.load_state_dict(restored.scalars.planning)
        self._saver = Saver(
            self._adapter,
            self._pool,
            self._writer,
            self._store,
            self._recorder,
            group,
            self._planner,
            config,
            restored,
            self._experts,
            self._writes,
        )
        self._bubble_log = BubbleLog(self._bubbles, lambda: self._pool.copy_account, self._recorder, group.rank)
        self._learner.start(self._store, group.rank, learns=self._learns)
        self._target.start(self._store)
        self._planner.start(config.run_dir, group.size, self._recorder)
        self._rehearsals = Rehearsals(
            self._adapter,
            group,
            self._store,
            self._pool,
            self._restorer,
            self._saver,
            self._state,
            self._predictor,
            self._learner,
            self._recorder,
            config,
            self._loss_fn,
            lambda: self._stop,
        )
        self._votes = group.votes()
        self._tail = LoopTail(group, possible=self._adapter.pipeline_stage is None)
        self._state.on_request = self._tail.on_request
        self._first_batches = FirstBatches(self._adapter, group, config.mode != "exact", self._recorder.event)
        self._state.on_batch.append(self._first_batches.on_batch)
        self._stepped = time.perf_counter()
        self._learning_rate = self._adapter.learning_rate()

    def _with_lost_tokens(self, restored: Restored) -> Restored:
        """The same, with the tokens that experts have lost beside the guard's numbers; a collective."""
        if self._experts is None or restored.scalars is None:
            return restored
        self._experts.load_state_dict(restored.scalars.experts)
        if self._group.all(not restored.taken_at):
            return restored
        checkpoint, units, ages = restored.scalars.iteration, self._experts.units, dict[str, int]()
        for name in restored.taken_at.keys() & units.keys():
            ages[units[name]] = min(restored.taken_at[name], ages.get(units[name], checkpoint))
        lost = self._experts.restored(ages, checkpoint, predicted=restored.method != "stale")
        return replace(restored, guard={**restored.guard, "lost_tokens": lost})

    def _cause(self) -> str | None:
        """How the last life ended, where that was a failure (rank 0); its notes are not needed any more."""
        if self._group.rank != 0 or self._recorder.life == 0 or self._run.ended is not None:
            return None
        life = self._recorder.life - 1
        cause = cause_of(exits_of(self._run.path, life), self._group.size)
        forget_exits(self._run.path, self._recorder.life)
        return cause

    def _announce(self, cause: str | None) -> None:
        memory = "all" if self._experts is None or self._group.rank != 0 else self.config.experts.memory
        problem = self._pool.shared_memory_problem if self.config.checkpoint.shared_memory else "it is turned off"
        if memory == "overlapped" and problem is not None:
            self._recorder.event(
                "experts in memory",
                f"experts.memory is 'overlapped' and there is no shared memory ({problem}): no snapshot outlives its "
                "process, so that what is copied beyond what goes to the disk is of no use",
                level=logging.WARNING,
            )
        if memory == "saved":
            self._recorder.event(
                "experts in memory",
                "experts.memory is 'saved': but for the first of a life no snapshot in host memory is whole, so that a "
                "process that dies comes back from the disk, and peers.replicas has nothing to copy",
            )
        obstacle = restart_obstacle() if self._group.rank == 0 and self._group.size > 1 else None
        if obstacle is not None:
            self._recorder.event("launcher", obstacle, level=logging.WARNING)
        for problem in self._restorer.damaged:
            self._recorder.event("checkpoint damaged", problem, level=logging.ERROR)
        if self._group.rank != 0:
            return
        run, restored = self._run, self._restored
        if run.ended is not None:
            how = {"clean": "ended cleanly", "sigterm": "left after SIGTERM"}[run.ended["ending"]]
            message = f"the last life {how} at iteration {run.ended['iteration']}"
            self._recorder.event("continued", message, restored.restored_iteration)
        self._announce_recovery(recovery_message(restored, cause))
        run.clear_ended()

    def _announce_recovery(self, message: str) -> None:
        """One line, by the launcher where it is ours, else in the log; the numbers behind it in the verbose log."""
        launcher, at = report(), self._restored.restored_iteration
        self._recorder.event(BEGAN, message, at, logging.INFO if launcher is None else logging.DEBUG)
        logger.debug("%s: iteration %d, %s: %s", self._run.path, at, self._restored.method, self._restored.reason)
        if launcher is not None:
            launcher.recovered(message)

    def _save_last(self) -> None:
        self._saver.finish()
        iteration = self._adapter.iteration
        if self.config.checkpoint.final and iteration > 0:
            self._last_is_safe = self._saver.save_now(iteration, self._capture)

    def _close_writer(self) -> None:
        checkpoint = self.config.checkpoint
        self._writer.close(
            checkpoint.exit_grace_seconds if self._ending == "error" else checkpoint.save_timeout_seconds
        )
        self._saver.surface()

    def _close_target(self) -> None:
        """After the writer, so that the last checkpoint is copied; not after an error, when a restart is waiting."""
        self._target.notify(self._saver.saved_iteration)
        self._target.close(0.0 if self._ending == "error" else self.config.checkpoint.save_timeout_seconds)
        self._tell_of_target()

    def _tell_of_target(self) -> None:
        for said in self._target.said():
            self._recorder.event(*said)

    def _close_learner(self) -> None:
        self._learner.close()
        self._tell_ended()
        account = self._bubbles.account()
        if account.bubble_seconds > 0:
            self._recorder.event("bubbles", account.told(), self._adapter.iteration, logging.DEBUG)

    def _close_record(self) -> None:
        self._recorder.steps(self._losses.flush(wait=True))
        if self._ending != "error":
            self._await_others()
        self._recorder.close(self._ending)
        if self._ending != "error" and self._group.rank == 0:
            self._run.mark_ended(self._ending, self._adapter.iteration)

    def _await_others(self) -> None:
        """Until all ranks have said what they say at their end: rank 0 takes it over into the journal."""
        # Another rank's writer may take as long as a save may, and so may its copy to the target.
        timeout = 2 * self.config.checkpoint.save_timeout_seconds
        try:
            self._group.reduce(torch.zeros(1), timeout_seconds=timeout)
        except RuntimeError as error:
            logger.warning(
                "another rank did not come to the end of the record; what it says after this is in %s alone, until the "
                "next life: %s",
                self.config.run_dir / "events",
                error,
            )

    def _close_group(self) -> None:
        if self._ending != "error":  # with a dead peer, leaving the group would wait for it
            self._group.close()

    def _handle_sigterm(self, handlers: ExitStack) -> None:
        """Install the handler; `handlers` puts the old one back."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not on the main thread: SIGTERM will not commit the state before leaving")
            return

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            # Acted upon at the next step boundary, by all ranks together. No Event: it has a lock, which a second
            # signal that comes while the first is being handled would wait for.
            self._stop = True

        handlers.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, on_sigterm))
        self._departure.hear_sigterm()

    def _at_boundary(self, iteration: int) -> None:
        """The state is that of the end of this iteration, until the optimizer changes it."""
        self._pool.mark_boundary()
        self._departure.end_update(iteration)

    def _dump(self, iteration: int) -> None:
        """This rank is about to leave a broken group: its state outlives it."""
        if self._watch is not None:
            raise SaveError("a predicted state is being watched, and could not be given up any more")
        self._pool.dump(self._adapter.shard(), iteration, self._state.left())

    # At a step boundary

    def _learn(self) -> None:
        """Tell the learner of the newest checkpoint, and everybody when it or the planner has given up."""
        if self._saver.saved_iteration is not None:
            self._learner.notify(self._saver.saved_iteration, self._state.history_start)
        self._target.notify(self._saver.saved_iteration)
        self._tell_of_target()
        self._tell_ended()
        failure = self._planner.failure()
        if failure is not None:
            self._recorder.event("planning ended", failure, level=logging.ERROR)

    def _tell_ended(self) -> None:
        failure = self._learner.failure()
        if failure is not None:
            self._recorder.event("learning ended", failure, level=logging.ERROR)

    def _tell_starved(self, message: str) -> None:
        self._recorder.event("learning waits", message, level=logging.WARNING)

    def _situation(self, iteration: int) -> Situation:
        return Situation(
            Schedule(iteration, self._learning_rate, self._state.peak_learning_rate),
            statistics.median(self._iteration_seconds),
            len(self._iteration_seconds),
            self.plan,
        )

    def _vote(self, iteration: int) -> None:
        proposal = self._planner.proposal() if self._sent is None else None
        if proposal is not None:
            self._sent = proposal  # said once; agreed at the next call
        leave, interval, rehearsed = self._votes.exchange(
            self._stop,
            0 if proposal is None else proposal.interval_iterations,
            self._rehearsals.propose(iteration) if self._may_rehearse() else 0,
        )
        if interval:
            self._saver.adopt(self._agreed_plan(interval), iteration)
            self._sent = None
        if rehearsed:
            self._rehearsals.prepare(rehearsed, iteration)
        if leave:
            self._commit_to_leave(iteration)

    def _commit_to_leave(self, iteration: int) -> None:
        """Commit this iteration at once, and leave when the loop is through with it; a collective."""
        agreed = time.monotonic()
        self._tail.drop()  # a checkpoint that is due now is this one
        self._departure.leave_in_order()
        self._liveness.finish()
        self._last_is_safe = self._saver.save_now(iteration, self._capture)
        save_seconds = time.monotonic() - agreed
        self._tail.put_off(
            partial(self._leave, iteration, self._state.of_loop(), agreed + LEAVE_SECONDS - save_seconds)
        )

    def _leave(self, iteration: int, committed: dict[str, Any], deadline: float) -> None:
        """Commit also what the loop has done since, before the deadline, and leave; a collective."""
        told, level = "its state is committed", logging.INFO
        if not self._last_is_safe:
            told = "its state could not be committed; the last checkpoint holds"
        elif not self._group.all(self._state.is_unchanged(committed)):
            in_time = self._group.all(time.monotonic() < deadline)
            if not (in_time and self._saver.replace(iteration, self._capture)):
                level = logging.WARNING
                told += (
                    ", without what the loop did to random states and registered objects after the step "
                    f"({'it could not be written' if in_time else f'that took longer than {LEAVE_SECONDS:g} s'})"
                )
        self._recorder.event("sigterm", f"leaving at iteration {iteration} after SIGTERM: {told}", iteration, level)
        raise _Leave

    def _begin_checkpoint(self, iteration: int, part: Part) -> None:
        self._saver.begin(iteration, part, self._capture, self._state.place)
        self._bubble_log.at_checkpoint(iteration)
        self._planner.consider(self._situation(iteration))

    def _may_rehearse(self) -> bool:
        """Not beside a state that is watched, nor with steps that are longer for another one's sake."""
        return self._watch is None and not (self._experts is not None and self._experts.catching_up)

    def _agreed_plan(self, interval_iterations: int) -> Plan:
        """What rank 0 has proposed, as far as this rank must know it; a collective where ranks have their own."""
        heard = Plan(
            interval_iterations, self.config.planner.policy, {"rule": "planned by rank 0, whose journal says why"}
        )
        plan = self._sent or heard
        if self.config.planner.intervals == "common":
            return replace(plan, rank_interval_iterations=())
        own = torch.zeros(self._group.size, dtype=torch.int64)
        if self._group.rank == 0 and plan.rank_interval_iterations:
            own += torch.tensor(plan.rank_interval_iterations)
        agreed = tuple(self._group.reduce(own).tolist())
        return replace(plan, rank_interval_iterations=agreed if any(agreed) else ())

    def _diverges(self, iteration: int) -> bool:
        """Feed the watch; True when the predicted state must be given up."""
        decision = None if self._watch is None else self._watch.observe(iteration)
        if decision is None or decision.status == "watching":
            return False
        self._recorder.event("watch", f"the watch of the predicted state {decision.reason}", iteration)
        diverged = decision.status == "diverged"
        if diverged and self._group.all(self._state.can_rewind):
            self._roll_back()  # before the watch ends: until then the checkpoint is held in memory
            self._end_watch("rolled_back", vars(decision))
            return True
        self._end_watch("kept", vars(decision))
        if diverged:
            self._go_on_diverged(iteration)
        return False

    def _tell_lag(self, recovered: RecoveredLag, iteration: int) -> None:
        """What the recovery has cost, as far as the losses tell, for the journal and the predictor; a collective."""
        self._recovered = None
        settings = {} if self._restored.forecast is None else self._restored.forecast.settings
        # Rank 0 alone has the losses of earlier lives, and all must learn the same.
        measured, settings = self._group.broadcast([recovered.measure(), settings])
        if measured is None:
            self._recorder.event("recovered", "the losses do not tell how far behind the recovery is", iteration)
            return
        lag, error = measured
        told = {"lag_iterations": lag, "standard_error_iterations": error}
        self._learner.record({"kind": "recovery", "settings": settings, **told})
        message = f"the recovery lags {lag:+.0f} +- {error:.0f} iterations behind the course before the failure"
        self._recorder.event("recovered", message, iteration)
        guard = {**self._restored.guard, "watch": self._watched, "lag": told}
        self._recorder.recovery_outcome(self._recovery_id, "kept", guard)

    def _end_watch(self, outcome: Literal["kept", "rolled_back"], watch: dict[str, Any]) -> None:
        self._watch, self._watched = None, watch
        self._pool.unpin()
        self._recorder.recovery_outcome(self._recovery_id, outcome, {**self._restored.guard, "watch": watch})
        settings = {} if self._restored.forecast is None else self._restored.forecast.settings
        self._learner.record({"outcome": outcome, "settings": settings, "watch": watch})

    def _roll_back(self) -> None:
        """Give up the predicted state: exactly back to the checkpoint, and recompute."""
        self._departure.begin_update()
        self._saver.discard()
        with self._learner.held():
            restored = self._restorer.roll_back(self._restored)
        iteration = restored.restored_iteration
        self._forget_after(iteration, "the predicted state diverged")
        restored = self._restored = self._with_lost_tokens(restored)
        self._state.take(restored)
        if restored.scalars is not None:  # the loop is yet to do what comes after the step that is given up
            self._tail.put_off(partial(self._state.take_again, restored.scalars))
        self._progress.reset(iteration, self._state.position.batches)
        self._at_boundary(iteration)
        self._saver.restart(iteration, iteration)
        self._recorder.event("rolled back", restored.reason, iteration, logging.WARNING)

    def _go_on_diverged(self, iteration: int) -> None:
        """No way back in this process: leave the way open for the next one, and say so."""
        checkpoint = self._restored.checkpoint_iteration or 0
        self._forget_after(checkpoint, "the predicted state diverged")
        self._saver.restart(iteration, checkpoint)
        self._recorder.event(
            "diverged",
            "the predicted state diverged and cannot be rolled back, because a rank's data iterator is one-shot and "
            "cannot deal earlier batches again: training goes on from the diverged state. Stop the job before its next "
            f"checkpoint (iteration {iteration + self.plan.interval_iterations}) and restart it with mode 'exact' to "
            f"recompute from checkpoint {checkpoint}; give resume() the DataLoader itself to have this done for you",
            iteration,
            logging.ERROR,
        )

    def _forget_after(self, iteration: int, reason: str) -> None:
        """Set checkpoints of a state that was given up aside, on all ranks together."""
        timeout = self.config.checkpoint.save_timeout_seconds
        if not self._group.all(self._writer.drain(timeout)):
            raise SaveError(
                f"a rank's disk did not finish a checkpoint within {timeout:g} s, and checkpoints must be set aside "
                f"now ({reason}); nothing was set aside: restart the job when the disk answers"
            )
        self._store.attempt += 1  # the same iterations may be saved again
        self._memory.forget_after(iteration)
        if self._group.rank == 0:
            mark_life(self.config.run_dir, self._recorder.life, self._memory.branch)
        self._recovered = None
        if self._experts is not None:
            self._experts.forget()
        self._rehearsals.drop()
        self._store.abandon_after(iteration, reason)
        self._group.barrier()

    def _capture(self) -> Scalars:
        self._note(self._losses.flush(wait=True))  # the checkpoint carries the losses up to here
        return self._state.capture()

    def _note(self, steps: Sequence[Step]) -> None:
        self._recorder.steps(steps)
        self._rehearsals.on_steps(steps)
        if self._recovered is not None:
            self._recovered.on_steps(steps)


class _Leave(SystemExit):
    """Raised at the step boundary at which all ranks leave after SIGTERM."""

    def __init__(self) -> None:
        super().__init__(SIGTERM_EXIT_STATUS)


def _one_line(error: BaseException | None) -> str:
    """An exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _configuration(
    engine: Any, config: CPSRConfig | Mapping[str, Any] | str | Path | None, mode: str | None
) -> CPSRConfig:
    if config is None:
        block = getattr(engine, "config", None)  # what DeepSpeed read, also where it was given a file
        if not isinstance(block, Mapping) or "cpsr" not in block:
            raise ConfigError(
                'no configuration: pass one to CPSRRecovery, or add a "cpsr" block with at least "run_dir" to the '
                "DeepSpeed configuration"
            )
        config = {"cpsr": block["cpsr"]}
    loaded = CPSRConfig.load(config)
    return loaded if mode is None else CPSRConfig.load({**loaded.model_dump(), "mode": mode})
