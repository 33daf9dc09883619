"""Several requests at a time to a file system of fsspec that permits it, as those of object stores do.

One connection to an object store is slow, and each of its requests takes a while. The bytes in memory are bounded by
the constants here, whatever the size of a file.
"""

import asyncio
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import fsspec
import xxhash
from fsspec.callbacks import Callback

from cpsr.checkpoint.background import yield_to_training
from cpsr.checkpoint.file_hash import Digest

__all__ = ["PART_BYTES", "READS", "SENDS", "copy_file", "options_for", "read_ranges", "send_parts", "takes_parts"]

PART_BYTES = 16 << 20  # of one request; the smallest part of an upload of S3 is 5 MB
SENDS = 3  # files at a time: while one is read back, others are sent
_PARTS = 4  # of each of these files at a time
READS = 4  # ranges of a file that is being read
_MOST_PARTS = 9_000  # S3 permits 10,000 of a file


def options_for(url: str) -> dict[str, Any]:
    """What a file system is to be created with: an event loop of its own, for which training has priority.

    The loop that fsspec makes by itself serves the job's data loader as well.

    Raises:
        ImportError: the file system's package is not installed.
        ValueError: there is none of that name.
    """
    protocol, _ = fsspec.core.split_protocol(url)
    kind = fsspec.get_filesystem_class(protocol or "file")
    return {"loop": _loop()} if kind.async_impl else {}


def takes_parts(system: Any) -> bool:
    """Whether the file system sends a file in parts at the same time, and lets the caller bound them."""
    if not system.async_impl:
        return False
    return {"chunksize", "max_concurrency", "callback"} <= inspect.signature(system._put_file).parameters.keys()


def copy_file(system: Any, descriptor: int, path: str, size: int, check: Callable[[], None]) -> "Future[Digest]":
    """Begin to send a local file in parts, and then to read it back from the store.

    Args:
        system: one that `takes_parts`.
        descriptor: of the file, from its beginning; it is closed in the end.
        path: where to.
        size: in bytes, that it should have.
        check: called after each part; what it raises ends the copy.

    Returns:
        Size, up to one byte more than `size`, and hash of what was read back.
    """
    return asyncio.run_coroutine_threadsafe(_copy(system, descriptor, path, size, check), system.loop)


def read_ranges(system: Any, path: str, size: int) -> Iterator[bytes]:
    """Content of a file of an asynchronous file system, in order; the next ranges are asked for meanwhile.

    Args:
        system: the file system.
        path: of the file.
        size: in bytes.
    """
    waiting: deque[Future[bytes]] = deque()
    try:
        for asked in _ranges(system, path, size):
            waiting.append(asyncio.run_coroutine_threadsafe(asked, system.loop))
            if len(waiting) == READS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


async def send_parts(system: Any, descriptor: int, path: str, size: int, check: Callable[[], None]) -> None:
    """Send a local file in parts; the arguments are those of `copy_file`."""
    part = max(PART_BYTES, -(-size // _MOST_PARTS))
    # Through the descriptor: a name might lead to another file by now.
    await system._put_file(
        f"/proc/self/fd/{descriptor}", path, callback=_Checking(check), chunksize=part, max_concurrency=_PARTS
    )


async def _copy(system: Any, descriptor: int, path: str, size: int, check: Callable[[], None]) -> Digest:
    try:
        await send_parts(system, descriptor, path, size, check)
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads these bytes again
        os.close(descriptor)
    state, found = xxhash.xxh3_128(), 0
    waiting: deque[asyncio.Task[bytes]] = deque()

    async def take() -> None:
        nonlocal found
        data = await waiting[0]
        waiting.popleft()
        check()
        state.update(data)
        found += len(data)

    try:
        for asked in _ranges(system, path, size, beyond=1):  # what is longer is not the same
            waiting.append(asyncio.ensure_future(asked))
            if len(waiting) == READS:
                await take()
        while waiting:
            await take()
    finally:
        for task in waiting:
            task.cancel()
    return Digest(found, state.hexdigest())


def _ranges(system: Any, path: str, size: int, beyond: int = 0) -> Iterator[Coroutine[Any, Any, bytes]]:
    """Requests for all of a file; the last one also for so many bytes beyond it."""
    if beyond and not size:
        yield system._cat_file(path)  # object stores refuse a range of nothing
    for start in range(0, size, PART_BYTES):
        end = start + PART_BYTES
        yield system._cat_file(path, start=start, end=end if end < size else size + beyond)


class _Checking(Callback):  # type: ignore[misc]  # fsspec has no types
    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self._check()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        yield_to_training()
        loop.run_forever()

    # A daemon: a request that hangs holds up no end of a job.
    threading.Thread(target=run, name="cpsr-target-requests", daemon=True).start()
    return loop
