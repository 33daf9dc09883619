"""Ways to make the same bytes durable and read them back: the product's, a raw one, one through the page cache."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["CACHE", "CPSR", "RAW", "Cost", "Ways"]

CPSR, RAW, CACHE = "cpsr", "raw direct write and read", "safetensors through the page cache, hashed twice"
OPERATORS = 50
TENSORS = 3  # weights and two moments, in fp32
PIECE_BYTES = 16 << 20
COMMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Cost:
    """What one checkpoint took.

    Attributes:
        seconds: until it was durable and verified.
        processor_seconds: of the thread that wrote it.
    """

    seconds: float
    processor_seconds: float


class Ways:
    """One state in host memory, and each way to write it.

    Args:
        directory: empty, on the disk that is measured.
        megabytes: of the state, in units of 10^6 bytes.
    """

    def __init__(self, directory: Path, megabytes: int) -> None:
        self._directory = directory
        elements = megabytes * 10**6 // (TENSORS * 4 * OPERATORS)
        flat = [torch.randn(OPERATORS * elements) for _ in range(TENSORS)]
        operators = {}
        for index in range(OPERATORS):
            weights, *moments = (values[index * elements : (index + 1) * elements] for values in flat)
            name = f"layers.{index:02d}.weight"
            named = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
            operators[name] = OperatorState(name, ParamSlice(weights, (elements,)), named, 0)
        self._shard = Shard(operators)
        self.bytes = self._shard.state_bytes
        self._pool = SnapshotPool(self._shard, memory=SharedMemory(f"durable{os.getpid()}-{megabytes}", 0, 1))
        if self._pool.shared_memory_problem is not None:
            raise CPSRError(self._pool.shared_memory_problem)
        self._store = CheckpointStore(directory / "run", 0, 1, "durable", 1)
        self._store.prepare()
        self._iteration = 0
        self._aligned = mmap.mmap(-1, -(-self.bytes // PIECE_BYTES) * PIECE_BYTES)
        torch.frombuffer(self._aligned, dtype=torch.uint8).random_(0, 255)
        self.all: Mapping[str, Callable[[], Cost]] = {CPSR: self._cpsr, RAW: self._raw, CACHE: self._cache}

    def close(self) -> None:
        """Free the memory."""
        self._pool.close()

    def _cpsr(self) -> Cost:
        """A snapshot's checkpoint, as the writer's thread writes and commits it."""
        self._iteration += 1
        scalars = {"cumulative_learning_rate": 0.0, "learning_rate": 0.1}
        self._pool.begin(self._shard, self._iteration, scalars)
        snapshot = self._pool.finish()
        assert snapshot is not None
        self._pool.settle()

        def write() -> None:
            self._store.write(snapshot)
            if not self._store.commit(self._iteration, COMMIT_SECONDS, threading.Event()).committed:
                raise CPSRError("the checkpoint was not committed")

        cost = _timed(write)
        self._pool.release(snapshot)
        return cost

    def _raw(self) -> Cost:
        """As many bytes with O_DIRECT from aligned memory, forced, and read with O_DIRECT; nothing is hashed."""
        path = self._directory / "raw"
        into = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        into.madvise(mmap.MADV_HUGEPAGE)

        def write() -> None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
            with memoryview(self._aligned) as view:
                for start in range(0, len(view), PIECE_BYTES):
                    os.pwrite(descriptor, view[start : start + PIECE_BYTES], start)
            os.fsync(descriptor)
            for start in range(0, len(self._aligned), PIECE_BYTES):
                os.preadv(descriptor, [into], start)
            os.close(descriptor)

        cost = _timed(write)
        path.unlink()
        return cost

    def _cache(self) -> Cost:
        """The safetensors library's own writing, forced, dropped from memory, read back, and hashed on both sides."""
        path = self._directory / "cache"
        tensors = dict(self._shard.tensors())

        def write() -> None:
            save_file(tensors, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                state = xxhash.xxh3_128()
                while data := file.read(PIECE_BYTES):
                    state.update(data)
            expected = xxhash.xxh3_128()
            for values in tensors.values():
                expected.update(values.numpy().data)

        cost = _timed(write)
        path.unlink()
        return cost


def _timed(write: Callable[[], None]) -> Cost:
    processor, started = time.thread_time(), time.perf_counter()
    write()
    return Cost(time.perf_counter() - started, time.thread_time() - processor)
