"""Python's search for cyclic garbage: with torch and DeepSpeed loaded each full one takes 0.2 s, and finds little."""

import gc
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["no_collections", "spare_last_collections"]

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


def spare_last_collections(failed: threading.Event) -> None:
    """Let a failed process end without the searches at its end, which take 1.4 s.

    Objects outside of cycles still end as always. Files that only a cycle keeps open are flushed here.
    """
    if not failed.is_set():
        return
    for one in gc.get_objects():
        if issubclass(type(one), _WRITTEN):  # `isinstance` asks proxies for their class, which warns or runs code
            with suppress(OSError, ValueError):  # no space, a pipe without reader; closed
                one.flush()
    gc.freeze()
