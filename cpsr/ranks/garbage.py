"""Python's search for cyclic garbage: with torch and DeepSpeed loaded each full one takes 0.2 s, and finds little."""

import gc
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["LastCollections", "no_collections"]

PATIENCE_SECONDS = 1.0

_WRITTEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@contextmanager
def no_collections() -> Iterator[None]:
    """Within this context Python does not search by itself: imports and the opening of a run make many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LastCollections:
    """The searches at the end of a process, which take 1.4 s: a failed process ends without them.

    Objects outside of cycles still end as always. Files that only a cycle keeps open are flushed, by a thread: whoever
    writes one of them may wait forever, for the reader of a pipe or for a server, and others then wait for its lock.
    """

    def __init__(self) -> None:
        self._at_end = threading.Event()
        self._flusher: threading.Thread | None = None

    def spare(self) -> None:
        """Note that the process has failed: now, since at its end a newer Python starts no thread."""
        with suppress(RuntimeError):  # too many threads
            flusher = threading.Thread(target=self._flush, daemon=True)
            flusher.start()
            self._flusher = flusher

    def end(self) -> None:
        """End the process, without the searches if it has failed."""
        if self._flusher is not None:
            self._at_end.set()
            self._flusher.join(PATIENCE_SECONDS)
            gc.freeze()

    def _flush(self) -> None:
        self._at_end.wait()
        for one in gc.get_objects():
            if issubclass(type(one), _WRITTEN):  # `isinstance` asks proxies for their class, which warns or runs code
                with suppress(OSError, ValueError):  # no space, a pipe without reader; closed
                    one.flush()
