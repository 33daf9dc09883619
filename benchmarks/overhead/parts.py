"""The parts of the overhead benchmark: what each measures in one run, and their samples."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.harness.ranks import RANKS, run_ranks
from cpsr.benchmarks.overhead import torch_job
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, Pair
from cpsr.benchmarks.overhead.bubbles import BubbleResult, summarise_bubbles
from cpsr.benchmarks.overhead.interval import IntervalSample
from cpsr.benchmarks.overhead.memory import MemoryResult, MemoryRun, summarise_memory
from cpsr.benchmarks.overhead.result import COORDINATOR_AIM, OVERHEAD_AIM, VariantResult, summarise
from cpsr.benchmarks.overhead.timeline import MODEL, bound_bytes, record_life
from cpsr.demo.device import CUDA, backend_of
from cpsr.demo.model import GPTConfig

__all__ = ["DEFAULT", "FULL", "PARTS", "Samples", "Size", "obstacles"]

INTERVAL_ITERATIONS = 33  # of CPSR, table III, for its smallest GPT
MICRO_BATCHES = RANKS  # of an iteration of the pipeline
RESTARTED_SHARE = 4  # a restarted life trains so many times shorter
WRAPPED = ("torch, one process", f"DeepSpeed ZeRO-1, {RANKS} ranks")
COORDINATED = f"predictor in a pipeline of {RANKS} stages"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        runs: jobs started anew, of each part: what differs from start to start must show.
        pairs: blocks with and without the wrapper in a run, an even number.
        warm_up: checkpoint intervals of a pipeline before anything is measured; from eight on the predictor's network
            trains.
        intervals: whose bubbles are measured, in a run.
        interval_pairs: intervals with and without the predictor's work in a run, an even number.
        timeline_iterations: of the life that fails, in a run whose memory is recorded.
        timeline_model: shape of its model.
    """

    runs: int
    pairs: int
    warm_up: int
    intervals: int
    interval_pairs: int
    timeline_iterations: int
    timeline_model: GPTConfig = MODEL


DEFAULT = Size(runs=2, pairs=40, warm_up=10, intervals=10, interval_pairs=14, timeline_iterations=120)
FULL = Size(runs=4, pairs=120, warm_up=10, intervals=30, interval_pairs=30, timeline_iterations=320)


@dataclass
class Samples:
    """What was measured: of each variant, of each run; intervals by stage; memory over time."""

    pairs: dict[str, list[list[Pair]]] = field(default_factory=dict)
    stages: list[list[list[IntervalSample]]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    memory_runs: list[MemoryRun] = field(default_factory=list)

    def variants(self) -> list[VariantResult]:
        """Steps with and without, of each variant."""
        results = []
        for variant, runs in self.pairs.items():
            coordinated = variant == COORDINATED
            steps, aim = (INTERVAL_ITERATIONS, COORDINATOR_AIM) if coordinated else (BLOCK_STEPS, OVERHEAD_AIM)
            results.append(summarise(variant, runs, steps, aim))
        return results

    def bubbles(self) -> BubbleResult | None:
        """Of the pipeline, where it was measured."""
        if not self.stages:
            return None
        return summarise_bubbles(self.stages, self.parameters, INTERVAL_ITERATIONS, MICRO_BATCHES)

    def memory(self, model: GPTConfig) -> MemoryResult | None:
        """Over a run, where it was measured."""
        return summarise_memory(self.memory_runs, bound_bytes(model)) if self.memory_runs else None


def _measure_wrapper(samples: Samples, directory: Path, size: Size, device: str) -> None:
    alone, together = directory / "alone", directory / "together"
    alone.mkdir()
    together.mkdir()
    of_one, of_ranks = WRAPPED
    samples.pairs.setdefault(of_one, []).append(torch_job.run(alone, size.pairs, device))
    found = run_ranks("overhead.deepspeed_job", together, device=device, pairs=size.pairs)
    samples.pairs.setdefault(of_ranks, []).append([Pair(**pair) for pair in found[0]])


def _measure_bubbles(samples: Samples, directory: Path, size: Size, device: str) -> None:
    stages = run_ranks(
        "overhead.pipeline_job",
        directory,
        device=device,
        interval_iterations=INTERVAL_ITERATIONS,
        micro_batches=MICRO_BATCHES,
        warm_up=size.warm_up,
        intervals=size.intervals,
        pairs=size.interval_pairs,
    )
    # All stages wait for each other at the end of a step: their times are one another's.
    samples.pairs.setdefault(COORDINATED, []).append([Pair(**pair) for pair in stages[0]["pairs"]])
    samples.stages.append([[IntervalSample(**interval) for interval in stage["intervals"]] for stage in stages])
    samples.parameters = [stage["parameters"] for stage in stages]


def _measure_memory(samples: Samples, directory: Path, size: Size, device: str) -> None:
    whole, model = size.timeline_iterations, size.timeline_model
    lives = []
    for name, predicts in (("with", True), ("without", False)):
        for iterations, fails in ((whole, True), (whole // RESTARTED_SHARE, False)):
            run_dir = directory / name
            lives.append(in_own_process(record_life, run_dir, predicts, iterations, fails, model, device))
    samples.memory_runs.append(MemoryRun(*lives))


PARTS = {"wrapper": _measure_wrapper, "bubbles": _measure_bubbles, "memory": _measure_memory}
"""Name -> measures one run: `(samples, directory, size, device)`."""


def obstacles(parts: Collection[str], device: str, gpus: int) -> dict[str, str]:
    """Of those parts, the ones that cannot run on a device of which there are so many GPUs, and why."""
    if "bubbles" in parts and device == CUDA and backend_of(RANKS, gpus) != "nccl":
        why = f"a pipeline of {RANKS} stages needs as many GPUs, and there are {gpus}: gloo sends no CUDA tensors"
        return {"bubbles": why}
    return {}
