"""`cpsr bench experts`: sparse snapshots by every policy of the papers, and what failures then cost."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.experts.parts import Samples, measure_failures, measure_stalls, measure_writes
from cpsr.benchmarks.experts.plot import draw
from cpsr.benchmarks.experts.report import show
from cpsr.benchmarks.experts.size import QUICK, Size, require_known
from cpsr.benchmarks.harness.measurement import measuring

__all__ = ["CACHE", "PARTS", "main"]

CACHE = Path("runs/bench-experts")
PARTS = ("arithmetic", "stall", "writes", "failures")


def main(
    json_path: Path | None = None,
    size: Size = QUICK,
    parts: Collection[str] = PARTS,
    workers: int = 2,
    workdir: Path | None = None,
    cache: Path = CACHE,
) -> None:
    """Measure, print the tables, and write the JSON file with its plots.

    Args:
        json_path: where the figures go; the plots are put beside it.
        size: how much is measured.
        parts: some of `PARTS`. arithmetic: bytes and scheduling; stall: a snapshot after every iteration; writes:
            checkpoints that ranks share out; failures: four in one run.
        workers: jobs of one rank that run beside each other; what is timed runs alone.
        workdir: holds the jobs' directories; by default a temporary one.
        cache: keeps what jobs with failures found.

    Raises:
        ConfigError: a part is not known.
        CPSRError: a job failed.
    """
    require_known("--parts", parts, PARTS)
    samples = Samples()
    with measuring("experts", json_path, workdir) as call:
        if "stall" in parts:
            measure_stalls(samples, call, size)
        if "writes" in parts:
            measure_writes(samples, call, size)
        if "failures" in parts:
            measure_failures(samples, call, size, workers, cache)
        result = samples.result("arithmetic" in parts)
        show(call.console, call.machine, result)
        figures = {"size": size.to_json(), "aims": result.aims(), "result": asdict(result)}
        call.leave(figures, draw(result, samples.costs, call.machine))
