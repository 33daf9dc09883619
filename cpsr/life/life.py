"""One life of a run: opening, the script of a step, rewinding, closing."""

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from cpsr.checkpoint.progress import mark_life
from cpsr.config import CPSRConfig
from cpsr.engines.offload import offloaded_activations
from cpsr.errors import NotRestoredError
from cpsr.job import Ending, Part, Rewind
from cpsr.life.agreement import Agreement
from cpsr.life.announcement import announce, cause_of_failure
from cpsr.life.batch_warnings import BatchWarnings
from cpsr.life.boundary import Boundary
from cpsr.life.clock import StepClock
from cpsr.life.leaving import Leave, Leaving
from cpsr.life.loop import Loop
from cpsr.life.loop_tail import LoopTail
from cpsr.life.message import diverged_message
from cpsr.life.opening import open_for_life
from cpsr.life.outcome import LagReport, RecoveredLag, RecoveryOutcome, losses_before
from cpsr.life.probation import Probation
from cpsr.life.rehearsed import Rehearsed, rehearsed
from cpsr.life.stop_request import StopRequest
from cpsr.life.witnessing import Witnessing
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.ranks.emergency_dump import undisturbed
from cpsr.restart.experts import with_lost_tokens
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restore import Restored, Restorer
from cpsr.restart.sources import MemorySources
from cpsr.saving.copies import Copies
from cpsr.saving.memory_snapshots import Turn
from cpsr.saving.saver import Saver
from cpsr.saving.unsaved import Unsaved
from cpsr.state.loader_workers import prepared_workers
from cpsr.state.scalars import Scalars

__all__ = ["Life"]

AnyPart = TypeVar("AnyPart", bound=Part)

FIRST_PLAN_ITERATIONS = 10  # of a life; then their duration is known well enough to replan
DIVERGED = "the predicted state diverged"


