"""`cpsr bench plan --real`: what failures and checkpoints cost the demo's job, beside what its plans predicted."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rich.progress import Progress

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.plan.failing_job import follow
from cpsr.benchmarks.plan.forecast import median_iteration_seconds
from cpsr.benchmarks.plan.injection import Injection, Mode, failing_job, fault_free_job
from cpsr.benchmarks.plan.judgement import JobResult, judge
from cpsr.benchmarks.plan.real_report import draw, report, tables
from cpsr.tables import print_table

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-plan-real")
SEEDS = 3
FAULT_FREE = "fault-free"


def main(
    json_path: Path | None = None, seeds: int = SEEDS, cache: Path = CACHE, injection: Injection | None = None
) -> None:
    """Run the jobs, or go on where an earlier call was interrupted; print the tables, write the figures and the plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
        seeds: trainings, each without a failure, and with failures in both modes.
        cache: keeps the runs.
        injection: lengths of the jobs; by default those that the aim is for.

    Raises:
        CPSRError: a job ended by itself, or failed otherwise than it was made to.
    """
    lengths = injection or Injection()
    cache.mkdir(parents=True, exist_ok=True)
    with measuring("plan, real", json_path, place=cache) as call:
        results = [result for seed in range(seeds) for result in _run_seed(lengths, seed, cache, call.progress)]
        for table in tables(results):
            print_table(call.console, table)
        call.leave(report(results, lengths), draw(results))


def _run_seed(injection: Injection, seed: int, cache: Path, progress: Progress) -> list[JobResult]:
    directory = cache / f"mtbf-{injection.mtbf_iterations}" / f"seed-{seed}"
    fault_free = directory / FAULT_FREE
    job = fault_free_job(injection, seed)
    follow(job, fault_free, _shown(progress, f"seed {seed}, no failure", job.stop_iteration))
    seconds = median_iteration_seconds(fault_free)
    results = []
    for mode in get_args(Mode):
        job = failing_job(injection, seed, mode, seconds)
        record = follow(job, directory / mode, _shown(progress, f"seed {seed}, {mode}", job.stop_iteration))
        results.append(judge(injection, seed, mode, record, directory / mode, fault_free))
    return results


def _shown(progress: Progress, title: str, iterations: int) -> Callable[[int], None]:
    bar = progress.add_task(title, total=iterations)
    return lambda iteration: progress.update(bar, completed=iteration)
