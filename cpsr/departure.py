"""Leaving a group that cannot go on: the exact state of the last step boundary is dumped first, where there is one."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cpsr.wakeup import Wakeup

__all__ = ["LEFT_EXIT_STATUS", "Departure", "undisturbed"]

logger = logging.getLogger(__name__)

LEFT_EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: a failure that trying again may cure, which launchers restart
THREAD_NAME = "cpsr-departure"
# How long a dump asked for by another thread waits for an update that is under way: updates take milliseconds to a
# second, and one that takes longer waits for a dead rank.
UPDATE_SECONDS = 1.0
# From the decision to leave to the end of the process, whatever hangs meanwhile; launchers kill 30 s after asking.
LEAVE_SECONDS = 20.0
FLUSH_SECONDS = 3.0  # twice, beside the dump, within the time above
CLOSE_SECONDS = 5.0  # the thread ends at once, unless it dumps
NO_STEP = "no step of this life has ended"
STACK_FRAMES = 8  # of the training thread, innermost first: from what it waits for to whose call that was


class Departure:
    """Knows whether the state is at a step boundary, and has it dumped there before this rank leaves.

    A dump runs only between two updates: it is refused inside one, where the state is half of each, and an update that
    wants to begin meanwhile waits for its end. At each boundary there is one at most. Until the first `end_update` the
    state is taken to be changing.

    Args:
        dump: puts the state of the iteration given to it where it outlives this process.
        tell: records an event: its kind, one sentence, the iteration and the level of logging.
        sigterm_grace_seconds: how long after SIGTERM a step may take to end before its boundary is dumped.
        obstacle: why this process must leave nothing for a next life, None where it may.
        flush: waits until what was told is written, for so many seconds at most.
    """

    def __init__(
        self,
        dump: Callable[[int], None],
        tell: Callable[[str, str, int | None, int], None],
        sigterm_grace_seconds: float,
        obstacle: Callable[[], str | None] = lambda: None,
        flush: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._dump = dump
        self._tell = tell
        self._grace_seconds = sigterm_grace_seconds
        self._obstacle = obstacle
        self._flush = flush
        self._training_thread = threading.get_ident()
        self._state = threading.Lock()  # held by an update, and by a dump
        self._dumps = threading.Lock()  # held by a dump from before it wants the other to after it has given it back
        self._updating = False
        self._iteration: int | None = None
        self._boundaries = 0
        self._dumped = 0  # the boundary whose state is safe; an iteration may come again, after a roll-back
        self._in_order = False
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None
        self.begin_update()

    # What the training thread calls at every step

    def begin_update(self) -> None:
        """The state is about to change; waits for a dump that is under way. A second call changes nothing."""
        if self._updating:
            return
        if not self._state.acquire(blocking=False):
            with self._dumps:
                # Where it is still held it is ours: an exception of a signal handler came between two lines here.
                self._state.acquire(blocking=False)
        self._updating = True

    def end_update(self, iteration: int) -> None:
        """The state is that of the end of `iteration`, and stays so until the next `begin_update`."""
        self._iteration = iteration
        self._boundaries += 1
        if self._updating:
            self._updating = False
            self._state.release()

    # Leaving

    def dump(self, reason: str, wait_seconds: float = 0.0) -> bool:
        """Have the state dumped, unless that of this boundary is dumped already; from any thread, never raises.

        Args:
            reason: why this rank leaves, as a clause.
            wait_seconds: for the end of an update that is under way; 0 on the training thread, which is in it.

        Returns:
            Whether the state of the last boundary is dumped.
        """
        with self._dumps:
            if not self._state.acquire(timeout=wait_seconds):
                begun = self._iteration is not None
                obstacle = "its state is in the middle of a change, half of it is of the next" if begun else NO_STEP
                self._refused(reason, obstacle)
                return False
            try:
                return self._dump_boundary(reason)
            finally:
                self._state.release()

    def _dump_boundary(self, reason: str) -> bool:
        if self._dumped == self._boundaries:
            return True
        assert self._iteration is not None  # an update is under way until there is one
        iteration, obstacle = self._iteration, self._obstacle()
        if obstacle is not None:
            self._refused(reason, obstacle)
            return False
        started = time.perf_counter()
        try:
            self._dump(iteration)
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank must go on to leave
            self._refused(reason, f"{type(error).__name__}: {error}")
            return False
        self._dumped = self._boundaries
        seconds = time.perf_counter() - started
        message = f"{reason}: the exact state of iteration {iteration} was dumped to host memory in {seconds:.2f} s"
        self._tell("dumped", message, iteration, logging.WARNING)
        return True

    def _refused(self, reason: str, obstacle: str) -> None:
        state = "the state" if self._iteration is None else f"the state after iteration {self._iteration}"
        message = f"{reason}: {state} could not be dumped to host memory ({obstacle}); a restart takes what was saved"
        # Before the first step of a life nothing is lost: what it began with is where it was.
        level = logging.DEBUG if self._iteration is None else logging.WARNING
        self._tell("not dumped", message, self._iteration, level)

    def leave_in_order(self) -> None:
        """All ranks have agreed to leave: SIGTERM is being followed, and needs no dump from here on."""
        self._in_order = True

    def leave(self, reason: str) -> NoReturn:
        """End this process from another thread, although the training thread may never return from where it is.

        What is told and dumped until then has `LEAVE_SECONDS`; the exit status is `LEFT_EXIT_STATUS`.

        Args:
            reason: as a clause.
        """
        # In a thread of its own: nothing that hangs, a lock that the training thread holds, may keep the process here.
        farewell = threading.Thread(target=self._farewell, args=(reason,), name=THREAD_NAME, daemon=True)
        farewell.start()
        farewell.join(LEAVE_SECONDS)
        os._exit(LEFT_EXIT_STATUS)

    def _farewell(self, reason: str) -> None:
        stood = _standing(self._training_thread)
        message = f"{reason}; this rank leaves with status {LEFT_EXIT_STATUS}, its training thread stood at {stood}"
        self._tell("left", message, self._iteration, logging.ERROR)
        self._flush(FLUSH_SECONDS)
        self.dump(reason, UPDATE_SECONDS)
        self._flush(FLUSH_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        logging.shutdown()

    # SIGTERM

    def hear_sigterm(self) -> None:
        """Dump also when SIGTERM comes while the training thread hangs; a Python handler for it must be installed.

        Where steps go on to end within the grace nothing is done here: the handler's way of leaving is the better one.

        Raises:
            ValueError: not on the main thread.
        """
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._listen, args=(self._wakeup,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear no signals any more; on the main thread if `hear_sigterm` was called. A second call changes nothing."""
        if self._thread is None or self._wakeup is None:
            return
        self._wakeup.stop()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("a dump did not end within %g s; its thread is left behind", CLOSE_SECONDS)
            return
        self._wakeup.close()
        self._thread = self._wakeup = None

    def _listen(self, wakeup: Wakeup) -> None:
        deadline: float | None = None  # of the present step, once SIGTERM has come
        boundaries = 0
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            numbers = wakeup.wait(left)
            if numbers is None:
                return
            now = time.monotonic()
            if deadline is None:
                if signal.SIGTERM in numbers:
                    deadline, boundaries = now + self._grace_seconds, self._boundaries
            elif now >= deadline:
                if boundaries == self._boundaries and not self._in_order:
                    self.dump(f"SIGTERM, and no step has ended for {self._grace_seconds:g} s", UPDATE_SECONDS)
                deadline, boundaries = now + self._grace_seconds, self._boundaries


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, no handler of SIGCHLD raises on the main thread; what it would have raised is logged.

    Torch's raises once for every data loader that has lost a worker. The first one is why a rank leaves, and a second
    one would cut short the dump.
    """
    before = signal.getsignal(signal.SIGCHLD)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigchld(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank is leaving already
            logger.warning("while this rank was leaving: %s", error)

    signal.signal(signal.SIGCHLD, on_sigchld)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _standing(thread: int) -> str:
    """Where a thread is, innermost call first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    calls = traceback.extract_stack(frame)[: -STACK_FRAMES - 1 : -1]
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
