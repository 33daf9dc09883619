"""Receives signals in a thread: Python's handlers do not run while the main thread waits in C, as in a collective."""

import logging
import os
import select
import signal

__all__ = ["Wakeup"]

logger = logging.getLogger(__name__)

_CLOSED = 0  # no signal has this number
_READ_BYTES = 4096  # the pipe contains one byte for each signal since the last read
_senders: set[int] = set()


class Wakeup:
    """Receives the signals that Python handles when they arrive; created and closed on the main thread.

    It receives only signals with a handler written in Python, and the handler still runs as soon as it can. An earlier
    user of `signal.set_wakeup_fd`, such as an event loop, still receives them too.

    Raises:
        ValueError: not on the main thread.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        for descriptor in (self._receiver, self._sender):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()  # select() takes no descriptor above 1023
        self._poll.register(self._receiver, select.POLLIN)
        try:
            # No warning if the pipe is full: then it has enough signals to read.
            self._before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
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
        if _CLOSED in numbers:
            return None
        self._forward(numbers)
        return frozenset(numbers)

    def notify(self, number: int) -> None:
        """Let `wait` return this signal, as if it had arrived; on any thread."""
        os.write(self._sender, bytes([number]))

    def stop(self) -> None:
        """Let `wait` return None; on any thread."""
        self.notify(_CLOSED)

    def close(self) -> None:
        """Restore the earlier wakeup descriptor; call it once no thread waits any more."""
        current = signal.set_wakeup_fd(-1)
        if current != self._sender:
            # A later user may forward signals to our pipe. It stays open: otherwise another file could get its number.
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            return
        if self._before >= 0:
            try:
                signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
            except (OSError, ValueError) as error:
                logger.warning("cannot restore the earlier wakeup descriptor %d: %s", self._before, error)
        _senders.discard(self._sender)
        self._close_pipe()

    def _forward(self, numbers: bytes) -> None:
        if self._before < 0:
            return
        try:
            os.write(self._before, numbers)
        except BlockingIOError:
            logger.debug("the earlier wakeup descriptor is full: it has signals to read already")
        except OSError as error:
            logger.warning("signals are no longer forwarded to the wakeup descriptor %d: %s", self._before, error)
            self._before = -1

    def _close_pipe(self) -> None:
        os.close(self._receiver)
        os.close(self._sender)


def _forget_in_child() -> None:
    """A forked child, such as a data loader worker, shares the pipe: its signals must not arrive here."""
    current = signal.set_wakeup_fd(-1)
    if current >= 0 and current not in _senders:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)


os.register_at_fork(after_in_child=_forget_in_child)
