"""One rank of a group of real processes, started by the harness: what joining and agreeing takes."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.ranks.agreement import Agreement
from cpsr.ranks.board import Board
from cpsr.ranks.group import Group

__all__ = ["main"]

ROUNDS = 30
AGREEMENTS = 5
STEPS, STEP_SECONDS = 20, 0.005  # before the last rank is asked to leave
CONTENT = "x" * 400_000  # the commit record of 1,024 ranks


def main(run_dir: Path) -> dict[str, float] | None:
    """Measure on every rank; rank 0 returns seconds by what was done."""
    join_ranks(run_dir)
    dist.barrier()
    started = time.perf_counter()
    group = Group()
    found = {"making a group": time.perf_counter() - started}
    works: dict[str, Callable[[], object]] = {
        "barrier": group.barrier,
        "gathering a word of each": lambda: group.gather(f"{group.rank:020d}"),
        "broadcasting 400 kB": lambda: group.broadcast(CONTENT if group.rank == 0 else None),
    }
    for name, work in works.items():
        found[name] = _median_seconds(work, group)
    agreed = [_agree_to_leave(group) for _ in range(AGREEMENTS)]
    names = "opening an agreement", "from SIGTERM to the step to leave at", "a step, beside that"
    found |= {name: statistics.median(seconds) for name, seconds in zip(names, zip(*agreed, strict=True), strict=True)}
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


def _agree_to_leave(group: Group) -> tuple[float, float, float]:
    """Seconds of opening, from a request to the end of the step at which all leave, and of the end of other steps."""
    group.barrier()
    started, asked = time.perf_counter(), False
    agreement = Agreement(group, Board.open(group), lambda: asked, lambda: None)
    opened, steps = time.perf_counter(), []
    for _ in range(STEPS):
        time.sleep(STEP_SECONDS)
        began = time.perf_counter()
        agreement.end_step()
        steps.append(time.perf_counter() - began)
    group.barrier()
    began, asked = time.perf_counter(), group.rank == group.size - 1
    while not agreement.end_step():
        time.sleep(STEP_SECONDS)
    leaves = time.perf_counter()
    group.barrier()
    agreement.close()
    return opened - started, leaves - began, statistics.median(steps)
