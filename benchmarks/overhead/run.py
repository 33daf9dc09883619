"""`cpsr bench overhead`: what the wrapper and the predictor cost while a job trains."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import progress_bar, save, save_beside, warnings_only, work_directory
from cpsr.benchmarks.overhead import torch_job
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, Pair
from cpsr.benchmarks.overhead.bubbles import BubbleResult, summarise_bubbles
from cpsr.benchmarks.overhead.interval import IntervalSample
from cpsr.benchmarks.overhead.launch import RANKS, launch
from cpsr.benchmarks.overhead.memory import MemoryResult, MemoryRun, summarise_memory
from cpsr.benchmarks.overhead.plot import draw, draw_bubbles, draw_memory
from cpsr.benchmarks.overhead.report import show
from cpsr.benchmarks.overhead.result import COORDINATOR_AIM, OVERHEAD_AIM, VariantResult, summarise
from cpsr.benchmarks.overhead.timeline import MODEL, bound_bytes, record_life
from cpsr.benchmarks.own_process import in_own_process
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["DEFAULT", "FULL", "PARTS", "Size", "main"]

PARTS = ("wrapper", "bubbles", "memory")
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


DEFAULT = Size(runs=2, pairs=20, warm_up=10, intervals=10, interval_pairs=14, timeline_iterations=120)
FULL = Size(runs=4, pairs=30, warm_up=10, intervals=30, interval_pairs=30, timeline_iterations=320)


@dataclass
class _Samples:
    """What was measured: of each variant, of each run; intervals by stage; memory over time."""

    pairs: dict[str, list[list[Pair]]] = field(default_factory=dict)
    stages: list[list[list[IntervalSample]]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    memory_runs: list[MemoryRun] = field(default_factory=list)

    def variants(self) -> list[VariantResult]:
        results = []
        for variant, runs in self.pairs.items():
            coordinated = variant == COORDINATED
            steps, aim = (INTERVAL_ITERATIONS, COORDINATOR_AIM) if coordinated else (BLOCK_STEPS, OVERHEAD_AIM)
            results.append(summarise(variant, runs, steps, aim))
        return results

    def bubbles(self) -> BubbleResult | None:
        if not self.stages:
            return None
        return summarise_bubbles(self.stages, self.parameters, INTERVAL_ITERATIONS, MICRO_BATCHES)

    def memory(self, model: GPTConfig) -> MemoryResult | None:
        return summarise_memory(self.memory_runs, bound_bytes(model)) if self.memory_runs else None


def main(
    json_path: Path | None = None,
    size: Size = DEFAULT,
    parts: Collection[str] = PARTS,
    workdir: Path | None = None,
) -> None:
    """Measure, print the tables, and write the JSON file with its plots.

    Args:
        json_path: where the figures go; the plots are put beside it.
        size: how much is measured.
        parts: some of `PARTS`. wrapper: steps without a checkpoint; bubbles: the stages of a pipeline, and their step
            time; memory: over a run.
        workdir: holds the runs' directories; by default a temporary one.

    Raises:
        ConfigError: a part is not known.
        CPSRError: a job failed.
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts:
        raise ConfigError(f"--parts {', '.join(unknown) or 'is empty'}: there are {', '.join(PARTS)}")
    console, samples = Console(), _Samples()
    with work_directory(workdir) as directory, warnings_only(console), progress_bar(console) as progress:
        machine = describe_machine(directory)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        task = progress.add_task("runs", total=size.runs * len(parts))
        for number in range(size.runs):
            for part in PARTS:
                if part in parts:
                    run_directory = directory / f"{part}-{number}"
                    run_directory.mkdir()
                    _MEASURE[part](samples, run_directory, size)
                    progress.advance(task)
    variants, bubbles, memory = samples.variants(), samples.bubbles(), samples.memory(size.timeline_model)
    show(console, machine, variants, bubbles, memory)
    if json_path is not None:
        report = {
            "benchmark": "overhead",
            "machine": machine,
            "size": asdict(size),
            "block_steps": BLOCK_STEPS,
            "results": [result.to_json() for result in variants],
            "bubbles": bubbles and bubbles.to_json(),
            "memory": memory and memory.to_json(),
            "samples": asdict(samples),
        }
        (_, first), *others = _figures(samples, variants, bubbles, machine).items()
        plots = [save(json_path, report, first), *(save_beside(json_path, name, figure) for name, figure in others)]
        console.print(f"figures: {json_path}   plots: {', '.join(map(str, plots))}")


def _measure_wrapper(samples: _Samples, directory: Path, size: Size) -> None:
    alone, together = directory / "alone", directory / "together"
    alone.mkdir()
    together.mkdir()
    of_one, of_ranks = WRAPPED
    samples.pairs.setdefault(of_one, []).append(torch_job.run(alone, size.pairs))
    found = launch(together, "overhead.deepspeed_job", pairs=size.pairs)
    samples.pairs.setdefault(of_ranks, []).append([Pair(**pair) for pair in found[0]])


def _measure_bubbles(samples: _Samples, directory: Path, size: Size) -> None:
    stages = launch(
        directory,
        "overhead.pipeline_job",
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


def _measure_memory(samples: _Samples, directory: Path, size: Size) -> None:
    iterations, model = size.timeline_iterations, size.timeline_model
    lives = []
    for name, predicts in (("with", True), ("without", False)):
        lives += [
            in_own_process(record_life, directory / name, predicts, iterations, True, model),
            in_own_process(record_life, directory / name, predicts, iterations // RESTARTED_SHARE, False, model),
        ]
    samples.memory_runs.append(MemoryRun(*lives))


_MEASURE = {"wrapper": _measure_wrapper, "bubbles": _measure_bubbles, "memory": _measure_memory}


def _figures(
    samples: _Samples, variants: list[VariantResult], bubbles: BubbleResult | None, machine: dict[str, Any]
) -> dict[str, Figure]:
    """Figures by name: the first is the JSON file's own plot, the others lie beside it."""
    figures = {}
    if variants:
        figures["steps"] = draw(variants, machine)
    if bubbles is not None:
        figures["bubbles"] = draw_bubbles(bubbles, machine)
    if samples.memory_runs:
        figures["memory"] = draw_memory(samples.memory_runs[-1], machine)
    return figures
