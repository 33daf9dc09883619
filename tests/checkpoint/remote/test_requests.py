"""Several requests at a time: in order, bounded, below training, and only where the file system permits it."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cpsr.checkpoint.background import NICENESS
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.remote import requests
from cpsr.checkpoint.remote.requests import READS, copy_file, options_for, read_ranges, takes_parts

PART = 10
LIMIT_SECONDS = 30.0


class Store(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One object in memory that answers later requests first, and notes how many are open."""

    cachable = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop, skip_instance_cache=True)
        self.data = b""
        self.open = self.most_open = 0
        self.ranges: list[tuple[int | None, int | None]] = []

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.ranges.append((start, end))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0.02 / len(self.ranges))
        self.open -= 1
        assert start is None or start < len(self.data), "an object store refuses a range of nothing"
        return self.data[start:end]

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = None, chunksize: int = 0, max_concurrency: int = 0
    ) -> None:
        self.data = Path(lpath).read_bytes()
        callback.relative_update(len(self.data))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(requests, "PART_BYTES", PART)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Store(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("size", [0, 1, PART, 3 * PART, 12 * PART + 3])
def test_pieces_come_in_order_and_few_are_in_memory(store: Store, size: int) -> None:
    store.data = os.urandom(size)
    assert b"".join(read_ranges(store, "x", size)) == store.data
    assert store.most_open <= READS


def test_a_reader_that_leaves_early_asks_for_nothing_more(store: Store) -> None:
    store.data = os.urandom(50 * PART)
    pieces = read_ranges(store, "x", len(store.data))
    assert next(pieces) == store.data[:PART]
    pieces.close()  # type: ignore[attr-defined]  # of a generator
    assert len(store.ranges) <= READS + 1


@pytest.mark.parametrize("size", [0, 1, PART, 3 * PART, 12 * PART + 3])
def test_what_is_sent_is_read_back(store: Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(size))
    assert sent(store, path, size) == hash_file(path)
    assert store.data == path.read_bytes()
    assert store.most_open <= READS


@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART + 3])
def test_one_byte_more_than_there_should_be_is_seen(store: Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(size + 1))
    assert sent(store, path, size).bytes == size + 1


def test_a_check_that_raises_ends_the_copy_and_the_file_is_closed(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    descriptor = os.open(path, os.O_RDONLY)

    def check() -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        copy_file(store, descriptor, "x", 1, check).result(LIMIT_SECONDS)
    assert store.ranges == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_requests_run_below_training() -> None:
    pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")
    loop = options_for("s3://bucket/x")["loop"]

    async def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    # It begins as the thread that asked first, which another test may have made nice.
    assert asyncio.run_coroutine_threadsafe(niceness(), loop).result(LIMIT_SECONDS) >= NICENESS
    assert options_for("s3://other/y")["loop"] is loop


def test_other_file_systems_get_one_request_at_a_time() -> None:
    assert options_for("memory://x") == options_for("file:///x") == options_for("/x") == {}
    assert not takes_parts(MemoryFileSystem())


def sent(store: Store, path: Path, size: int) -> Any:
    return copy_file(store, os.open(path, os.O_RDONLY), "x", size, lambda: None).result(LIMIT_SECONDS)
