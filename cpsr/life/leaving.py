"""Leaves by agreement: after SIGTERM on any rank, all ranks commit the state of one iteration and end."""

import logging
import signal
from collections.abc import Callable

from cpsr.job import Ending, Job
from cpsr.life.boundary import Boundary
from cpsr.life.loop import Loop
from cpsr.life.loop_tail import LoopTail
from cpsr.life.stop_request import StopRequest
from cpsr.saving.saver import Saver
from cpsr.state.scalars import Scalars

__all__ = ["Leave", "Leaving"]

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM


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

    Attributes:
        begun: all ranks have agreed to leave.
        left: all ranks have agreed to leave, and have committed their state if they could.
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
    ) -> None:
        self._job = job
        self._boundary = boundary
        self._saver = saver
        self._events = loop.events
        self._tail = tail
        self._stop = stop
        self._capture = capture
        self._ending = ending
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
        self.begun = True
        self._tail.defer(self._leave, saves=True)

    def _leave(self) -> None:
        self.commit(self._job.adapter.iteration)
        raise self._stop.kept or Leave

    def commit(self, iteration: int) -> None:
        """Commit this iteration, which is the last of this life; a collective."""
        self._job.group.barrier()  # a rank that evaluates keeps the others waiting, who may still have to dump
        self._boundary.leave_in_order()
        saved = self._ending.last_state_is_safe = self._saver.save_now(iteration, self._capture)
        result = "its state is committed" if saved else "its state could not be committed; the last checkpoint remains"
        self._job.journal.event(
            "sigterm",
            f"leaving at iteration {iteration} after SIGTERM: {result}",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )
        self._events.at_step(iteration, self._saver.saved_iteration)
        self._events.leaving(iteration, saved=saved)
        self.left = True
