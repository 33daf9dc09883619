"""`cpsr bench cadence`: what snapshots to host memory cost a step, and what a kill of all processes then loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.cadence.lost import CHECKPOINT_ITERATIONS, Loss, kill_and_restart
from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring, verdict
from cpsr.benchmarks.harness.ranks import RANKS, run_ranks
from cpsr.benchmarks.overhead.blocks import Pair, VariantResult, summarise

__all__ = ["INTERVALS", "Size", "main"]

AIM = 0.02  # of a step
INTERVALS = (1, 5)  # iterations between snapshots
JOBS = {"torch, one process": True, f"DeepSpeed ZeRO-1, {RANKS} ranks": False}
PERCENT, MEGABYTE, MILLISECOND = 100.0, 1e6, 1e-3


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        runs: jobs started anew, of each kind.
        pairs: of blocks in a run, an even number.
        kills: of jobs, for each interval.
    """

    runs: int = 3
    pairs: int = 20
    kills: int = 8


def main(json_path: Path | None = None, size: Size | None = None, workdir: Path | None = None) -> None:
    """Measure, print the tables, and write the JSON file.

    Raises:
        CPSRError: a job failed.
    """
    size = Size() if size is None else size
    found: dict[str, list[dict[str, Any]]] = {}
    losses: list[Loss] = []
    with measuring("cadence", json_path, workdir) as call:
        step = call.bar("jobs", size.runs * len(JOBS) * len(INTERVALS) + size.kills * (len(INTERVALS) + 1))
        for number in range(size.runs):
            for job, alone in JOBS.items():
                for interval in INTERVALS:
                    found.setdefault(_name(job, interval), []).append(
                        _measured(call.directory / f"turns-{number}-{interval}-{alone}", size, interval, alone)
                    )
                    step()
        for number in range(size.kills):
            for one in (*INTERVALS, None):
                directory = call.directory / f"kill-{number}-{one}"
                directory.mkdir()
                losses.append(kill_and_restart(directory, one, number))
                step()
        results = [
            summarise(name, [[Pair(**pair) for pair in run["pairs"]] for run in runs], aim=AIM)
            for name, runs in found.items()
        ]
        _show(call, results, found, losses)
        aims = {"lost at most the interval, exactly": _kept(losses)}
        figures = {
            "size": vars(size),
            "checkpoint_iterations": CHECKPOINT_ITERATIONS,
            "jobs": [
                result.to_json()
                | {
                    key: [run[key] for run in found[result.variant]]
                    for key in ("stall_seconds", "state_bytes", "skipped")
                }
                for result in results
            ],
            "kills": [loss.to_json() for loss in losses],
            "aims": aims,
        }
        call.judge(aims)
        call.leave(figures)


def _measured(directory: Path, size: Size, interval_iterations: int, alone: bool) -> dict[str, Any]:
    directory.mkdir()
    ranks = 1 if alone else RANKS
    options: dict[str, Any] = {"pairs": size.pairs, "interval_iterations": interval_iterations, "alone": alone}
    measured: dict[str, Any] = run_ranks("cadence.turns", directory, ranks, **options)[0]
    return measured


def _name(job: str, interval_iterations: int) -> str:
    every = "every iteration" if interval_iterations == 1 else f"every {interval_iterations} iterations"
    return f"{job}, {every}"


def _kept(losses: Sequence[Loss]) -> bool:
    """Whether each kill lost its interval at most, and came back bit for bit."""
    with_snapshots = [loss for loss in losses if loss.interval_iterations is not None]
    return all(loss.exact and loss.lost_iterations <= (loss.interval_iterations or 0) for loss in with_snapshots)


def _show(
    call: Measurement,
    results: Sequence[VariantResult],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    losses: Sequence[Loss],
) -> None:
    rows = []
    for result in results:
        runs = found[result.variant]
        rows.append(
            (
                result.variant,
                f"{runs[0]['state_bytes'] / MEGABYTE:.1f}",
                f"{result.step_seconds / MILLISECOND:.1f}",
                interval_text(result.overhead, PERCENT),
                " ".join(f"{run['stall_seconds'] / MILLISECOND:.2f}" for run in runs),
                str(sum(run["skipped"] for run in runs)),
                f"{verdict(result.met)}  below {result.aim:.0%}",
            )
        )
    headings = ("job", "state of a rank, MB", "step, ms", "overhead, % of a step", "stall, ms", "skipped", "aim")
    call.table("A step with snapshots to host memory, beside one without", headings, rows)
    kills = []
    for interval in (*INTERVALS, None):
        own = [loss for loss in losses if loss.interval_iterations == interval]
        kills.append(
            (
                "none between checkpoints" if interval is None else f"every {interval}",
                str(len(own)),
                " ".join(str(loss.lost_iterations) for loss in own),
                ", ".join(sorted({loss.tier for loss in own})),
                f"{sum(loss.exact for loss in own)} of {len(own)}",
            )
        )
    of_kills = ("snapshots", "kills", "iterations lost", "from", "bit for bit")
    call.table(f"All processes killed; a checkpoint every {CHECKPOINT_ITERATIONS}", of_kills, kills)
