"""`cpsr bench durable`: processor time and time until a checkpoint is durable and verified, beside the disk's own."""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["main"]

MEGABYTES = (64, 256, 512)
ROUNDS = 9
PROCESSOR_AIM, RATIO_AIM = 0.4, 1.3  # seconds per GB; time over the raw way's
GIGABYTE = 1e9
CPSR, RAW = "cpsr", "raw direct write and read"
OPERATORS = 50
TENSORS = 3  # weights and two moments, in fp32
PIECE_BYTES = 16 << 20
COMMIT_SECONDS = 60.0


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    workdir: Path | None = None,
    megabytes: Sequence[int] = MEGABYTES,
) -> None:
    """Measure, print the table, and write the JSON file.

    `megabytes`: sizes of the state.

    Raises:
        CPSRError: there is too little shared memory, or a checkpoint was not committed.
    """
    with measuring("durable", json_path, workdir) as call:
        step = call.bar("checkpoints", len(megabytes) * (rounds + 1))
        rows, sizes, aims = [], list[dict[str, Any]](), dict[str, bool]()
        for size in megabytes:
            directory = call.directory / str(size)
            directory.mkdir()
            samples, gigabytes = _measured(directory, size, rounds, step)
            seconds = {name: median_interval([cost.seconds for cost in own]) for name, own in samples.items()}
            processor = {
                name: median_interval([cost.processor_seconds / gigabytes for cost in own])
                for name, own in samples.items()
            }
            ratio = median_ratio_interval(*([cost.seconds for cost in samples[name]] for name in (CPSR, RAW)))
            rows += _rows(size, seconds, processor, ratio)
            aims |= {
                f"{size} MB: at most {PROCESSOR_AIM} s of processor time per GB": processor[CPSR].value
                <= PROCESSOR_AIM,
                f"{size} MB: at most {RATIO_AIM} times a raw write and read": ratio.value <= RATIO_AIM,
            }
            plain = {name: [asdict(cost) for cost in own] for name, own in samples.items()}
            sizes.append({"megabytes": size, "ratio": asdict(ratio), "samples": plain})
        headings = ("state", "way", "seconds", "over the raw way", "processor seconds per GB")
        call.table("Until a checkpoint is durable and verified", headings, rows)
        call.console.print(
            f"Medians of {rounds} with 95% bootstrap intervals; the raw way hashes nothing and keeps no file."
        )
        call.judge(aims)
        call.leave({"rounds": rounds, "sizes": sizes, "aims": aims})


def _rows(
    size: int, seconds: dict[str, Estimate], processor: dict[str, Estimate], ratio: Estimate
) -> list[tuple[str, ...]]:
    over = {CPSR: interval_text(ratio), RAW: ""}
    return [
        (f"{size} MB", name, interval_text(seconds[name], digits=3), over[name], interval_text(processor[name]))
        for name in seconds
    ]


@dataclass(frozen=True)
class _Cost:
    """What one checkpoint took: until it was durable and verified, and of the thread that wrote it."""

    seconds: float
    processor_seconds: float


def _measured(
    directory: Path, megabytes: int, rounds: int, step: Callable[[], None]
) -> tuple[dict[str, list[_Cost]], float]:
    """Costs by way in the order of the rounds, and the size of the state in GB."""
    ways = _Ways(directory, megabytes)
    work = {CPSR: ways.cpsr, RAW: ways.raw}
    order = random.Random(megabytes)  # noqa: S311 - an order, not a secret
    samples: dict[str, list[_Cost]] = {name: [] for name in work}
    try:
        for number in range(-1, rounds):  # the first one warms up
            for name in order.sample(list(work), len(work)):
                cost = work[name]()
                if number >= 0:
                    samples[name].append(cost)
            step()
    finally:
        ways.close()
    return samples, ways.bytes / GIGABYTE


class _Ways:
    """One state in host memory, and each way to make it durable and read it back.

    Args:
        directory: empty, on the disk that is measured.
        megabytes: of the state, in units of 10^6 bytes.
    """

    def __init__(self, directory: Path, megabytes: int) -> None:
        self._directory = directory
        elements = megabytes * 10**6 // (TENSORS * 4 * OPERATORS)
        operators = {}
        for index in range(OPERATORS):
            weights, first, second = (torch.randn(elements) for _ in range(TENSORS))
            name = f"layers.{index:02d}.weight"
            moments = {"exp_avg": first, "exp_avg_sq": second}
            operators[name] = OperatorState(name, ParamSlice(weights, (elements,)), moments, 0)
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

    def close(self) -> None:
        """Free the memory."""
        self._pool.close()

    def cpsr(self) -> _Cost:
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

    def raw(self) -> _Cost:
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


def _timed(write: Callable[[], None]) -> _Cost:
    processor, started = time.thread_time(), time.perf_counter()
    write()
    return _Cost(time.perf_counter() - started, time.thread_time() - processor)
