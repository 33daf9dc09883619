"""`cpsr bench overhead`: what the wrapper costs steps without a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.benchmarks.harness.ranks import RANKS, run_ranks
from cpsr.benchmarks.overhead import jobs
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, Pair, summarise
from cpsr.demo.device import CPU

__all__ = ["DEFAULT", "FULL", "Size", "main"]

AIM = 0.01  # of a step, for the upper end of the interval
JOBS = {"torch, one process": 1, f"DeepSpeed ZeRO-1, {RANKS} ranks": RANKS}


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        runs: jobs started anew, of each kind: what differs from start to start must show.
        pairs: blocks with and without the wrapper in a run, an even number.
    """

    runs: int
    pairs: int


DEFAULT, FULL = Size(runs=2, pairs=40), Size(runs=4, pairs=120)


def main(json_path: Path | None = None, size: Size = DEFAULT, workdir: Path | None = None, device: str = CPU) -> None:
    """Measure, print the table, and write the JSON file.

    Raises:
        CPSRError: a job failed.
    """
    pairs: dict[str, list[list[Pair]]] = {job: [] for job in JOBS}
    with measuring("overhead", json_path, workdir, device=device) as call:
        step = call.bar("runs", size.runs * len(JOBS))
        for number in range(size.runs):
            for job, ranks in JOBS.items():
                directory = call.directory / f"{ranks}-{number}"
                directory.mkdir()
                if ranks == 1:
                    found = jobs.main(directory / "run", size.pairs, device, alone=True)
                else:
                    (found,) = run_ranks("overhead.jobs", directory, device=device, pairs=size.pairs, kind=device)
                pairs[job].append([Pair(**pair) for pair in found or ()])
                step()
        results = [summarise(job, runs, AIM) for job, runs in pairs.items()]
        rows = [
            (
                result.variant,
                f"{result.step_seconds * 1000:.1f}",
                interval_text(result.steps_overhead, 100.0),
                "-" if result.snapshot_seconds is None else interval_text(result.snapshot_seconds, 1000.0),
                str(result.interval_iterations or "-"),
                interval_text(result.overhead, 100.0),
                f"{verdict(result.met)}  below {result.aim:.0%}",
            )
            for result in results
        ]
        headings = (
            "job",
            "step, ms",
            "steps without a snapshot, %",
            "a snapshot, ms",
            "every",
            "overhead, % of a step",
            "aim",
        )
        call.table("Overhead on a training step", headings, rows)
        call.console.print(
            f"Blocks of {BLOCK_STEPS} steps without a checkpoint; with CPSR, without, without, with. Medians with 95% "
            f"bootstrap intervals. The overhead is that of steps and of snapshots as planned. Torch threads: "
            f"{call.machine['torch_threads']}."
        )
        figures = {"size": vars(size), "block_steps": BLOCK_STEPS, "results": [result.to_json() for result in results]}
        call.leave(figures)
