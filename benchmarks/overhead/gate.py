"""Intervals in which the predictor does not work, in a job where it otherwise does."""

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from cpsr.learning.learner import Learner, Pace

__all__ = ["Gate"]


class Gate:
    """Lets the predictor work, or not, as a context manager inside a life; it works on exit.

    What it had begun when the gate was shut is dropped when it opens again, so that it goes on with the newest
    checkpoint: its work in an interval is not more than usual but for the products of one more checkpoint.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        pace = learner._pace
        assert pace is not None  # the predictor learns
        self._pace: Pace = pace
        self._open = threading.Event()
        self._open.set()

    def timed(self, train: Callable[[], None], working: bool) -> float:
        """Seconds that `train` takes while the predictor works, or does not."""
        if working and not self._open.is_set():
            with self._learner.locked():
                pass
            self._open.set()
        elif not working:
            self._open.clear()
        started = perf_counter()
        train()
        return perf_counter() - started

    def before_slice(self) -> None:
        """Wait until the gate is open, and then for the pace itself."""
        self._open.wait()
        self._pace.before_slice()

    def after_slice(self, used_seconds: float, processor_seconds: float) -> None:
        """Report to the pace itself."""
        self._pace.after_slice(used_seconds, processor_seconds)

    def close(self) -> None:
        """Let nobody wait any more, where the life ends meanwhile."""
        self._open.set()
        self._pace.close()

    def __enter__(self) -> "Gate":
        """Stand between the learner and its pace."""
        self._learner._pace = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stand aside; a thread that waits here goes on."""
        self._learner._pace = self._pace
        self._open.set()
