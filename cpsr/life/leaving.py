"""Leaves by agreement: after SIGTERM on any rank, all ranks commit the state of one iteration and end.

In between they train two steps more. These do not count: a restart repeats them from the committed state, and compares.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from cpsr.job import Ending, Job
from cpsr.life.boundary import Boundary
from cpsr.life.clock import StepClock
from cpsr.life.loop import Loop
from cpsr.life.loop_tail import LoopTail
from cpsr.life.stop_request import StopRequest
from cpsr.life.witnessing import Witnessing
from cpsr.ranks.exits import Exit, note_exit
from cpsr.saving.saver import Saver
from cpsr.state.scalars import Scalars

__all__ = ["Leave", "Leaving"]

THREAD_NAME = "cpsr-leaving"
SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM
# The second one shows what the loop does after a step.
COMPARED_STEPS = 2
COMPARED_SECONDS = 15.0  # after the agreement, by which they should end: launchers kill after 30
LATE_SECONDS = 5.0  # more, after which a rank that is still in them ends at once: another may wait for it, or it hangs


class Leave(SystemExit):
    """Raised at the end of the iteration after which all ranks leave."""

    def __init__(self) -> None:
        super().__init__(SIGTERM_EXIT_STATUS)


class Leaving:
    """Commits the last state of a life.

    Args:
        job: this rank's.
        boundary: ends the watch over the other ranks.
        saver: commits.
        loop: the training.
        tail: defers the commit to the end of the iteration.
        stop: keeps the exception of the script's handler.
        capture: captures the small state.
        ending: learns whether the last state is safe.
        witnessing: keeps the steps to compare.
        clock: tells how long a step takes.

    Attributes:
        begun: all ranks have agreed to leave.
        left: all ranks have agreed to leave, and have committed their state if they could. They may train on.
    """

    def __init__(
        self,
        job: Job,
        boundary: Boundary,
        saver: Saver,
        loop: Loop,
        tail: LoopTail,
        stop: StopRequest,
        capture: Callable[[], Scalars],
        ending: Ending,
        witnessing: Witnessing,
        clock: StepClock,
    ) -> None:
        self._job = job
        self._boundary = boundary
        self._saver = saver
        self._events, self._state = loop.events, loop.state
        self._tail = tail
        self._stop = stop
        self._capture = capture
        self._ending = ending
        self._witnessing = witnessing
        self._clock = clock
        self._until = 0.0  # when the steps to compare have to be complete
        self._compared = 0
        self._saved = self._announced = False
        self._over = threading.Event()
        self.begun = self.left = False

    def save_last(self, iteration: int) -> None:
        """The loop has ended on all ranks: commit its state, unless it was left inside a step; a collective."""
        if not self._job.group.all(not self._boundary.changing):
            self._job.journal.event(
                "left inside a step",
                f"the loop was left inside step {iteration + 1}, when a part of it had changed the state: that is the "
                "state of no iteration, and is not saved. A restart goes on from what was saved before. "
                "Leave the loop after the last call of a step, or let the error of a step end the job",
                iteration,
                logging.ERROR,
            )
        elif self._job.config.checkpoint.final and iteration > 0:
            self._ending.last_state_is_safe = self._saver.save_now(iteration, self._capture)

    def begin(self) -> None:
        """Leave once the loop has finished this iteration, and all steps on its batch; a collective.

        If it evaluates for longer than launchers wait, the emergency dump remains.
        """
        self._boundary.emergency_dump.await_request()
        self.begun, self._until = True, time.monotonic() + COMPARED_SECONDS
        self._tail.defer(self._leave, saves=True)

    def _leave(self) -> None:
        self.commit(self._job.adapter.iteration)
        if not self._job.group.all(self._may_train()):
            self.raise_leave()
        threading.Thread(target=self._limit, name=THREAD_NAME, daemon=True).start()

    def _limit(self) -> None:
        """End this process if the steps to compare do not end: its state is committed."""
        if not self._over.wait(self._until + LATE_SECONDS - time.monotonic()):
            reason = "SIGTERM; a step after the last commit did not end in time"
            note_exit(self._job.run.path, self._job.journal.life, Exit(self._job.group.rank, left=reason))
            os._exit(SIGTERM_EXIT_STATUS)

    def _may_train(self) -> bool:
        """Whether a step to compare can be trained: the loop goes on with it, and launchers wait for that long."""
        if self._tail.ended or self._stop.script_handles or not self._witnessing.keeps_steps:
            return False
        if self._state.pass_is_over:  # an evaluation may follow
            return False
        return time.monotonic() + 2 * self._clock.median_seconds < self._until

    def raise_leave(self) -> NoReturn:
        """End the loop on this rank, and tell the user's callbacks.

        Raises:
            BaseException: what the script's own handler has raised, or `Leave`.
        """
        self._over.set()
        self.announce()
        raise self._stop.kept or Leave

    def after_step(self, iteration: int) -> None:
        """A step to compare is complete; a collective. After the last one, see `raise_leave`."""
        self._witnessing.last_step(iteration)
        self._compared += 1
        if self._compared >= COMPARED_STEPS or not self._job.group.all(self._may_train()):
            self.raise_leave()

    def commit(self, iteration: int) -> None:
        """Commit this iteration, which is the last of this life; a collective."""
        self._job.group.barrier()  # a rank that evaluates keeps the others waiting, who may still have to dump
        self._boundary.leave_in_order()
        self._ending.iteration = iteration
        saved = self._ending.last_state_is_safe = self._saver.save_now(iteration, self._capture)
        result = "its state is committed" if saved else "its state could not be committed; the last checkpoint remains"
        self._job.journal.event(
            "sigterm",
            f"leaving at iteration {iteration} after SIGTERM: {result}",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )
        self._events.at_step(iteration, self._saver.saved_iteration)
        self.left, self._saved = True, saved

    def close(self) -> None:
        """The life is closed: what the script does from here on takes as long as it likes."""
        self._over.set()

    def announce(self) -> None:
        """Tell the user's callbacks once that this rank leaves."""
        if not self._announced:
            self._announced = True
            self._events.leaving(self._ending.iteration, saved=self._saved)

    @property
    def is_over(self) -> bool:
        """Whether this rank has left, and the loop went on nevertheless."""
        return self._over.is_set()
