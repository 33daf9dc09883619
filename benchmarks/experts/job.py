"""One rank of a real training with experts, started by torchrun."""

import argparse
import json
from pathlib import Path

import torch

from cpsr.benchmarks.experts.every_iteration import measure_every_iteration
from cpsr.benchmarks.experts.failing import follow
from cpsr.benchmarks.experts.tasks import TASK, FailingTask, WritesTask
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.experts.writes import measure_writes
from cpsr.benchmarks.overhead.launch import start_gloo


def main() -> None:
    """Measure on every rank; rank 0 writes: what it sees all do, since ranks wait for each other in every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, help="given to every job; holds checkpoints while they are measured")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--task", type=TASK.validate_json, required=True)
    arguments = parser.parse_args()
    task = arguments.task
    start_gloo()
    if isinstance(task, FailingTask):
        found = follow(Training(task.mixture, task.seed), task.failures)
    elif isinstance(task, WritesTask):
        training = Training(task.mixture, seed=0)
        found = measure_writes(training, task.rounds, task.experts_per_layer, arguments.run_dir / "writes")
    else:
        found = measure_every_iteration(Training(task.mixture, seed=0), task.pairs, task.experts_per_layer)
    if torch.distributed.get_rank() == 0:
        (arguments.results / "0.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


if __name__ == "__main__":
    main()