class Life:
    """Follows the training through the engine's hooks; complete once constructed, or closed again.

    A `StepObserver` of the engine. `after_step` is the script of a step.

    Args:
        loop: the training.
        config: as given by the user.

    Attributes:
        run: the open run.
        boundary: publishes each finished step.
        restored: the state that this life began with, or the one after a roll-back.
        saver: saves the state when it is due.
        planner: of the interval.

    Raises:
        CPSRError: see `CPSRRecovery`.
    """

    def __init__(self, loop: Loop, config: CPSRConfig) -> None:
        self.loop = loop
        self._exact = config.mode == "exact"  # as given; the job's own mode may be exact because nothing is predicted
        self._ending = Ending()
        self._stop = StopRequest()
        self._disowned = False
        self._parts: list[Part] = []
        with ExitStack() as opened:
            handlers = opened.enter_context(ExitStack())  # restored last: another SIGTERM must not interrupt leaving
            self._open(opened, loop.state)  # closed late: the last checkpoint asks the loader for its position
            self.run = open_for_life(loop, config, opened, self._ending)
            self.job = self.run.job
            self._attendance = self.job.group.attendance
            # Closed after the boundary, by when a GPU has completed the last steps.
            self._witnessing = self._open(opened, self._witnesses())
            self.boundary = self._open(opened, Boundary(self.job, self.run.memory.pool, loop.state))
            self._parts.append(self._open(opened, loop.learning))
            self.planner = self._open_planner(opened)
            self.restorer = self._restorer(asked=config.mode)
            self._restore()
            self._begin(opened)
            self._attach(opened)
            if self._stop.watch(handlers):
                self.boundary.emergency_dump.watch_sigterm(self._stop.note)
            self._opened = opened.pop_all()

    # Opening

    def _open(self, opened: ExitStack, part: AnyPart) -> AnyPart:
        opened.callback(part.close, self._ending)
        return part

    def _open_planner(self, opened: ExitStack) -> JobPlanner:
        job, learning = self.job, self.loop.learning
        planner = JobPlanner(
            job.config,
            job.group.rank,
            job.shard.parameters,
            job.adapter.second_moment_decay(),
            lambda: learning.learner.ask(learning.predictor.accuracy),
            lambda: learning.learner.ask(learning.predictor.straightness),
        )
        opened.callback(planner.close)
        return planner

    def _witnesses(self) -> Witnessing:
        published = lambda: self.boundary.published  # noqa: E731 - there is no boundary yet
        windows = self.run.memory.windows
        replays = (lambda: None) if windows is None else windows.replays
        return Witnessing(self.job, self.loop.state, self.loop.losses, published, replays)

    def _restorer(self, asked: str) -> Restorer:
        job, run = self.job, self.run
        before = run.previous_life, run.previous_held
        windows = run.memory.windows is not None
        memory = MemorySources(job.run.run_id, job.group, job.shard, job.config.peers, *before, windows)
        return Restorer(
            job,
            run.store,
            run.target,
            run.memory.pool,
            memory,
            StatePrediction(job, run.store, self.loop.learning.predictor, self.loop.probes),
            inexact=asked != "exact",
        )

    def _restore(self) -> None:
        """Bring the engine to the newest state that can be restored, and start this life from there."""
        job, run = self.job, self.run
        self.loop.state.hyperparameters.begin()
        self._adopt(self.restorer.restore(job.config.mode))
        iteration = self.restored.restored_iteration
        run.store.abandon_after(iteration, f"the run continues from iteration {iteration}")
        run.memory.settle(self.restored.sources)
        job.group.barrier()  # no rank resets its counter before all have read where the run failed
        self.boundary.reset(iteration)
        if job.group.rank == 0:
            mark_life(job.config.run_dir, job.journal.life)
            job.run.adopt_ranks()
        run.memory.begin(iteration)
        pool = run.memory.pool
        self._probation = Probation(job, self.restored, self.loop.losses, pool)
        self.boundary.may_dump = not self._probation.active
        cause = cause_of_failure(job)
        self._outcome = RecoveryOutcome(job, self.loop.learning.learner, self.restored, cause, self._probation.active)
        follows = self.restored.predicted and not self.restored.partly_predicted
        measured = RecoveredLag(losses_before(job.journal, iteration), iteration) if follows else None
        self._lag = LagReport(job, self._outcome, measured)
        self._witnessing.begin(iteration)
        lost = (self.restored.failure_iteration or iteration) - iteration
        announce(job, self.restored, cause, self.restorer.damaged, self._witnessing.outlook(lost))
        if self.loop.state.notice is not None and job.group.rank == 0:
            job.journal.event("hyperparameters", self.loop.state.notice, iteration, logging.WARNING)

    def _begin(self, opened: ExitStack) -> None:
        """Start the parts that run beside the training."""
        job, run, loop = self.job, self.run, self.loop
        if self.restored.scalars is not None:
            self.planner.load_state_dict(self.restored.scalars.planning, replicates=run.memory.replicates)
        self.saver = Saver(
            job, run.store, run.memory, self.planner, self.restored, run.experts, run.writes, exact=self._exact
        )
        self._copies = self._open(opened, Copies(job, run.target, self.saver))
        self._open(opened, self.saver)
        loop.learning.start(job, run.store, run.memory.pool)
        self.planner.start(job.config.run_dir, job.group.size, job.journal)
        run.memory.follow_replicas(self.planner.note_replica)
        self._agreement = Agreement(job, self.planner, self.saver)
        self._tail = LoopTail(job.group, loop.state, pipeline=job.adapter.pipeline_stage is not None)
        self._clock = StepClock(job.adapter)
        self._batch_warnings = BatchWarnings(job, loop.state.draws)
        self._leaving = Leaving(
            job,
            self.boundary,
            self.saver,
            loop,
            self._tail,
            self._stop,
            self._capture,
            self._ending,
            self._witnessing,
            self._clock,
        )
        loop.events.begin(job, self.saver.saved_iteration, self._tail.defer_here)
        run.steps.followers += [self._lag.on_steps, self.saver.memory.on_steps]
        loop.state.on_request = self._on_request
        loop.state.on_end = self._on_end
        self._parts += [
            loop.state,
            self._witnessing,
            self._lag,
            self.boundary,
            self.saver,
            loop.events,
        ]
        self._rehearsed = None if (asked := rehearsed()) is None else Rehearsed(asked, job)

    def _attach(self, opened: ExitStack) -> None:
        """Attach to the engine."""
        job, loop = self.job, self.loop
        self.boundary.prepare()
        job.adapter.attach(self)
        opened.callback(job.adapter.detach)
        unsaved = Unsaved(job.adapter, lambda: loop.state.objects, self._exact, job.journal.event)
        opened.callback(unsaved.close)
        config, free_bytes = job.config.engines, self.run.free_bytes
        opened.enter_context(offloaded_activations(job.adapter, config, free_bytes, job.journal.event))
        opened.enter_context(prepared_workers())

    # Called by the engine's hooks, on the training thread

    def before_update(self) -> None:
        """The optimizer is about to change the state that a snapshot may still be copying."""
        self.boundary.sign()
        self._tail.finish()
        self._clock.before_update()
        self._witnessing.before_update()
        self.saver.before_update()
        self.boundary.before_update()

    def state_changes(self) -> None:
        """From here to the end of the step the state belongs to no iteration."""
        self.boundary.begin_update()

    def on_train_batch(self) -> None:
        """A pipeline's `train_batch` is called."""
        self._stop.look()
        self._tail.finish()

    def _on_request(self) -> None:
        """The loop requests a batch."""
        if self._leaving.is_over:  # it has caught the exception
            self._leaving.raise_leave()
        self._stop.look()
        self.boundary.request()
        if self._attendance is not None and self._tail.is_here:
            self._attendance.train(self.job.adapter.iteration + 1)
        self._tail.on_request()
        if self._rehearsed is not None:
            self._rehearsed.on_request()

    def _on_end(self, last: bool) -> None:
        """A pass has ended; the loop may change the state before the next one, or have no other."""
        if not self._tail.is_here:
            return
        self.saver.finish()
        if self._attendance is not None and last:
            self._attendance.leave(self.job.adapter.iteration, may_return=True)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins: it changes buffers and random states."""
        self.boundary.sign()
        self.loop.losses.begin()
        self._tail.finish()
        if self.run.experts is not None:
            self.run.experts.begin_forward()
        self._witnessing.on_forward()
        self.run.memory.look()
        self.loop.state.draws.forward()
        self.loop.probes.on_forward(args, kwargs)

    def on_other_forward(self) -> None:
        """The module is called for something else, perhaps with other weights."""
        self.run.memory.look()

    def log_loss(self, loss: torch.Tensor) -> None:
        """The script reports the loss of a micro-batch."""
        self.loop.losses.log(loss)

    def on_loss(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch."""
        self.boundary.sign()
        self.loop.losses.add(loss)

    def wait_begins(self, place: str) -> None:
        """The thread is about to wait for another pipeline stage."""
        self.loop.learning.bubbles.begin(place)

    def wait_ends(self) -> None:
        """The wait is over."""
        self.loop.learning.bubbles.end()

    def after_step(self, iteration: int, applied: bool) -> None:
        """One step is complete: publish, save if due, and agree on what comes next."""
        if self._leaving.left:
            self._compare_later(iteration)
            return
        self._stop.look()
        if self._attendance is not None:
            self._attendance.train(iteration)
        step = self._clock.end(iteration, applied)
        self._count(iteration, applied)
        self.run.memory.after_step(iteration)
        self.run.steps.end(step)
        self._witnessing.after_step(iteration)
        self.boundary.publish(iteration)
        self.planner.step(step.seconds)
        self.saver.surface()
        self._follow_background(iteration)
        if self._probation.active and self._is_given_up(iteration):
            return
        # A predicted state is not committed while it is watched: it may still be discarded, and the checkpoint it came
        # from must stay the newest.
        due = not self._probation.active and self.saver.is_due(iteration)
        if self._tail.saves:  # the loop takes several steps on one batch
            self._batch_warnings.waits_for_batch(due=due)
        elif due:
            self.saver.count_from(iteration)
            self._tail.defer(self._begin_checkpoint, saves=True)
        else:
            self._follow_up(iteration)
        if not self._probation.active and (end := self.saver.end_of(iteration, self._capture_for_memory)) is not None:
            self._tail.defer_here(end)
        self._lag.report_if_due(iteration)
        leaves = self._agreement.exchange(iteration, stop=self._stop.made)
        if self._rehearsed is not None:
            leaves |= self._rehearsed.after_step(iteration)
        if leaves and not self._leaving.begun:
            self._leaving.begin()

    def before_external_load(self) -> None:
        """The user's load_checkpoint is about to overwrite state that a snapshot may still be copying."""
        self._tail.finish(ended=True)  # it may find nothing to load
        self.boundary.begin_change()
        self.saver.finish()

    def after_external_load(self, iteration: int | None) -> None:
        """The committed checkpoints do not lead to the loaded state: set later ones aside, and save this state."""
        if iteration is None:
            self.boundary.end_change(self.job.adapter.iteration)
            return
        replaced = "the user's load_checkpoint replaced the state"
        if self._probation.active:
            self._end_probation("kept", {"status": "ended", "iteration": iteration, "reason": replaced})
        self.rewind(Rewind(iteration, None, replaced))
        with self.boundary.busy():
            saved = self.saver.save_now(iteration, self._capture)
        result = "is committed" if saved else "could not be committed: a failure before the next checkpoint loses it"
        self.job.journal.event(
            "external load",
            f"load_checkpoint went to iteration {iteration}: that state {result}; checkpoints of later iterations were "
            f"set aside; the data continues after batch {self.loop.state.position.batches}, the loader's position",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )

    # Steps of the script

    def _count(self, iteration: int, applied: bool) -> None:
        self.loop.learning.bubbles.end_iteration()
        self._tail.after_step()
        self.loop.state.end_step()
        self._batch_warnings.after_step()
        if applied:
            self.loop.state.count_update(self._clock.learning_rate)
        if self.run.experts is not None:
            self.run.experts.end_iteration(iteration, applied)

    def _compare_later(self, iteration: int) -> None:
        """A step after the last commit of this life, for the next life to compare with."""
        self.loop.losses.close_iteration()
        self._leaving.after_step(iteration)
        self._tail.after_step()
        self.loop.state.end_step()
        self.boundary.end_change(iteration)

    def _follow_background(self, iteration: int) -> None:
        """Notify the background threads and the user of the newest checkpoint, and report their failures."""
        self.loop.learning.at_step(self.saver.saved_iteration, self.loop.state.history_start)
        self._copies.at_step()
        self.loop.events.at_step(iteration, self.saver.saved_iteration)
        if (failure := self.planner.failure()) is not None:
            self.job.journal.event("planning ended", failure, level=logging.ERROR)

    def _follow_up(self, iteration: int) -> None:
        """What a step without a checkpoint may need: a snapshot to host memory, the first plan after a failure."""
        due = not self._probation.active and self.saver.is_memory_due(iteration)
        if due and (turn := self.saver.turn_in_memory(iteration)) is not None:
            self._tail.defer_here(partial(self._begin_in_memory, turn), saves=True)
        if iteration == self.restored.restored_iteration + FIRST_PLAN_ITERATIONS:
            self._plan(iteration)  # a failure has changed the rate

    def _begin_in_memory(self, turn: Turn) -> None:
        self.saver.begin_in_memory(self.job.adapter.iteration, turn, self._capture_for_memory)

    def _begin_checkpoint(self) -> None:
        iteration = self.job.adapter.iteration  # a later one than it was due at if the loop repeats a batch
        self.saver.begin(iteration, self._capture)
        self._batch_warnings.at_checkpoint()
        self.loop.learning.at_checkpoint(iteration)
        self._plan(iteration)

    def _plan(self, iteration: int) -> None:
        peak = self.loop.state.peak_learning_rate
        self.planner.consider(self._clock.situation(iteration, peak, self.saver.plan))

    def _capture(self) -> Scalars:
        self.run.steps.flush(wait=False)  # of those that a device still has, the checkpoint takes them itself
        return self.loop.state.capture()

    def _capture_for_memory(self) -> Scalars:
        return self.loop.state.capture(whole=False)

    # Rewinding

    def rewind(self, to: Rewind, restored: Restored | None = None) -> None:
        """Continue from another state; the only way to rewind, a collective.

        Used by a roll-back, a diverged state that cannot be rolled back, and the user's own load.

        Args:
            to: the new state.
            restored: the state in the engine; None leaves the small state as it is.

        Raises:
            SaveError: checkpoints had to be set aside, and a disk did not answer. Nothing was set aside.
        """
        self.run.set_aside(to, self.saver.drain)
        if restored is not None:
            self._adopt(restored)
            if restored.scalars is not None:  # the loop will still finish the discarded iteration
                self._tail.defer(partial(self.loop.state.take_again, restored.scalars))
        for part in self._parts:
            part.rewound(to)

    def _adopt(self, restored: Restored) -> None:
        """Continue from the state in the engine; a collective."""
        self.restored = with_lost_tokens(restored, self.run.experts, self.job.group)
        self.loop.state.take(self.restored)

    def _is_given_up(self, iteration: int) -> bool:
        """Whether the watched state has diverged and was rolled back; a collective."""
        with self.boundary.busy():
            decision = self._probation.observe(iteration)
            if decision is None:
                return False
            self.job.journal.event("watch", f"the probation of the predicted state {decision.reason}", iteration)
            diverged = decision.status == "diverged"
            if diverged and self.job.group.all(self.loop.state.can_rewind):
                self._roll_back()  # before the watch ends: until then memory keeps the checkpoint
                self._end_probation("rolled_back", vars(decision))
                return True
            self._end_probation("kept", vars(decision))
            if diverged:
                self._go_on_diverged(iteration)
            return False

    def _roll_back(self) -> None:
        """Discard the predicted state: restore the exact checkpoint, and recompute."""
        self.boundary.begin_change()
        self.saver.discard()
        with self.loop.learning.learner.locked():
            restored = self.restorer.roll_back(self.restored)
        iteration = restored.restored_iteration
        self.rewind(Rewind(iteration, iteration, DIVERGED), restored)
        self._outcome.rolled_back(self.restored)
        self.job.journal.event("rolled back", restored.reason, iteration, logging.WARNING)

    def _go_on_diverged(self, iteration: int) -> None:
        """Report a diverged state that this process cannot roll back; a restart still can."""
        checkpoint = self.restored.checkpoint_iteration or 0
        self.rewind(Rewind(iteration, checkpoint, DIVERGED))
        message = diverged_message(checkpoint, iteration + self.saver.plan.interval_iterations)
        self.job.journal.event("diverged", message, iteration, logging.ERROR)

    def _end_probation(self, outcome: Literal["kept", "rolled_back"], watch: dict[str, Any]) -> None:
        self._probation.end()
        self.boundary.may_dump = True
        self._outcome.end_watch(outcome, watch)

    # Closing

    @property
    def on_probation(self) -> bool:
        """Whether the predicted state that this life began with may still be discarded."""
        return self._probation.active

    def disown(self) -> None:
        """This process is a fork of the one that lives this life: here nothing of it is watched, saved or closed."""
        self._disowned = True
        self.job.adapter.detach()
        self.loop.state.unwatch()
        self._tail.drop()

    def close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """End the life after its `with` block, in its own process; parts close in reverse order of opening."""
        if self._disowned:
            return
        try:
            with undisturbed(), self._opened:
                if self._rehearsed is not None:
                    self._rehearsed.close()
                # Before rank 0 last gathers the other ranks' rows.
                self.loop.learning.record_bubbles(self.job.adapter.iteration)
                if self._attendance is not None and not self._leaving.left:
                    self._attendance.leave(self.job.adapter.iteration, None if kind is None else kind.__name__)
                if kind is None:
                    self._end()
                elif self._leaving.left and isinstance(error, SystemExit):
                    self._end_left()
                elif self._leaving.left or isinstance(error, NotRestoredError):
                    self.boundary.may_dump = False  # a restart would take it for a state of the run
                    self.boundary.abandon(error, dump=False)
                elif self._stop.made and self.job.group.size == 1 and not self.boundary.changing:
                    self._end_stopped()
                else:
                    self.boundary.abandon(error)
        finally:
            self._leaving.close()
        if kind is None and self._stop.kept is not None:
            raise self._stop.kept

    def _end(self) -> None:
        """The loop has ended on this rank: wait for the others, and save the last state."""
        if self._leaving.left:  # and by itself, before the last step to compare
            self._end_left()
            self._leaving.raise_leave()
        try:
            self._tail.finish(ended=True)  # may leave, after a SIGTERM in the last step
            self._agreement.finish()
            self.job.group.barrier()  # all ranks are done; a dead rank raises here and not in the last save
        except BaseException as failure:
            if not self._leaving.left:
                self.boundary.abandon(failure)
                raise
            self._end_left()
            if isinstance(failure, Leave) and self._stop.script_handles:
                return  # the loop has ended by itself, maybe because the script's handler told it to
            raise
        self.boundary.leave_in_order()
        self.saver.finish()
        iteration = self._ending.iteration = self.job.adapter.iteration
        self._leaving.save_last(iteration)
        self.loop.events.at_step(iteration, self.saver.saved_iteration)
        self._ending.how = "clean"
        self._end_unfinished_probation()

    def _end_stopped(self) -> None:
        """After SIGTERM the script's own code has left the loop with an exception, of this rank alone."""
        self._tail.drop()
        self._leaving.commit(self.job.adapter.iteration)
        self._end_left()

    def _end_left(self) -> None:
        self._leaving.announce()
        self._agreement.finish()
        self._ending.how = "sigterm"
        self._end_unfinished_probation()

    def _end_unfinished_probation(self) -> None:
        if self._probation.active:
            watch = {"status": "unfinished", "iteration": self.job.adapter.iteration}
            self._end_probation("kept", {**watch, "reason": "the life ended before the watch"})
