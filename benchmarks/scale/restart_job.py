"""Rank 0 and one other rank at a restart of a run of many, started by the harness: what each reads."""

import os
import time
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.tracing import Tracer, read_calls, why_no_strace
from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.scale.calls import DELAYS, NAMES
from cpsr.benchmarks.scale.simulated import LIFE, RUN, shard_of
from cpsr.checkpoint.progress import read_for_all
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.errors import CPSRError
from cpsr.ranks.group import Group
from cpsr.restart.sources import MemorySources, NewestCheckpoint

__all__ = ["main"]


def main(run_dir: Path, simulated_dir: str, simulated_ranks: int) -> dict[str, Any]:
    """Restart three times: timed, traced, and with slow calls."""
    join_ranks(run_dir)
    place, group = Path(simulated_dir), Group()
    store = CheckpointStore(place, group.rank, simulated_ranks, RUN, LIFE + 1)
    shard = shard_of(group.rank, simulated_ranks)
    pool = SnapshotPool(shard)

    def restart() -> None:
        read_for_all(place, simulated_ranks, group)
        target = CheckpointTarget(CheckpointConfig(), place, group)
        memory = MemorySources(RUN, group, shard, (LIFE, 0))
        snapshot = NewestCheckpoint(group, store, target, pool, memory).load(None, inexact=False)
        if snapshot is None:
            raise CPSRError("no checkpoint was found")
        pool.release(snapshot)

    group.barrier()
    started, processor = time.perf_counter(), time.process_time()
    restart()
    found: dict[str, Any] = {"seconds": time.perf_counter() - started, "calls": None, "delayed_seconds": None}
    found["processor_seconds"] = time.process_time() - processor
    if why_no_strace() is None:
        log = run_dir.parent / f"calls-{group.rank}"
        tracer = Tracer(os.getpid(), log, names=NAMES)
        restart()
        tracer.detach()
        found["calls"] = len(read_calls(log, place))
        group.barrier()
        tracer = Tracer(os.getpid(), log, DELAYS, names=NAMES)
        started = time.perf_counter()
        restart()
        found["delayed_seconds"] = time.perf_counter() - started
        tracer.detach()
    pool.close()
    group.close()
    return found
