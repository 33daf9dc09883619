"""One rank of a real training with experts, started by the harness."""

from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.experts.every_iteration import measure_every_iteration
from cpsr.benchmarks.experts.failing import follow
from cpsr.benchmarks.experts.tasks import TASK, FailingTask, WritesTask
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.experts.writes import measure_writes
from cpsr.benchmarks.harness.ranks import join_ranks

__all__ = ["main"]


def main(run_dir: Path, task: dict[str, Any]) -> dict[str, Any] | None:
    """Measure on every rank; rank 0 returns what it sees all do, since ranks wait for each other in every step."""
    described = TASK.validate_python(task)
    join_ranks(run_dir)
    if isinstance(described, FailingTask):
        found = follow(Training(described.mixture, described.seed), described.failures)
    elif isinstance(described, WritesTask):
        training = Training(described.mixture, seed=0)
        found = measure_writes(training, described.rounds, described.experts_per_layer, run_dir / "writes")
    else:
        training = Training(described.mixture, seed=0)
        found = measure_every_iteration(training, described.pairs, described.way, run_dir / "run")
    return found if torch.distributed.get_rank() == 0 else None
