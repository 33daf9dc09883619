"""The process of a run: one open run at a time, forked children, and a script that ends before its run."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from cpsr.errors import ConfigError

__all__ = ["ProcessSlot", "ScriptEnd"]

# Called before Python stops the threads that a dump needs; `atexit` itself comes after them.
_at_exit: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)

End = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ProcessSlot:
    """What one run of this process holds while it is open; a forked process has its own, and the run is not its.

    Args:
        run_dir: of the run, for messages.
        disown: called in each process that is forked while the run is open, before anything else runs there.
    """

    _lock = threading.Lock()
    _holder: "ProcessSlot | None" = None

    def __init__(self, run_dir: str, disown: Callable[[], object]) -> None:
        self._run_dir = run_dir
        self._disown = disown

    def claim(self) -> None:
        """Hold the process.

        Raises:
            ConfigError: another run is open in this process; it goes on as it was.
        """
        with ProcessSlot._lock:
            held = ProcessSlot._holder
            if held is not None:
                raise ConfigError(
                    f"a run is open in this process already (run_dir {held._run_dir}), and CPSR follows one engine "
                    f"in a process: this second one (run_dir {self._run_dir}) was not opened, and the first goes on as "
                    "it was. For several models in one job give one engine all that it trains: "
                    "TorchAdapter(model, [optimizer, optimizer]) takes several optimizers, and recovery.register(name, "
                    "module) saves and restores another module or optimizer. To open one run after the other, leave "
                    "the `with` block of the first before"
                )
            ProcessSlot._holder = self

    def release(self) -> None:
        """Let another run be opened; without holding it nothing happens."""
        with ProcessSlot._lock:
            if ProcessSlot._holder is self:
                ProcessSlot._holder = None

    @classmethod
    def forked(cls) -> None:
        """This process is a fork of one that may hold a run."""
        cls._lock = threading.Lock()
        holder, cls._holder = cls._holder, None
        if holder is not None:
            holder._disown()


os.register_at_fork(after_in_child=ProcessSlot.forked)


class ScriptEnd:
    """Ends an open run when its script ends first: with its uncaught error, or with SystemExit at any other end.

    A script that calls `sys.exit`, or just ends, may be one of several ranks, and the others may still train. So its
    run ends as after an error: the state of its last step goes to host memory.
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
