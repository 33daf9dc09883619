"""Signals heard in a thread: Python's own handlers do not run while the main thread waits in C, in a collective say."""

import logging
import os
import select
import signal

__all__ = ["Wakeup"]

logger = logging.getLogger(__name__)

_CLOSED = 0  # no signal has this number
_READ_BYTES = 4096  # what waits in the pipe at most is one byte for each signal that came since the last look
_senders: set[int] = set()


class Wakeup:
    """Learns of the signals that Python handles at the moment they arrive; made and closed on the main thread.

    Only signals with a handler written in Python are heard, and the handler still runs as soon as it can. Whoever had
    asked for the same before (`signal.set_wakeup_fd`: an event loop) goes on to hear them.

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
            # Without a warning where the pipe is full: that many signals have been heard already.
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
            Numbers of the signals that came, empty when the time is out, None once this is closed.
        """
        if not self._poll.poll(None if timeout_seconds is None else 1e3 * timeout_seconds):
            return frozenset()
        numbers = os.read(self._receiver, _READ_BYTES)
        if _CLOSED in numbers:
            return None
        self._pass_on(numbers)
        return frozenset(numbers)

    def stop(self) -> None:
        """Let `wait` return None; from any thread."""
        os.write(self._sender, bytes([_CLOSED]))

    def close(self) -> None:
        """Give the signals back to whoever had them before; once no thread waits any more."""
        current = signal.set_wakeup_fd(-1)
        if current != self._sender:
            # Somebody came after us, and may pass signals on to our pipe: it stays open, or another file could get its
            # number.
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            return
        if self._before >= 0:
            try:
                signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
            except (OSError, ValueError) as error:
                logger.warning("the wakeup descriptor %d of before cannot be put back: %s", self._before, error)
        _senders.discard(self._sender)
        self._close_pipe()

    def _pass_on(self, numbers: bytes) -> None:
        if self._before < 0:
            return
        try:
            os.write(self._before, numbers)
        except BlockingIOError:
            logger.debug("the wakeup descriptor of before is full: it has signals to read already")
        except OSError as error:
            logger.warning("signals are no longer passed on to the wakeup descriptor %d: %s", self._before, error)
            self._before = -1

    def _close_pipe(self) -> None:
        os.close(self._receiver)
        os.close(self._sender)


def _forget_in_child() -> None:
    """A forked child has the same pipe, and what it is sent is not sent to us: data loader workers are."""
    current = signal.set_wakeup_fd(-1)
    if current >= 0 and current not in _senders:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)


os.register_at_fork(after_in_child=_forget_in_child)
