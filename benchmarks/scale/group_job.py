"""One rank of a group of real processes, started by the harness: what joining and agreeing takes."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.ranks.group import Ballot, Group

__all__ = ["main"]

ROUNDS = 30
CONTENT = "x" * 400_000  # the commit record of 1,024 ranks


def main(run_dir: Path) -> dict[str, float] | None:
    """Measure on every rank; rank 0 returns seconds by what was done."""
    join_ranks(run_dir)
    dist.barrier()
    started = time.perf_counter()
    group = Group()
    found = {"making a group": time.perf_counter() - started}
    votes = group.votes()
    works: dict[str, Callable[[], object]] = {
        "barrier": group.barrier,
        "gathering a word of each": lambda: group.gather(f"{group.rank:020d}"),
        "broadcasting 400 kB": lambda: group.broadcast(CONTENT if group.rank == 0 else None),
        "voting on snapshots": lambda: votes.exchange(Ballot()),
    }
    for name, work in works.items():
        found[name] = _median_seconds(work, group)
    votes.finish()
    group.close()
    return found if dist.get_rank() == 0 else None


def _median_seconds(work: Callable[[], object], group: Group) -> float:
    samples = []
    for _ in range(ROUNDS):
        group.barrier()
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
