"""`cpsr bench cadence`: what snapshots to host memory cost a step, and what a kill of all processes then loses."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.cadence.lost import CHECKPOINT_ITERATIONS, Loss, kill_and_restart
from cpsr.benchmarks.cadence.turns import JOBS, KINDS, RANKS_JOB
from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring, verdict
from cpsr.benchmarks.harness.ranks import RANKS, run_ranks

__all__ = ["INTERVALS", "Size", "main"]

AIM = 1.3  # times what the copies alone cost, at every iteration
EVERY = "every iteration"
INTERVALS = (1, 5)  # iterations between snapshots
MEGABYTE, MILLISECOND = 1e6, 1e-3


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        runs: jobs started anew, of each kind.
        rounds: of a run; each has every kind of block twice.
        kills: of jobs, for each interval.
    """

    runs: int = 3
    rounds: int = 20
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
            for place, job in enumerate(JOBS):
                for interval in INTERVALS:
                    found.setdefault(_name(job, interval), []).append(
                        _measured(call.directory / f"turns-{number}-{interval}-{place}", size, interval, job)
                    )
                    step()
        for number in range(size.kills):
            for one in (*INTERVALS, None):
                directory = call.directory / f"kill-{number}-{one}"
                directory.mkdir()
                losses.append(kill_and_restart(directory, one, number))
                step()
        results = [JobResult.of(name, runs) for name, runs in found.items()]
        _show(call, results, losses)
        aims = {f"{one.job}: below {AIM:g} times its copies alone": one.met for one in results if one.is_every}
        aims |= {"lost at most the interval, exactly": _kept(losses)}
        figures = {
            "size": vars(size),
            "checkpoint_iterations": CHECKPOINT_ITERATIONS,
            "jobs": [asdict(result) | {"samples": found[result.job]} for result in results],
            "kills": [loss.to_json() for loss in losses],
            "aims": aims,
        }
        call.judge(aims)
        call.leave(figures)


@dataclass(frozen=True)
class JobResult:
    """What the rounds of all runs of one job come to, for each step.

    Attributes:
        job: its name.
        step_seconds: of one without snapshots or copies.
        snapshots_seconds, copies_seconds: how much longer one with snapshots takes, or with copies alone.
        ratio: of these two.
        processor_ratio: the same of the processor time of all threads.
        stall_seconds: how long a snapshot kept the training thread, by run.
        state_bytes: of a rank.
        skipped: snapshots.
    """

    job: str
    step_seconds: float
    snapshots_seconds: Estimate
    copies_seconds: Estimate
    ratio: Estimate
    processor_ratio: Estimate
    stall_seconds: list[float]
    state_bytes: int
    skipped: int

    @staticmethod
    def of(job: str, runs: Sequence[Mapping[str, Any]]) -> "JobResult":
        """From what `cpsr.benchmarks.cadence.turns` returned."""
        wall = {kind: [one for run in runs for one in run["seconds"][kind]] for kind in KINDS}
        processor = {kind: [one for run in runs for one in run["processor_seconds"][kind]] for kind in KINDS}
        more, copies = _more(wall)
        return JobResult(
            job,
            statistics.median(wall["neither"]),
            median_interval(more),
            median_interval(copies),
            median_ratio_interval(more, copies),
            median_ratio_interval(*_more(processor)),
            [run["stall_seconds"] for run in runs],
            runs[0]["state_bytes"],
            sum(run["skipped"] for run in runs),
        )

    @property
    def is_every(self) -> bool:
        """Whether there was a snapshot at every iteration."""
        return self.job.endswith(EVERY)

    @property
    def met(self) -> bool:
        """Whether the aim is: copies that cost nothing that can be measured have no ratio."""
        return 0.0 < self.ratio.value < AIM


def _more(seconds: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float]]:
    """By round, how much longer than neither: with snapshots, and with copies alone."""
    kinds = seconds["snapshots"], seconds["copies"]
    snapshots, copies = ([one - base for one, base in zip(kind, seconds["neither"], strict=True)] for kind in kinds)
    return snapshots, copies


def _measured(directory: Path, size: Size, interval_iterations: int, job: str) -> dict[str, Any]:
    directory.mkdir()
    ranks = RANKS if job == RANKS_JOB else 1
    options: dict[str, Any] = {"rounds": size.rounds, "interval_iterations": interval_iterations, "kind": job}
    measured: dict[str, Any] = run_ranks("cadence.turns", directory, ranks, **options)[0]
    return measured


def _name(job: str, interval_iterations: int) -> str:
    every = EVERY if interval_iterations == 1 else f"every {interval_iterations} iterations"
    return f"{job}, {every}"


def _kept(losses: Sequence[Loss]) -> bool:
    """Whether each kill lost its interval at most, and came back bit for bit."""
    with_snapshots = [loss for loss in losses if loss.interval_iterations is not None]
    return all(loss.exact and loss.lost_iterations <= (loss.interval_iterations or 0) for loss in with_snapshots)


def _show(call: Measurement, results: Sequence[JobResult], losses: Sequence[Loss]) -> None:
    rows = [
        (
            one.job,
            f"{one.state_bytes / MEGABYTE:.1f}",
            f"{one.step_seconds / MILLISECOND:.1f}",
            interval_text(one.snapshots_seconds, 1 / MILLISECOND),
            interval_text(one.copies_seconds, 1 / MILLISECOND),
            interval_text(one.ratio),
            interval_text(one.processor_ratio),
            " ".join(f"{seconds / MILLISECOND:.2f}" for seconds in one.stall_seconds),
            str(one.skipped),
            f"{verdict(one.met)}  below {AIM:g}" if one.is_every else "",
        )
        for one in results
    ]
    headings = ("job", "state of a rank, MB", "step, ms", "snapshots, ms", "copies alone, ms", "ratio")
    more = ("of processor time", "training thread, ms", "skipped", "aim")
    call.table("What snapshots to host memory add to a step, and copies of the same bytes", (*headings, *more), rows)
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
