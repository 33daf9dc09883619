"""One life of a run: the script of a step, rewinding, closing."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from cpsr.config import CPSRConfig
from cpsr.errors import NotRestoredError
from cpsr.job import Ending, Job, Rewind
from cpsr.life.attention import Attention
from cpsr.life.leaving import Leave, Leaving, StopRequest
from cpsr.life.loop import FAILURES_ITERATIONS, Loop, Steps
from cpsr.life.opening import adopt, open_life
from cpsr.life.probation import Probation
from cpsr.life.rehearsed_life import Rehearsed
from cpsr.life.saver import Saver
from cpsr.life.step_boundary import Boundary
from cpsr.life.witnessing import Witnessing
from cpsr.peers.host_memory import HostMemory
from cpsr.planner.plan import Plan
from cpsr.ranks.agreement import Agreement, Intervals
from cpsr.ranks.board import Board
from cpsr.ranks.emergency_dump import undisturbed
from cpsr.ranks.proposals import Act, Proposal
from cpsr.restart.restore import Restorer
from cpsr.restart.restored_state import Restored

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.routed import RoutedTokens
    from cpsr.experts.saving import ExpertSaving
    from cpsr.planner.live.job_planner import JobPlanner
    from cpsr.verification.verification import Verification

__all__ = ["Life"]

FIRST_PLAN_ITERATIONS = 10  # of a life; then their duration is known well enough to replan
DIVERGED = "the predicted state diverged"
NOT_OF_THE_RUN = "a restart would take it for a state of the run"


class Life:
    """Follows the training through the engine's hooks; complete once constructed, or closed again.

    A `StepObserver` of the engine. `after_step` is the script of a step.

    Attributes:
        restored: the state that this life began with, or the one after a roll-back.
        tokens: counts those of experts; None: nothing needs them.
        experts: chooses the experts that a checkpoint saves; None: all of them.
        rehearsed: cuts short a life that `cpsr rehearse` watches; None: nobody watches it.

    Raises:
        CPSRError: see `CPSRRecovery`.
    """

    job: Job
    restored: Restored
    restorer: Restorer
    memory: HostMemory
    tokens: "RoutedTokens | None"
    experts: "ExpertSaving | None"
    steps: Steps
    witnessing: Witnessing
    boundary: Boundary
    probation: Probation
    planner: "JobPlanner"
    saver: Saver
    verification: "Verification"
    leaving: Leaving
    board: Board
    agreement: Agreement
    rehearsed: Rehearsed | None

    def __init__(self, loop: Loop, config: CPSRConfig) -> None:
        self.loop = loop
        self.ending, self.attention = Ending(), Attention()
        self.stop = StopRequest(self.attention.call)
        self._proposed: Plan | None = None  # the newest that this rank has proposed
        self._disowned = False
        with ExitStack() as opened:
            open_life(self, config, opened)
            loop.state.on_request, loop.state.on_end = self._on_request, self._on_end
            self._opened = opened.pop_all()

    # Called by the engine's hooks, on the training thread

    def before_update(self) -> None:
        """The optimizer is about to change the state that a snapshot may still be copying."""
        boundary = self.boundary
        boundary.liveness.signs += 1
        if self.loop.tail.waiting:
            self.loop.tail.finish()
        self.steps.before_update()
        if self.memory.pool.running is not None or self.memory.windows is not None:
            self.saver.finish()
        if self.verification.running:
            self.verification.before_update(self.saver.copied)
        if boundary.on_device:
            boundary.before_update()

    def state_changes(self) -> None:
        """From here to the end of the step the state belongs to no iteration."""
        self.boundary.emergency_dump.begin_update()
        if self.boundary.on_device:
            self.boundary.begin_update()

    def on_train_batch(self) -> None:
        """A pipeline's `train_batch` is called."""
        self.stop.look()
        self.loop.tail.finish()

    def _on_request(self) -> None:
        """The loop requests a batch."""
        if self.leaving.left and self.leaving.is_over:  # it has caught the exception
            self.leaving.raise_leave()
        boundary, tail = self.boundary, self.loop.tail
        if boundary.on_device:
            boundary.poll()
        if get_ident() != tail.thread:
            return
        if boundary.emergency_dump.updating or not self.loop.state.draws.counts:
            boundary.require_steps()
        self.stop.look()
        if self.job.group.attendance is not None:
            self.job.group.attendance.train(self.job.adapter.iteration + 1)
        tail.on_request()

    def _on_end(self, last: bool) -> None:
        """A pass has ended; the loop may change the state before the next one, or have no other."""
        if get_ident() == self.loop.tail.thread:
            self.saver.finish()
            if last:
                self.leaving.note_end(self.job.adapter.iteration, may_return=True)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins: it changes buffers and random states."""
        boundary, loop = self.boundary, self.loop
        boundary.liveness.signs += 1
        if boundary.on_device:
            boundary.poll()
        loop.losses.open = True
        if loop.tail.waiting:
            loop.tail.finish()
        if self.tokens is not None:
            self.tokens.begin_forward()
        if self.witnessing.looks:
            self.witnessing.on_forward()
        if self.memory.pool.engine.writes.mark is not None:
            self.memory.pool.look()
        loop.state.draws.forward()
        if not loop.probes.of_batches:
            loop.probes.on_forward(args, kwargs)

    def on_other_forward(self) -> None:
        """The module is called for something else, perhaps with other weights."""
        self.memory.pool.look()

    def log_loss(self, loss: torch.Tensor) -> None:
        """The script reports the loss of a micro-batch."""
        self.loop.losses.log(loss)

    def on_loss(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch."""
        self.boundary.liveness.signs += 1
        if self.boundary.on_device:
            self.boundary.poll()
        self.loop.losses.add(loss)

    def wait_begins(self, place: str) -> None:
        """The thread is about to wait for another pipeline stage."""
        self.loop.learning.bubbles.begin(place)

    def wait_ends(self) -> None:
        """The wait is over."""
        self.loop.learning.bubbles.end()

    def after_step(self, iteration: int, applied: bool) -> None:
        """One step is complete: publish, save if due, and agree on what comes next."""
        if self.leaving.left:
            self.verification.cancel()
            self._compare_later(iteration)
            return
        looks = self.attention.is_due(iteration)
        self.stop.look()
        if self.job.group.attendance is not None:
            self.job.group.attendance.train(iteration)
        step = self.steps.end(iteration, applied)
        self.loop.after_step(step)
        if self.tokens is not None:
            self.tokens.end_iteration(iteration, applied)
        if self.memory.windows is not None:
            self.memory.after_step(iteration)
        if looks:
            self.saver.after_step()
        self.boundary.publish(iteration)
        self.boundary.liveness.step(iteration, self.loop.own.end_step())
        self.planner.times.steps_seconds.append(step.seconds)
        if self.verification.running and self._goes_back(iteration):
            return
        if looks and not self._look(iteration):
            return
        if (looks or self.job.group.size > 1) and self._agree(iteration):
            self.leaving.leave_together(self.steps.median_seconds)
        self.witnessing.after_step(iteration, saves=bool(self.loop.tail.waiting))

    def before_external_load(self) -> None:
        """The user's load_checkpoint is about to overwrite state that a snapshot may still be copying."""
        self.loop.tail.finish(ended=True)  # it may find nothing to load
        self.boundary.emergency_dump.begin_update()
        self.saver.finish()

    def after_external_load(self, iteration: int | None) -> None:
        """The committed checkpoints do not lead to the loaded state: set later ones aside, and save this state."""
        if iteration is None:
            self.boundary.emergency_dump.end_update(self.job.adapter.iteration)
            return
        replaced = "the user's load_checkpoint replaced the state"
        self._end_probation({"status": "ended", "iteration": iteration, "reason": replaced})
        self.rewind(Rewind(iteration, None, replaced))
        with self.boundary.busy():
            saved = self.saver.save_now(iteration)
        result = "is committed" if saved else "could not be committed: a failure before the next checkpoint loses it"
        self.job.journal.event(
            "external load",
            f"load_checkpoint went to iteration {iteration}: that state {result}; checkpoints of later iterations were "
            f"set aside; the data continues after batch {self.loop.state.position.batches}, the loader's position",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )

    # Steps of the script

    def _look(self, iteration: int) -> bool:
        """Do what more than an ordinary step has to do; returns whether the step stays."""
        self.planner.times.settle()
        self.loop.follow(iteration, self.saver.saved_iteration)
        if self.probation.active and self._is_given_up(iteration):
            return False
        self._save_if_due(iteration)
        if iteration % FAILURES_ITERATIONS == 0:
            self._report_planning()
        self.attention.look_at(self._next_look(iteration))
        return True

    def _next_look(self, iteration: int) -> int:
        """The iteration from which on something is due. What is a collective begins there, on all ranks together."""
        each = self.probation.active, self.loop.warnings.learns, self.rehearsed is not None
        if self.memory.windows is not None or any(each):
            return iteration + 1
        first_plan = self.restored.restored_iteration + FIRST_PLAN_ITERATIONS
        dues = [
            self.saver.due_at,
            self.saver.memory.due_at(self.saver.plan.memory_interval_iterations),
            first_plan if iteration < first_plan else None,
            iteration + FAILURES_ITERATIONS - iteration % FAILURES_ITERATIONS,
        ]
        return min(due for due in dues if due is not None)

    def _compare_later(self, iteration: int) -> None:
        """A step after the last commit of this life, for the next life to compare with."""
        self.loop.losses.end_iteration(None)
        self.leaving.compare(iteration)
        self.loop.tail.after_step()
        self.loop.state.end_step()
        self.boundary.emergency_dump.end_update(iteration)

    def _save_if_due(self, iteration: int) -> None:
        """Begin what is due, once the loop has finished its iteration.

        A predicted state is not saved while it is watched: it may still be discarded, and the checkpoint it came from
        must stay the newest. Where the loop takes several steps on one batch, what is due waits for the last.
        """
        tail, saver, watched = self.loop.tail, self.saver, self.probation.active
        if not tail.saves:
            if not watched and saver.is_due(iteration):
                saver.count_from(iteration)
                tail.defer(self._begin_checkpoint, saves=True)
            else:
                begin = None if watched else saver.memory.due(iteration, saver.plan.memory_interval_iterations)
                if begin is not None:
                    tail.defer_here(begin, saves=True)
                if iteration == self.restored.restored_iteration + FIRST_PLAN_ITERATIONS:
                    self._plan(iteration)  # a failure has changed the rate
        if not watched and (end := saver.memory.end_of(iteration, lambda: tail.between_steps)) is not None:
            tail.defer_here(end)

    def _begin_checkpoint(self) -> None:
        iteration = self.job.adapter.iteration  # a later one than it was due at if the loop repeats a batch
        verifies = self.verification.due(iteration, self.steps.median_seconds)
        self.saver.begin_checkpoint(iteration, own=verifies)
        if verifies:
            self.verification.begin(iteration)
        self.loop.at_checkpoint()
        self._plan(iteration)

    def _plan(self, iteration: int) -> None:
        peak = self.loop.state.peak_learning_rate
        self.planner.consider(self.steps.situation(iteration, peak, self.saver.plan))

    def _agree(self, iteration: int) -> bool:
        """Carry out what all ranks do at the end of this step; returns whether they leave."""
        leaves = self.rehearsed is not None and self.rehearsed.after_step(iteration)
        if self.stop.made:
            self.agreement.ring()
        for agreed in self.agreement.end_step():
            if agreed.act == Act.PLAN:
                self.saver.adopt(self._plan_of(agreed), iteration)
            leaves = leaves or agreed.act == Act.LEAVE
        return leaves

    def _report_planning(self) -> None:
        if (failure := self.planner.failure()) is not None:
            self.job.journal.event("planning ended", failure, level=logging.ERROR)

    def propose_plan(self) -> Intervals | None:
        """New intervals for all ranks, once; on any thread of rank 0."""
        plan = self.planner.proposal()
        if plan is None:
            return None
        self._proposed = plan
        return plan.interval_iterations, plan.memory_interval_iterations or 0

    def _plan_of(self, agreed: Proposal) -> Plan:
        """Rank 0's plan, as far as this rank needs it."""
        if self._proposed is not None:
            return self._proposed
        return Plan(
            agreed.first,
            self.job.config.planner.policy,
            {"rule": "planned by rank 0, whose journal explains it"},
            memory_interval_iterations=agreed.second or None,
        )

    # Rewinding

    def rewind(self, to: Rewind, restore: Callable[[], Restored] | None = None) -> None:
        """Continue from another state; the only way to rewind, a collective.

        Used by a roll-back, a diverged state that cannot be rolled back, and the user's own load.

        Args:
            to: the new state.
            restore: brings the engine to that state; None: it has the state, and the small state stays as it is.

        Raises:
            SaveError: checkpoints had to be set aside, and a disk did not answer. Nothing was set aside.
        """
        self.attention.call()
        self.saver.set_aside(to)
        if restore is not None:
            restored = restore()
            adopt(self, restored)
            scalars = restored.scalars
            if scalars is not None:  # the loop will still finish the discarded iteration
                self.loop.tail.defer(partial(self.loop.state.adopt_again, scalars))
        loop = self.loop
        self.verification.rewound(to.last_kept_iteration)
        loop.learning.rewound(to)
        loop.state.rewound(to)
        self.witnessing.compare_after(to.iteration)
        self.boundary.rewound(to)
        self.saver.rewound(to)
        loop.events.rewound(to, self.steps.iteration)
        self.steps.iteration = to.iteration

    def _goes_back(self, iteration: int) -> bool:
        """Repeat the step that has ended; whether the run has gone back, as after wrong arithmetic; a collective."""
        with self.boundary.busy():
            self.boundary.emergency_dump.begin_update()
            verdict = self.verification.conclude(iteration)
            self.boundary.emergency_dump.end_update(iteration)
            goes_back = False
            if verdict is not None and verdict.kind == "wrong":
                from cpsr.life.wrong_arithmetic import go_back  # rare

                goes_back = go_back(self, verdict, iteration)
        self.steps.resume_clock()
        return goes_back

    def _is_given_up(self, iteration: int) -> bool:
        """Whether the watched state has diverged and was rolled back; a collective."""
        with self.boundary.busy():
            decision = self.probation.observe(iteration)
            if decision is None:
                return False
            self.job.journal.event("watch", f"the probation of the predicted state {decision.reason}", iteration)
            diverged = decision.status == "diverged"
            if diverged and self.job.group.all(self.loop.state.can_rewind):
                self._roll_back(vars(decision))
                return True
            self._end_probation(vars(decision))
            if diverged:
                self._go_on_diverged(iteration)
            return False

    def _roll_back(self, watch: dict[str, Any]) -> None:
        """Discard the predicted state: restore the exact checkpoint, and recompute."""
        self.boundary.emergency_dump.begin_update()
        self.saver.discard()
        iteration = self.restored.checkpoint_iteration or 0
        with self.loop.learning.learner.locked():
            self.rewind(Rewind(iteration, iteration, DIVERGED), partial(self.restorer.roll_back, self.restored))
        self.job.journal.event("rolled back", self.restored.reason, iteration, logging.WARNING)
        self.probation.discard(self.restored, watch)  # until now memory has kept the checkpoint
        self.boundary.no_dump = None

    def _go_on_diverged(self, iteration: int) -> None:
        """Report a diverged state that this process cannot roll back; a restart still can."""
        checkpoint = self.restored.checkpoint_iteration or 0
        self.rewind(Rewind(iteration, checkpoint, DIVERGED))
        self.job.journal.event(
            "diverged",
            "the predicted state diverged and cannot be rolled back, because a rank's data iterator is one-shot and "
            "cannot return to earlier batches: training continues from the diverged state. Stop the job before its "
            f"next checkpoint (iteration {iteration + self.saver.plan.interval_iterations}) and restart it with mode "
            f"'exact' to recompute from checkpoint {checkpoint}; give resume() the DataLoader itself to have this done "
            "for you",
            iteration,
            logging.ERROR,
        )

    def _end_probation(self, watch: dict[str, Any]) -> None:
        """Keep the predicted state, if one is watched."""
        self.probation.keep(watch)
        self.boundary.no_dump = None

    # Closing

    @property
    def on_probation(self) -> bool:
        """Whether the predicted state that this life began with may still be discarded."""
        return self.probation.active

    def disown(self) -> None:
        """This process is a fork of the one that lives this life: here nothing of it is watched, saved or closed."""
        self._disowned = True
        self.verification.cancel()
        self.job.adapter.detach()
        self.loop.state.unwatch()
        self.loop.tail.drop()

    def close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """End the life after its `with` block, in its own process; parts close in reverse order of opening."""
        if self._disowned:
            return
        leaving = self.leaving
        self._report_planning()
        try:
            with undisturbed(), self._opened:
                if self.rehearsed is not None:
                    self.rehearsed.close()
                if not leaving.left:
                    leaving.note_end(self.job.adapter.iteration, None if kind is None else kind.__name__)
                if kind is None:
                    self._end()
                elif leaving.left and isinstance(error, SystemExit):
                    self._end_left()
                elif leaving.left or isinstance(error, NotRestoredError):
                    self.boundary.no_dump = NOT_OF_THE_RUN
                    self.boundary.abandon(error)
                elif self.stop.made and self.job.group.size == 1 and not self.boundary.changing:
                    self._end_stopped()
                else:
                    self.boundary.abandon(error)
        finally:
            leaving.close()
        if kind is None and self.stop.kept is not None:
            raise self.stop.kept

    def _end(self) -> None:
        """The loop has ended on this rank: wait for the others, and save the last state."""
        if self.leaving.left:  # and by itself, before the last step to compare
            self._end_left()
            self.leaving.raise_leave()
        try:
            self.loop.tail.finish(ended=True)  # may leave, after a SIGTERM in the last step
            self.job.group.end(self.job.adapter.iteration)  # a dead rank raises here and not in the last save
        except BaseException as failure:
            if not self.leaving.left:
                self.boundary.abandon(failure)
                raise
            self._end_left()
            if isinstance(failure, Leave) and self.stop.script_handles:
                return  # the loop has ended by itself, maybe because the script's handler told it to
            raise
        self.boundary.leave_in_order()
        self.saver.finish()
        iteration = self.ending.iteration = self.job.adapter.iteration
        self.leaving.save_last(iteration)
        self.loop.events.note_saved(self.saver.saved_iteration)
        self.ending.how = "clean"
        self._end_unfinished_probation()

    def _end_stopped(self) -> None:
        """After SIGTERM the script's own code has left the loop with an exception, of this rank alone."""
        self.loop.tail.drop()
        self.leaving.commit(self.job.adapter.iteration)
        self._end_left()

    def _end_left(self) -> None:
        self.leaving.announce()
        self.ending.how = "sigterm"
        self._end_unfinished_probation()

    def _end_unfinished_probation(self) -> None:
        watch = {"status": "unfinished", "iteration": self.job.adapter.iteration}
        self._end_probation({**watch, "reason": "the life ended before the watch"})
