"""One rank that trains blocks with snapshots to host memory, with copies alone, and with neither, in turns."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsr.benchmarks.cadence.copies import OnlyCopies
from cpsr.benchmarks.cadence.mixture import mixture_job
from cpsr.benchmarks.harness.ranks import RANKS
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, NEVER_ITERATIONS, SETTLE_STEPS, WARM_UP_STEPS
from cpsr.benchmarks.overhead.jobs import Job, torch_job, zero_job
from cpsr.demo.model import BATCH
from cpsr.recovery import CPSRRecovery

__all__ = ["JOBS", "KINDS", "RANKS_JOB", "main"]

KINDS = ("snapshots", "copies", "neither")
RANKS_JOB, SELECTED = f"DeepSpeed ZeRO-1, {RANKS} ranks", "mixture, MOETION's selection"
JOBS: Mapping[str, Callable[[Path], Job]] = {
    "torch, one process": lambda run_dir: torch_job(BATCH),
    RANKS_JOB: zero_job,
    "mixture, all experts": lambda run_dir: mixture_job(),
    SELECTED: lambda run_dir: mixture_job(),
}
SELECTED_AFTER = 64  # snapshots: then steps beside copies were compared


def main(run_dir: Path, rounds: int, interval_iterations: int, kind: str) -> dict[str, Any] | None:
    """Measure on every rank; rank 0 returns what it saw.

    Args:
        run_dir: of the run.
        rounds: of blocks.
        interval_iterations: between snapshots.
        kind: of `JOBS`.

    Returns:
        `seconds` and `processor_seconds`, the latter of all threads: kind of block -> those of a step, of each round.
    """
    adapter, loader, step = JOBS[kind](run_dir)
    config = {"run_dir": run_dir, "checkpoint": {"interval_iterations": NEVER_ITERATIONS}}
    config |= {"experts": {"policy": "moetion"}} if kind == SELECTED else {"mode": "exact"}
    with CPSRRecovery(adapter, config) as recovery:
        batches = recovery.resume(loader, repeat=True)
        saver, copies = recovery.life.saver, OnlyCopies(adapter)
        plan = saver.plan
        saver.plan = replace(plan, memory_interval_iterations=interval_iterations)
        for _ in range(WARM_UP_STEPS + SELECTED_AFTER * interval_iterations):
            step(next(batches))

        def block(kind: str) -> tuple[float, float]:
            interval = interval_iterations if kind == "snapshots" else None
            saver.plan = replace(plan, memory_interval_iterations=interval)
            begin = copies.begin if kind == "copies" else lambda: None
            return _measured(batches, step, begin, interval_iterations)

        found = _in_turns(block, rounds) | {
            "state_bytes": adapter.shard().state_bytes,
            "stall_seconds": statistics.median(saver.memory.stalls_seconds),
            "skipped": saver.memory.skipped,
        }
        copies.close()
    return found if adapter.rank == 0 else None


def _in_turns(block: Callable[[str], tuple[float, float]], rounds: int) -> dict[str, Any]:
    """Rounds of every kind twice, the second time in reverse: a machine that slows down steadily cancels out."""
    seconds: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    for index in range(rounds):
        order = [KINDS[(index + place) % len(KINDS)] for place in range(len(KINDS))]
        every = [(kind, block(kind)) for kind in (*order, *reversed(order))]
        for kind in KINDS:
            seconds[kind].append(statistics.mean(one for own, (one, _) in every if own == kind))
            processor[kind].append(statistics.mean(one for own, (_, one) in every if own == kind))
    return {"seconds": seconds, "processor_seconds": processor}


def _measured(
    batches: Iterator[Any], step: Callable[[Any], None], begin: Callable[[], None], interval_iterations: int
) -> tuple[float, float]:
    """Seconds and processor seconds of a step of the next block, after one that is not timed."""
    started = 0.0, 0.0
    for number in range(SETTLE_STEPS + BLOCK_STEPS):
        if number == SETTLE_STEPS:
            started = time.perf_counter(), time.process_time()
        if number % interval_iterations == 0:
            begin()
        step(next(batches))
    ended = time.perf_counter(), time.process_time()
    wall, processor = ((end - start) / BLOCK_STEPS for start, end in zip(started, ended, strict=True))
    return wall, processor
