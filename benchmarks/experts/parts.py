"""The parts of the expert benchmark that run jobs, and what these measured."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from cpsr.benchmarks.experts.costs import Cost, costs
from cpsr.benchmarks.experts.result import Arithmetic, Result, compared, recovered, stalled
from cpsr.benchmarks.experts.scheduling import scheduling
from cpsr.benchmarks.experts.size import Size
from cpsr.benchmarks.experts.sizes import expert_sweep, rank_bytes, sizes
from cpsr.benchmarks.experts.skew import skew
from cpsr.benchmarks.experts.tasks import FailingTask, StallTask, Task, Way, WritesTask
from cpsr.benchmarks.experts.written import written
from cpsr.benchmarks.harness.kept import kept
from cpsr.benchmarks.harness.measurement import Measurement
from cpsr.benchmarks.harness.ranks import run_ranks

__all__ = ["Samples", "measure_failures", "measure_stalls", "measure_writes"]

WAYS: tuple[Way, ...] = ("all experts", "experts in turn")
TIMEOUT_SECONDS = 3600.0  # of a job that times stalls: minutes on a quiet machine
RUN_TIMEOUT_SECONDS = 600.0  # of each run of the others: one or two minutes there


@dataclass
class Samples:
    """What the jobs measured; of models, by label."""

    stalls: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, Any] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    skews: dict[str, float] = field(default_factory=dict)

    def result(self, with_arithmetic: bool) -> Result:
        """Figures and aims."""
        return Result(
            Arithmetic(sizes(), expert_sweep(), rank_bytes(), scheduling()) if with_arithmetic else None,
            [one for label, found in self.stalls.items() for one in stalled(label, found)],
            recovered(self.costs),
            compared(self.costs),
            [one for item in self.writes.items() for one in written(*item)],
            self.skews,
        )


def measure_stalls(samples: Samples, call: Measurement, size: Size) -> None:
    """Snapshots after every iteration."""
    step = call.bar("snapshots after every iteration", len(size.stalling) * len(WAYS))
    for mixture in size.stalling:
        for way in WAYS:
            task = StallTask(mixture=mixture, pairs=size.pairs, way=way)
            directory = call.directory / f"stall-{len(samples.stalls)}-{WAYS.index(way)}"
            samples.stalls.setdefault(mixture.label, {})[way] = _launched(directory, task, TIMEOUT_SECONDS)
            step()


def measure_writes(samples: Samples, call: Measurement, size: Size) -> None:
    """Checkpoints that ranks share out."""
    step = call.bar("checkpoints that ranks share out", len(size.writing))
    for mixture in size.writing:
        task = WritesTask(mixture=mixture, rounds=size.rounds, experts_per_layer=size.failures.experts_per_layer)
        directory = call.directory / f"writes-{len(samples.writes)}"
        samples.writes[mixture.label] = _launched(directory, task, TIMEOUT_SECONDS)
        step()


def measure_failures(samples: Samples, call: Measurement, size: Size, workers: int, cache: Path) -> None:
    """Runs with failures; those of one rank beside each other."""
    tasks = [
        FailingTask(mixture=mixture, seed=seed, failures=size.failures)
        for mixture in size.failing
        for seed in range(size.seeds)
    ]
    step = call.bar("runs with failures", len(tasks))

    def follow(place: int) -> Any:
        task = tasks[place]
        measure = partial(_follow, call.directory / f"failing-{place}", task)
        found = kept(cache, task.model_dump(mode="json"), call.machine, measure)
        step()
        return found

    alone = [place for place, task in enumerate(tasks) if task.mixture.ranks == 1]
    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(alone, pool.map(follow, alone), strict=True))
    for place, task in enumerate(tasks):
        if place not in found:  # its ranks fill the cores
            found[place] = follow(place)
        samples.costs += costs(task, found[place])
        if task.seed == 0:
            layers = [skew(layer) for layer in found[place]["tokens"]]
            samples.skews[task.mixture.label] = float(numpy.mean(layers))


def _follow(directory: Path, task: FailingTask) -> Any:
    runs = 1 + len(task.failures.policies) * len(task.failures.modes)  # the first without failures
    found = _launched(directory, task, runs * RUN_TIMEOUT_SECONDS)
    costs(task, found)  # a training that diverged is named, and not kept
    return found


def _launched(directory: Path, task: Task, timeout_seconds: float) -> Any:
    directory.mkdir()
    described = task.model_dump(mode="json")
    (found,) = run_ranks("experts.job", directory, task.mixture.ranks, timeout_seconds, task=described)
    return found
