"""The drill's table: a row for each way to come back."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from cpsr.benchmarks.drill.drive import Run
from cpsr.benchmarks.drill.job import Job
from cpsr.benchmarks.drill.peers import Peer
from cpsr.benchmarks.drill.schedule import Kind
from cpsr.benchmarks.harness.measurement import Measurement

__all__ = ["Row", "rows_of", "show"]

MEGABYTE = 1e6


@dataclass(frozen=True)
class Row:
    """What was found of one way to come back.

    Attributes:
        name: of the peer.
        interval_iterations: between its saves, where the script chooses; 0: it chooses by itself.
        effective: by schedule, the share of the time that training alone would have needed for what was trained.
        lost_iterations: by schedule, steps that were trained again or thrown away, for each failure.
        step_seconds: by kind of failure, each time from a failure to the end of the first step that began after it.
        overhead: without failures, time over that of the job alone, as a share of it.
        noise: the same of the job alone, between its own runs.
        memory_bytes: peak without failures, over that of the job alone.
        equal_weights: by schedule, whether the last weights are those of its run without failures, bit for bit.
        equal_to_plain: whether its run without failures ends with the weights of the job alone.
        by_hand: by schedule, times that an operator had to start the job again.
        complete: by schedule, whether the job came to its end.
        failures: by schedule, how many happened.
    """

    name: str
    interval_iterations: int
    effective: list[float]
    lost_iterations: list[float]
    step_seconds: dict[str, list[float]]
    overhead: float
    noise: float
    memory_bytes: int
    equal_weights: list[bool]
    equal_to_plain: bool
    by_hand: list[int]
    complete: list[bool]
    failures: list[int]


def rows_of(
    peers: Sequence[Peer],
    jobs: Mapping[str, Job],
    alone: Sequence[Run],
    undisturbed: Mapping[str, Run],
    failed: Mapping[str, Sequence[Run]],
) -> list[Row]:
    """A row for each peer, the largest share of effective time first."""
    rows = [_row(peer.name, jobs[peer.name], alone, undisturbed[peer.name], failed[peer.name]) for peer in peers]
    return sorted(rows, key=lambda row: -mean(row.effective))


def _row(name: str, job: Job, alone: Sequence[Run], undisturbed: Run, failed: Sequence[Run]) -> Row:
    seconds = median(run.seconds for run in alone)
    steady = seconds / (job.steps - 1)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for failure in (failure for run in failed for failure in run.failures):
        if failure.step_seconds is not None:
            by_kind[failure.kind].append(failure.step_seconds)
    return Row(
        name=name,
        interval_iterations=job.interval_iterations,
        effective=[run.trained * steady / run.seconds for run in failed],
        lost_iterations=[mean(one.lost_iterations or 0 for one in run.failures) for run in failed if run.failures],
        step_seconds=dict(by_kind),
        overhead=undisturbed.seconds / seconds - 1,
        noise=(max(run.seconds for run in alone) - min(run.seconds for run in alone)) / seconds,
        memory_bytes=undisturbed.memory_bytes - round(median(run.memory_bytes for run in alone)),
        equal_weights=[run.weights == undisturbed.weights for run in failed],
        equal_to_plain=undisturbed.weights == alone[0].weights,
        by_hand=[run.by_hand for run in failed],
        complete=[run.complete for run in failed],
        failures=[len(run.failures) for run in failed],
    )


def show(call: Measurement, title: str, rows: Sequence[Row], absent: Sequence[Peer], sharding: str) -> None:
    """Print the table of one job."""
    headings = (
        "way to come back",
        "effective\ntime, %",
        "iterations\nlost a failure",
        *(f"{kind},\ns" for kind in Kind),
        "overhead\nalone, %",
        "host memory,\nMB",
        "same\nweights",
    )
    call.table(title, headings, [_cells(row) for row in rows])
    if rows:
        call.console.print(f"Runs of the job alone differ by {rows[0].noise:.1%}.")
    for peer in absent:
        call.console.print(f"{peer.name}: {peer.absent.get(sharding, 'not set up for this job')}")


def _cells(row: Row) -> tuple[str, ...]:
    seconds = [_spread(row.step_seconds.get(kind, ()), 0) for kind in Kind]
    hand = f"\n{sum(row.by_hand)} by hand" if any(row.by_hand) else ""
    ended = "" if all(row.complete) else f"\n{row.complete.count(False)} not ended"
    return (
        row.name,
        _spread([100 * one for one in row.effective], 1) + hand + ended,
        _spread(row.lost_iterations, 1),
        *seconds,
        f"{row.overhead:.1%}",
        f"{row.memory_bytes / MEGABYTE:.0f}",
        f"{row.equal_weights.count(True)} of {len(row.equal_weights)}",
    )


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean, and the range where there is more than one."""
    if not values:
        return "-"
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text}\n({min(values):.{digits}f} to {max(values):.{digits}f})"
