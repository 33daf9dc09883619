"""Leaving after SIGTERM: all ranks commit the state of one iteration and end.

In between they train two steps more. These do not count: a restart repeats them from the committed state, and compares.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, NoReturn

from cpsr.job import Ending, Job
from cpsr.life.loop import Loop
from cpsr.life.saver import Saver
from cpsr.life.step_boundary import Boundary
from cpsr.life.witnessing import Witnessing
from cpsr.ranks.exits import Exit, note_exit

try:  # `signal.getsignal` first looks whether the handler is one of an enum, which takes ten times as long
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found] # typeshed has no such module
except ImportError:  # not CPython
    _handler_of = signal.getsignal

__all__ = ["Leave", "Leaving", "StopRequest"]

logger = logging.getLogger(__name__)

Script = Callable[[int, FrameType | None], Any] | int | None  # what `signal.getsignal` returns

_SIGTERM = int(signal.SIGTERM)
THREAD_NAME = "cpsr-leaving"
SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM
# The second one shows what the loop does after a step.
COMPARED_STEPS = 2
COMPARED_SECONDS = 15.0  # after the agreement, by which they should end: launchers kill after 30
LATE_SECONDS = 5.0  # more, after which a rank that is still in them ends at once: another may wait for it, or it hangs


class StopRequest:
    """Whether this process received SIGTERM, and what the script does at it.

    The script's handler is called right after the request is noted, whether it was installed before the `with` block
    or inside. An exception of it, such as that of `sys.exit()`, is kept until the state is committed. A script that
    ignores SIGTERM is not left.

    Attributes:
        made: all ranks leave at the end of the next iteration.
        kept: the first exception of the script's handler.

    Args:
        on_made: called when it is made; on any thread.
    """

    def __init__(self, on_made: Callable[[], None]) -> None:
        self._on_made = on_made
        # No Event: a second signal during the handler of the first would wait for its lock.
        self.made = False
        self.kept: BaseException | None = None
        self._process = os.getpid()
        self._handler: _Handler | None = None  # None: SIGTERM is the script's
        self._warned = False

    @property
    def script_handles(self) -> bool:
        """Whether the script has a handler of its own."""
        return self._handler is not None and callable(self._handler.script)

    def watch(self, handlers: ExitStack) -> bool:
        """Handle SIGTERM from here on; `handlers` gives it back to the script.

        Returns:
            Whether that is possible: handlers belong to the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not on the main thread: SIGTERM will not commit the state before leaving")
            return False
        self._handler = _Handler(self, signal.SIG_DFL)
        self.look()
        handlers.callback(self._give_back)
        return True

    def look(self) -> None:
        """Come before a handler that the script has installed since the last look; costs less than a microsecond."""
        if self._handler is None:
            return
        if _handler_of(_SIGTERM) is self._handler:
            return
        current = signal.getsignal(signal.SIGTERM)
        if isinstance(current, _Handler) and current.request is self:  # the script has put back an earlier one
            self._handler = current
        elif current is signal.SIG_IGN:
            if not self._warned:
                self._warned = True
                logger.warning("this process ignores SIGTERM, so CPSR does not save and leave at it")
        elif threading.current_thread() is threading.main_thread():
            self._handler = _Handler(self, current)
            signal.signal(signal.SIGTERM, self._handler)

    def note(self) -> None:
        """SIGTERM has arrived; on any thread."""
        self.made = True
        self._on_made()

    def received(self, number: int, frame: FrameType | None, script: Script) -> None:
        """SIGTERM has arrived at a handler that stands before `script`."""
        if (
            os.getpid() != self._process or self._handler is None
        ):  # a process that the loop has forked, or after the life
            _pass_on(number, frame, script)
            return
        self.note()
        if callable(script):
            try:
                script(number, frame)
            except BaseException as error:  # noqa: BLE001 - it is raised once the state is committed
                self.kept = self.kept or error

    def _give_back(self) -> None:
        self._handler = None
        current = signal.getsignal(signal.SIGTERM)
        if isinstance(current, _Handler) and current.request is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if current.script is None else current.script)


class _Handler:
    """Our handler before one of the script's; one object for each, since a script may put back what it has found."""

    def __init__(self, request: StopRequest, script: Script) -> None:
        self.request, self.script = request, script

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.request.received(number, frame, self.script)


def _pass_on(number: int, frame: FrameType | None, script: Script) -> None:
    if callable(script):
        script(number, frame)
    elif script is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Leave(SystemExit):
    """Raised at the end of the iteration after which all ranks leave."""

    def __init__(self) -> None:
        super().__init__(SIGTERM_EXIT_STATUS)


class Leaving:
    """Commits the last state of a life.

    Attributes:
        begun: all ranks have agreed to leave.
        left: all ranks have agreed to leave, and have committed their state if they could. They may train on.
    """

    def __init__(
        self,
        job: Job,
        ending: Ending,
        stop: StopRequest,
        loop: Loop,
        boundary: Boundary,
        saver: Saver,
        witnessing: Witnessing,
    ) -> None:
        self._job = job
        self._ending = ending
        self._stop = stop
        self._loop = loop
        self._boundary = boundary
        self._saver = saver
        self._witnessing = witnessing
        self._attendance = job.group.attendance
        self._until = 0.0  # when the steps to compare have to be complete
        self._step_seconds = 0.0
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
        elif iteration > 0:
            self._ending.last_state_is_safe = self._saver.save_now(iteration)

    def leave_together(self, step_seconds: float) -> None:
        """Leave once the loop has finished this iteration, and all steps on its batch; a collective.

        If it evaluates for longer than launchers wait, the emergency dump remains.
        """
        if self.begun:
            return
        self._step_seconds = step_seconds
        self._boundary.emergency_dump.await_request()
        self.begun, self._until = True, time.monotonic() + COMPARED_SECONDS
        self._loop.tail.defer(self._leave, saves=True)

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
        if self._loop.tail.ended or self._stop.script_handles or not self._witnessing.keeps_steps:
            return False
        if self._loop.state.pass_is_over:  # an evaluation may follow
            return False
        return time.monotonic() + 2 * self._step_seconds < self._until

    def raise_leave(self) -> NoReturn:
        """End the loop on this rank, and tell the user's callbacks.

        Raises:
            BaseException: what the script's own handler has raised, or `Leave`.
        """
        self._over.set()
        self.announce()
        raise self._stop.kept or Leave

    def note_end(self, iteration: int, error: str | None = None, *, may_return: bool = False) -> None:
        """Tell the other ranks that this one has left its loop, and with which error."""
        if self._attendance is not None:
            self._attendance.leave(iteration, error, may_return=may_return)

    def compare(self, iteration: int) -> None:
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
        saved = self._ending.last_state_is_safe = self._saver.save_now(iteration)
        result = "its state is committed" if saved else "its state could not be committed; the last checkpoint remains"
        self._job.journal.event(
            "sigterm",
            f"leaving at iteration {iteration} after SIGTERM: {result}",
            iteration,
            logging.INFO if saved else logging.ERROR,
        )
        self._loop.events.note_saved(self._saver.saved_iteration)
        self.left, self._saved = True, saved

    def close(self) -> None:
        """The life is closed: what the script does from here on takes as long as it likes."""
        self._over.set()

    def announce(self) -> None:
        """Tell the user's callbacks once that this rank leaves."""
        if not self._announced:
            self._announced = True
            self._loop.events.leaving(self._ending.iteration, saved=self._saved)

    @property
    def is_over(self) -> bool:
        """Whether this rank has left, and the loop went on nevertheless."""
        return self._over.is_set()
