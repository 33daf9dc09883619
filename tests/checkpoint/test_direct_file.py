"""Transfers past the page cache: their pieces, and file systems that refuse, fail, or transfer less than asked."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from numpy.typing import NDArray

from cpsr.checkpoint.direct_file import (
    BLOCK_BYTES,
    DIRECT,
    PIECE_BYTES,
    aligned_pieces,
    block_buffer,
    open_direct,
    read_at,
    write_piece,
)

Bytes = NDArray[numpy.uint8]
NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC
SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 513]


def memory(size: int, misaligned_by: int = 0) -> Bytes:
    """Random bytes that begin so many bytes behind the start of a block."""
    whole = numpy.empty(size + 2 * BLOCK_BYTES, numpy.uint8)
    start = -whole.ctypes.data % BLOCK_BYTES + misaligned_by
    found = whole[start : start + size]
    found[:] = numpy.random.default_rng(size).integers(0, 256, size, numpy.uint8)
    return found


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


def write_runs(path: Path, *runs: Bytes) -> bool:
    """Write them; returns whether the last transfer went past the page cache."""
    descriptor = open_direct(path, NEW)
    try:
        for piece in aligned_pieces(runs):
            write_piece(descriptor, piece, path)
        return is_direct(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, piece_bytes: int = PIECE_BYTES) -> bytes:
    descriptor = open_direct(path, os.O_RDONLY)
    try:
        buffer, found = block_buffer(piece_bytes), bytearray()
        while count := read_at(descriptor, buffer, len(found), piece_bytes):
            found += buffer[:count].tobytes()
        return bytes(found)
    finally:
        os.close(descriptor)


def supports_direct(directory: Path) -> bool:
    """Whether the file system of the tests takes such transfers; on tmpfs and disks of today it does."""
    return write_runs(directory / "probe", memory(BLOCK_BYTES))


@pytest.mark.parametrize("size", [*SIZES, PIECE_BYTES, 2 * PIECE_BYTES + 17])
@pytest.mark.parametrize("misaligned_by", [0, 4])
def test_what_is_written_is_read_whatever_its_size(tmp_path: Path, size: int, misaligned_by: int) -> None:
    run = memory(size, misaligned_by)
    write_runs(tmp_path / "file", run)
    assert (tmp_path / "file").read_bytes() == run.tobytes()
    assert read(tmp_path / "file") == read(tmp_path / "file", BLOCK_BYTES) == run.tobytes()


def test_whole_blocks_never_touch_the_page_cache(tmp_path: Path) -> None:
    if not supports_direct(tmp_path):
        pytest.skip("the file system of the tests refuses direct transfers")
    assert write_runs(tmp_path / "whole", memory(2 * BLOCK_BYTES))
    assert not write_runs(tmp_path / "tail", memory(2 * BLOCK_BYTES + 1))


@pytest.fixture
def refusing_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses `O_DIRECT`, where mounting is permitted."""
    path = tmp_path / "refusing"
    path.mkdir()
    command = ["mount", "-t", "ramfs", "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting a ramfs is not permitted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_file_system_that_refuses_is_stated_once_and_takes_the_page_cache(
    refusing_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "other"):
        assert not write_runs(refusing_disk / name, memory(3 * BLOCK_BYTES + 5))
        assert read(refusing_disk / name) == memory(3 * BLOCK_BYTES + 5).tobytes()
    (record,) = caplog.records
    assert f"the file system of {refusing_disk} refuses direct I/O" in record.getMessage()


@pytest.mark.parametrize("most", [1, 512, BLOCK_BYTES, 3 * BLOCK_BYTES - 1])
def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    short = [20, 20]  # writes and reads, so that single bytes come to an end
    write, preadv = os.write, os.preadv

    def writing(descriptor: int, data: memoryview) -> int:
        short[0] -= 1
        return cached(write, descriptor, data[:most]) if short[0] > 0 else write(descriptor, data)

    def reading(descriptor: int, buffers: list[memoryview], start: int) -> int:
        short[1] -= 1
        if short[1] <= 0:
            return preadv(descriptor, buffers, start)
        return cached(preadv, descriptor, [buffers[0][:most]], start)

    monkeypatch.setattr(os, "write", writing)
    monkeypatch.setattr(os, "preadv", reading)
    run = memory(5 * BLOCK_BYTES + 7)
    write_runs(tmp_path / "file", run)
    assert read(tmp_path / "file") == run.tobytes() == (tmp_path / "file").read_bytes()


def cached(call: Callable[..., int], descriptor: int, *arguments: object) -> int:
    """A call through the page cache, which takes any length; the descriptor stays as it is."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    try:
        return call(descriptor, *arguments)
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
