"""SIGTERM of this process: all ranks leave at the next end of an iteration, and the script's own handler is called."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

logger = logging.getLogger(__name__)

Script = Callable[[int, FrameType | None], Any] | int | None  # what `signal.getsignal` returns


class StopRequest:
    """Whether this process received SIGTERM, and what the script does at it.

    The script's handler is called right after the request is noted, whether it was installed before the `with` block
    or inside. An exception of it, such as that of `sys.exit()`, is kept until the state is committed. A script that
    ignores SIGTERM is not left.

    Attributes:
        made: all ranks leave at the end of the next iteration.
        kept: the first exception of the script's handler.
    """

    def __init__(self) -> None:
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
        current = signal.getsignal(signal.SIGTERM)
        if current is self._handler:
            return
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
