"""Leaves by agreement: after SIGTERM on any rank, all ranks commit their state and end."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

from cpsr.job import Ending, Job
from cpsr.life.boundary import Boundary
from cpsr.life.loop import Loop
from cpsr.life.loop_tail import LoopTail
from cpsr.saving.saver import Saver
from cpsr.state.scalars import Scalars

__all__ = ["Leave", "Leaving", "StopRequest"]

logger = logging.getLogger(__name__)

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM
# Limit for the loop's work after its last step, and for saving it; launchers kill 30 s after SIGTERM.
LEAVE_SECONDS = 20.0


class Leave(SystemExit):
    """Raised at the step boundary at which all ranks leave after SIGTERM."""

    def __init__(self) -> None:
        super().__init__(SIGTERM_EXIT_STATUS)


class StopRequest:
    """Whether this process received SIGTERM; all ranks act on it at the next step boundary."""

    def __init__(self) -> None:
        # No Event: a second signal during the handler of the first would wait for its lock.
        self.made = False

    def watch(self, handlers: ExitStack, boundary: Boundary) -> None:
        """Install the handler of SIGTERM; `handlers` restores the old one."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not on the main thread: SIGTERM will not commit the state before leaving")
            return

        rank, before = os.getpid(), signal.getsignal(signal.SIGTERM)

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if os.getpid() == rank:
                self.made = True
            else:  # a process that the loop has forked: it ends as it would without this handler
                signal.signal(number, signal.SIG_DFL if before is None else before)
                os.kill(os.getpid(), number)

        handlers.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, on_sigterm))
        boundary.emergency_dump.watch_sigterm()


class Leaving:
    """Commits the state at once, and again when the loop has finished its last iteration.

    Args:
        job: this rank's.
        boundary: ends the watch over the other ranks.
        saver: commits.
        loop: the training.
        tail: defers work to the end of the iteration.
        capture: captures the small state.
        ending: learns whether the last state is safe.
    """

    def __init__(
        self,
        job: Job,
        boundary: Boundary,
        saver: Saver,
        loop: Loop,
        tail: LoopTail,
        capture: Callable[[], Scalars],
        ending: Ending,
    ) -> None:
        self._job = job
        self._boundary = boundary
        self._saver = saver
        self._state, self._events = loop.state, loop.events
        self._tail = tail
        self._capture = capture
        self._ending = ending

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

    def begin(self, iteration: int) -> None:
        """Commit this iteration at once, and leave when the loop has finished it; a collective."""
        agreed = time.monotonic()
        self._tail.drop()  # a checkpoint that is due now is this one
        self._boundary.leave_in_order()
        self._ending.last_state_is_safe = self._saver.save_now(iteration, self._capture)
        save_seconds = time.monotonic() - agreed
        self._events.at_step(iteration, self._saver.saved_iteration)
        self._events.leaving(iteration, saved=self._ending.last_state_is_safe)
        deadline = agreed + LEAVE_SECONDS - save_seconds
        self._tail.defer(partial(self._leave, iteration, self._state.of_loop(), deadline))

    def _leave(self, iteration: int, committed: dict[str, Any], deadline: float) -> None:
        """Commit also what the loop has done since, unless the deadline has passed, and leave; a collective."""
        group = self._job.group
        result, level = "its state is committed", logging.INFO
        if not self._ending.last_state_is_safe:
            result = "its state could not be committed; the last checkpoint is the newest"
        elif not group.all(self._state.is_unchanged(committed)):
            in_time = group.all(time.monotonic() < deadline)
            if not (in_time and self._saver.replace(iteration, self._capture)):
                level = logging.WARNING
                result += (
                    ", without what the loop did to random states and registered objects after the step "
                    f"({'it could not be written' if in_time else f'that took longer than {LEAVE_SECONDS:g} s'})"
                )
        self._job.journal.event(
            "sigterm", f"leaving at iteration {iteration} after SIGTERM: {result}", iteration, level
        )
        raise Leave
