"""Leaves a broken group, after an emergency dump: the exact state of the last step boundary goes to host memory."""

import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

__all__ = ["LEFT_EXIT_STATUS", "EmergencyDump", "Wakeup", "undisturbed"]

logger = logging.getLogger(__name__)

_CLOSED = 0  # no signal has this number
_READ_BYTES = 4096  # the pipe contains one byte for each signal since the last read
_senders: set[int] = set()


class Wakeup:
    """Receives the signals that Python handles when they arrive; created and closed on the main thread.

    It receives only signals with a handler written in Python, and the handler still runs as soon as it can.

    Raises:
        ValueError: not on the main thread, or another receiver is there, such as an event loop: it goes on to receive.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        for descriptor in (self._receiver, self._sender):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()  # select() takes no descriptor above 1023
        self._poll.register(self._receiver, select.POLLIN)
        try:
            # No warning if the pipe is full: then it has enough signals to read.
            before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
            if before >= 0:
                signal.set_wakeup_fd(before)
                raise ValueError(f"signals arrive at descriptor {before} already")
        except ValueError:
            self._close_pipe()
            raise
        _senders.add(self._sender)

    def wait(self, timeout_seconds: float | None) -> frozenset[int] | None:
        """Wait for signals, in one thread.

        Args:
            timeout_seconds: how long; None: until one comes.

        Returns:
            Numbers of the signals that arrived; empty after the timeout; None once this is closed.
        """
        if not self._poll.poll(None if timeout_seconds is None else 1e3 * timeout_seconds):
            return frozenset()
        numbers = os.read(self._receiver, _READ_BYTES)
        return None if _CLOSED in numbers else frozenset(numbers)

    def notify(self, number: int) -> None:
        """Let `wait` return this signal, as if it had arrived; on any thread."""
        os.write(self._sender, bytes([number]))

    def stop(self) -> None:
        """Let `wait` return None; on any thread."""
        self.notify(_CLOSED)

    def close(self) -> None:
        """Receive no more; call it once no thread waits any more."""
        current = signal.set_wakeup_fd(-1)
        if current != self._sender:
            # A later user may forward signals to our pipe. It stays open: otherwise another file could get its number.
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            return
        _senders.discard(self._sender)
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._receiver)
        os.close(self._sender)


def _forget_in_child() -> None:
    """A forked child, such as a data loader worker, shares the pipe: its signals must not arrive here."""
    current = signal.set_wakeup_fd(-1)
    if current >= 0 and current not in _senders:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)


os.register_at_fork(after_in_child=_forget_in_child)


LEFT_EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, after which launchers restart
THREAD_NAME = "cpsr-emergency-dump"
# How long a dump on another thread waits for an update under way. Updates take milliseconds to a second; a longer one
# waits for a dead rank.
UPDATE_SECONDS = 1.0
# From the decision to leave to the end of the process, even if something hangs; launchers kill 30 s after SIGTERM.
LEAVE_SECONDS = 20.0
FLUSH_SECONDS = 3.0  # twice, beside the dump, within the time above
CLOSE_SECONDS = 5.0  # the thread ends at once, unless it dumps
NO_STEP = "no step of this life has ended"
STACK_FRAMES = 8  # of the training thread, innermost first: shows what it waits for, and its callers


class EmergencyDump:
    """Tracks whether the state is at a step boundary, and dumps it there before this rank leaves.

    A dump runs only between two updates. During an update the state is inconsistent, and the dump is refused; an update
    that begins during a dump waits for its end. Each boundary is dumped at most once, and nothing before the first
    `end_update`.

    Args:
        dump: stores the state of the given iteration where it outlives this process; returns the iteration of what it
            has stored, if that is another: a device may hang in the steps after it.
        report: records an event: its kind, one sentence, the iteration and the logging level.
        sigterm_grace_seconds: after SIGTERM, a step that takes longer has the boundary before it dumped.
        obstacle: why this process must not dump for the next life; None if it may.
        flush: waits until reported events are written, at most for the given seconds.

    Attributes:
        updating: whether the state is changing, and so is that of no iteration.
    """

    def __init__(
        self,
        dump: Callable[[int], int | None],
        report: Callable[[str, str, int | None, int], None],
        sigterm_grace_seconds: float,
        obstacle: Callable[[], str | None] = lambda: None,
        flush: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._dump = dump
        self._report = report
        self._grace_seconds = sigterm_grace_seconds
        self._obstacle = obstacle
        self._flush = flush
        self._training_thread = threading.get_ident()
        self._state = threading.Lock()  # locked by an update, and by a dump
        self._dumps = threading.Lock()  # locked by a dump, around its use of `_state`
        self.updating = False
        self._iteration: int | None = None
        self._boundaries = 0
        self._dumped = 0  # boundary of the last dump; not its iteration, which may repeat after a roll-back
        self._refusal = ""  # the newest
        self._in_order = False
        self._awaits_request = False
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None

    # Called by the training thread at every step

    def begin_update(self) -> None:
        """The state is about to change; waits for a dump under way. A second call has no effect."""
        if self.updating:
            return
        if not self._state.acquire(blocking=False):
            with self._dumps:
                # If still locked, then by this thread: a signal handler raised between two lines of this method.
                self._state.acquire(blocking=False)
        self.updating = True

    def end_update(self, iteration: int) -> None:
        """The state is that after `iteration`, until the next `begin_update`."""
        self._iteration = iteration
        self._boundaries += 1
        if self.updating:
            self.updating = False
            self._state.release()

    # Leaving

    def dump(self, reason: str, wait_seconds: float = 0.0) -> bool:
        """Dump the state, unless this boundary was dumped already; on any thread, never raises.

        Args:
            reason: why this rank leaves, as a clause.
            wait_seconds: for the end of an update under way; 0 on the training thread, which runs it.

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
        if self._iteration is None:
            self._refused(reason, NO_STEP)
            return False
        if self._dumped == self._boundaries:
            return True
        iteration, obstacle = self._iteration, self._obstacle()
        if obstacle is not None:
            self._refused(reason, obstacle)
            return False
        started = time.perf_counter()
        try:
            dumped = self._dump(iteration)
        except Exception as error:  # noqa: BLE001 - after any error this rank must leave
            self._refused(reason, f"{type(error).__name__}: {error}")
            return False
        self._dumped = self._boundaries
        seconds = time.perf_counter() - started
        stored = iteration if dumped is None else dumped
        what = f"weights and moments of iteration {stored}"
        if self._awaits_request and stored == iteration:
            what += ", as far as the loop had finished it,"
        message = f"{reason}; {what} saved to host memory ({seconds:.2f} s)"
        if stored != iteration:
            message += f"; the device has not completed the steps from there to iteration {iteration}"
        self._report("dumped", message, stored, logging.WARNING)
        return True

    def _refused(self, reason: str, obstacle: str) -> None:
        state = "the state" if self._iteration is None else f"the state after iteration {self._iteration}"
        message = f"{reason}: {state} could not be saved to host memory ({obstacle}); a restart uses earlier states"
        if message == self._refusal:
            return
        self._refusal = message
        # Before the first step of a life nothing is lost: its starting state is still stored.
        level = logging.DEBUG if self._iteration is None else logging.WARNING
        self._report("not dumped", message, self._iteration, level)

    def await_request(self) -> None:
        """All ranks leave once the loop has asked for its next batch; after the grace, dump while it does not."""
        self._awaits_request = True
        if self._wakeup is not None:
            self._wakeup.notify(signal.SIGTERM)

    def leave_in_order(self) -> None:
        """All ranks save their state now: no dump is needed any more, and one under way has ended."""
        with self._dumps:
            self._in_order = True

    def leave(self, reason: str) -> NoReturn:
        """End this process from another thread, even if the training thread hangs.

        Events and dump have `LEAVE_SECONDS` before that; the exit status is `LEFT_EXIT_STATUS`.

        Args:
            reason: as a clause.
        """
        # In a thread of its own: a hang, such as on a lock of the training thread, must not delay the exit.
        last_work = threading.Thread(target=self._dump_and_flush, args=(reason,), name=THREAD_NAME, daemon=True)
        last_work.start()
        last_work.join(LEAVE_SECONDS)
        os._exit(LEFT_EXIT_STATUS)

    def _dump_and_flush(self, reason: str) -> None:
        stack = _stack(self._training_thread)
        message = f"{reason}; this rank leaves with status {LEFT_EXIT_STATUS}, its training thread was in {stack}"
        self._report("left", message, self._iteration, logging.ERROR)
        self._flush(FLUSH_SECONDS)
        self.dump(reason, UPDATE_SECONDS)
        self._flush(FLUSH_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        logging.shutdown()

    # SIGTERM

    def watch_sigterm(self, note: Callable[[], object] = lambda: None) -> None:
        """Dump also if SIGTERM arrives while the training thread hangs; a Python handler for it must be installed.

        While steps still end within the grace nothing is dumped: then all ranks leave together.

        Args:
            note: called when SIGTERM has arrived, on another thread, whatever handler there is.
        """
        try:
            self._wakeup = Wakeup()
        except ValueError as error:
            logger.warning("SIGTERM while a step hangs will not save its state to host memory: %s", error)
            return
        self._thread = threading.Thread(target=self._listen, args=(self._wakeup, note), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; on the main thread if `watch_sigterm` was called. A second call has no effect."""
        if self._thread is None or self._wakeup is None:
            return
        self._wakeup.stop()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("a dump did not end within %g s; its thread is abandoned", CLOSE_SECONDS)
            return
        self._wakeup.close()
        self._thread = self._wakeup = None

    def _listen(self, wakeup: Wakeup, note: Callable[[], object]) -> None:
        deadline: float | None = None  # of the current step, once SIGTERM has arrived
        boundaries = 0
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            numbers = wakeup.wait(left)
            if numbers is None:
                return
            if signal.SIGTERM in numbers:
                note()
            if deadline is None:
                if signal.SIGTERM not in numbers:
                    continue
            elif time.monotonic() < deadline:
                continue
            elif boundaries == self._boundaries and not self._in_order:
                awaited = "the loop has asked for no batch" if self._awaits_request else "no step has ended"
                self.dump(f"SIGTERM, and {awaited} for {self._grace_seconds:g} s", UPDATE_SECONDS)
            # Counted from now, also after a dump: the step that waited for the dump has the whole grace.
            deadline, boundaries = time.monotonic() + self._grace_seconds, self._boundaries


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, no SIGCHLD handler runs on the main thread.

    Torch's handler raises once for every data loader that has lost a worker. The first exception makes a rank leave,
    and a second one would interrupt the dump.
    """
    before = signal.getsignal(signal.SIGCHLD)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _stack(thread: int) -> str:
    """The calls of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    calls = traceback.extract_stack(frame)[: -STACK_FRAMES - 1 : -1]
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
