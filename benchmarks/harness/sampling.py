"""Looking at something again and again beside what is measured."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Sampling"]


class Sampling:
    """Calls a function in a thread of its own, as a context manager around the work.

    Args:
        look: called every so many seconds, and not any more after the block.
        seconds: between two calls.
    """

    def __init__(self, look: Callable[[], object], seconds: float) -> None:
        self._look = look
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait for the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self._look()
