"""A real training that CPSR snapshots to host memory after every iteration, in blocks with snapshots and without."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cpsr.benchmarks.experts.names import EVERYTHING
from cpsr.benchmarks.experts.training import Training
from cpsr.recovery import CPSRRecovery

__all__ = ["BlockPair", "measure_every_iteration"]

BLOCK_STEPS = 5
SETTLE_STEPS = 1  # the first step after a switch is not timed
# Checkpoints of the warm-up measure the copy, and agree on the rounds.
WARM_UP_STEPS, WARM_UP_INTERVAL = 40, 10
NEVER_ITERATIONS = 2**30  # no checkpoint falls into a measurement
SETTLE_SECONDS = 60.0


@dataclass(frozen=True)
class BlockPair:
    """Seconds of a block of steps with a snapshot each, and of its neighbour without."""

    with_seconds: float
    without_seconds: float


def measure_every_iteration(training: Training, pairs: int, way: str, run_dir: Path) -> dict[str, Any]:
    """Blocks of a job that is configured as users configure it; a collective.

    Args:
        training: anywhere.
        pairs: of blocks, an even number.
        way: `EVERYTHING`, or experts in turn, as many in each snapshot as an iteration overlaps.
        run_dir: of CPSR.

    Returns:
        Plain data, of this rank.
    """
    config: dict[str, Any] = {
        "run_dir": run_dir,
        "mode": "auto",
        "checkpoint": {"interval_iterations": WARM_UP_INTERVAL, "final": False, "fsync": False},
        "memory": {"interval_iterations": 1},
        "learning": {"budget_fraction": 0.0},
    }
    if way != EVERYTHING:
        config["experts"] = {"policy": "sequential"}
    with CPSRRecovery(training.adapter, config) as recovery:
        saver, experts = recovery.life.saver, recovery.life.experts
        for _ in range(WARM_UP_STEPS):
            training.step()
        saver.settle(SETTLE_SECONDS)
        plan = saver.plan

        def block(every: int | None) -> float:
            saver.plan = replace(plan, interval_iterations=NEVER_ITERATIONS, memory_interval_iterations=every)
            return _seconds(training.step)

        measured = []
        for place in range(pairs):
            order = (1, None) if place % 2 == 0 else (None, 1)
            seconds = {every: block(every) for every in order}
            measured.append(asdict(BlockPair(seconds[1], seconds[None])))
        stalls = list(saver.memory.stalls_seconds)
        skipped = saver.memory.skipped
        rounds = 1 if experts is None else experts.in_memory.rounds
        expert_bytes = training.adapter.shard().state_bytes - training.non_expert_bytes
    return {
        "pairs": measured,
        "stall_seconds": stalls,
        "skipped": skipped,
        "rounds": rounds,
        "state_bytes": training.non_expert_bytes + expert_bytes,
        "snapshot_bytes": training.non_expert_bytes + expert_bytes / rounds,
        "step_seconds": statistics.median(pair["without_seconds"] for pair in measured) / BLOCK_STEPS,
    }


def _seconds(step: Callable[[], None]) -> float:
    for _ in range(SETTLE_STEPS):
        step()
    started = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step()
    return time.perf_counter() - started
