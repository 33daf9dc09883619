"""The end of a script that has opened a run without a `with` block."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["ScriptEnd"]

# Called before Python stops the threads that a dump needs; `atexit` itself comes after them.
_at_exit: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)

End = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ScriptEnd:
    """Ends an open run when its script ends first: with its uncaught error, or with SystemExit at any other end.

    A script that calls `sys.exit`, or just ends, may be one of several ranks, and the others may still train. So its
    run ends as after an error: the state of its last step goes to host memory.

    Args:
        end: ends the run, given an exception.
    """

    def __init__(self, end: End) -> None:
        self._end: End | None = end
        self._process = os.getpid()
        self._hook = sys.excepthook
        sys.excepthook = self._on_error
        _at_exit(self._on_exit)

    def cancel(self) -> None:
        """The script has closed the run itself."""
        self._end = None
        if sys.excepthook == self._on_error:
            sys.excepthook = self._hook

    def _on_error(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            self._finish(kind, error, traceback)
        finally:
            self._hook(kind, error, traceback)

    def _on_exit(self) -> None:
        error = SystemExit("the script ended without recovery.close()")
        self._finish(SystemExit, error, None)

    def _finish(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        end, self._end = self._end, None
        if end is not None and os.getpid() == self._process:
            end(kind, error, traceback)
