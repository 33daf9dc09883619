"""The training runs that the prior is fitted on; none of them is one that is reported on."""

from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.recovery.jobs import Run
from cpsr.benchmarks.recovery.schedule import Schedule
from cpsr.benchmarks.recovery.workload import ITERATIONS, RATE_STEP, TASKS, Workload

__all__ = ["RUNS", "PriorRun"]


@dataclass(frozen=True)
class PriorRun:
    """A workload and the seed of its one run; seeds from 100 on are drawn nowhere else."""

    workload: Workload
    seed: int

    def in_cache(self, cache: Path) -> Run:
        """The run as it is trained, kept there."""
        return Run(self.workload, self.seed, cache)


# Best peak rates of the small GPT and the digits net, as `cpsr bench tune` found them, and how far the runs go from
# them, in steps of 1.4: most jobs are tuned roughly, and rather below the best rate than above.
BEST: dict[tuple[str, Schedule], float] = {
    ("gpt-0.1M", "cosine"): 2.7e-3,
    ("gpt-0.1M", "cosine10"): 2.7e-3,
    ("gpt-0.1M", "wsd"): 2.7e-3,
}
STEPS = (-4, -2, 0, 1)


def _runs() -> tuple[PriorRun, ...]:
    workloads = [
        Workload(f"prior-{task}-{schedule}{step:+d}", TASKS[task], schedule, best * RATE_STEP**step, ITERATIONS)
        for (task, schedule), best in BEST.items()
        for step in STEPS
    ]
    return tuple(PriorRun(workload, 100 + place) for place, workload in enumerate(workloads))


RUNS: tuple[PriorRun, ...] = _runs()
