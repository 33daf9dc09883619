"""One rank of a ZeRO-1 job that trains blocks with snapshots to host memory and without, started by the harness."""

import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cpsr.benchmarks.overhead.blocks import NEVER_ITERATIONS, WARM_UP_STEPS, block_seconds, in_turns
from cpsr.benchmarks.overhead.jobs import torch_job, zero_job
from cpsr.demo.model import BATCH
from cpsr.recovery import CPSRRecovery

__all__ = ["main"]


def main(run_dir: Path, pairs: int, interval_iterations: int, alone: bool) -> dict[str, Any] | None:
    """Measure on every rank; rank 0 returns what it saw."""
    adapter, loader, step = torch_job(BATCH) if alone else zero_job(run_dir)
    checkpoint = {"interval_iterations": NEVER_ITERATIONS}
    with CPSRRecovery(adapter, {"run_dir": run_dir, "mode": "exact", "checkpoint": checkpoint}) as recovery:
        batches = recovery.resume(loader, repeat=True)
        for _ in range(WARM_UP_STEPS):
            step(next(batches))
        saver = recovery.life.saver
        plan = saver.plan

        def block(with_snapshots: bool) -> float:
            interval = interval_iterations if with_snapshots else None
            saver.plan = replace(plan, memory_interval_iterations=interval)
            return block_seconds(batches, step, "cpu")

        measured = in_turns(block, pairs)
        found = {
            "pairs": [asdict(pair) for pair in measured],
            "state_bytes": adapter.shard().state_bytes,
            "stall_seconds": statistics.median(saver.memory.stalls_seconds),
            "skipped": saver.memory.skipped,
        }
    return found if adapter.rank == 0 else None
