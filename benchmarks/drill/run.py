"""`cpsr bench drill`: runs every way to come back, keeps each run that is complete, and prints the table."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cpsr.benchmarks.drill.drive import Run, drive
from cpsr.benchmarks.drill.job import Job
from cpsr.benchmarks.drill.peers import PEERS, PLAIN, Peer
from cpsr.benchmarks.drill.schedule import draw_schedule
from cpsr.benchmarks.drill.table import Row, rows_of, show
from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.demo.machines import obstacle
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError, CPSRError

__all__ = ["MTBF_SECONDS", "Size", "main", "selected"]

MTBF_SECONDS = 120.0
BATCH = 8  # windows of a step, over all ranks
HANG_SECONDS = 30.0
CALIBRATED_STEPS, CALIBRATED_INTERVAL, WARM_STEPS = 90, 10, 10  # short runs that time a save
STALL_SECONDS_MIN = 0.001
LIMIT_FACTOR = 8.0  # a run that takes so many times as long as the job alone is given up
RUNS_ALONE = 2  # of the job without checkpoints, before all others and after them: their spread is the noise


MODEL = GPTConfig(layers=6, heads=4, width=256, context=64)  # 4.8 million parameters


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        jobs: shardings, each with its number of ranks and its steps.
        schedules: of failures.
        model: that is trained.
    """

    jobs: tuple[tuple[str, int, int], ...] = (("ddp", 2, 940), ("fsdp2", 4, 340))  # 140 s each on two cores
    schedules: int = 3
    model: GPTConfig = MODEL


def main(
    json_path: Path | None = None,
    cache: Path | None = None,
    size: Size = Size(),
    peers: Sequence[Peer] = PEERS,
    workdir: Path | None = None,
) -> None:
    """Measure, print a table for each job, and write the JSON file.

    Args:
        json_path: for the figures.
        cache: where each complete run is kept; a call goes on after the last one.
        size: how much.
        peers: which; those that are not installed are left out, and named.
        workdir: holds the directory that the machines share.

    Raises:
        CPSRError: machines cannot be made here, or a job without failures did not come to its end.
    """
    if (why := obstacle()) is not None:
        raise CPSRError(f"the drill makes two machines of kernel namespaces, which it cannot here: {why}")
    kept, measured = _Kept(cache or Path("runs/bench-drill")), dict[str, list[Row]]()
    with measuring("drill", json_path, workdir) as call:
        present = [peer for peer in peers if peer.installed]
        absent = [peer.name for peer in peers if not peer.installed]
        for sharding, ranks, steps in size.jobs:
            here = [peer for peer in present if sharding in peer.jobs]
            job = Job(call.directory / "job", ranks, sharding, steps, BATCH, size.model, 0, HANG_SECONDS, MTBF_SECONDS)
            rows = _measure(call, kept, job, here, size.schedules)
            show(call, f"{sharding}, {ranks} ranks", rows, [one for one in present if one not in here], sharding)
            measured[f"{sharding}-{ranks}"] = rows
        if absent:
            call.console.print(f"Not installed, and left out: {', '.join(absent)}. Install the extra `bench`.")
        call.leave(
            {
                "mtbf_seconds": MTBF_SECONDS,
                "hang_seconds": HANG_SECONDS,
                "steps": {f"{sharding}-{ranks}": steps for sharding, ranks, steps in size.jobs},
                "model": asdict(size.model),
                "peers": [
                    {"name": one.name, "version": one.version, "settings": one.settings, "source": one.source}
                    for one in present
                ],
                "left_out": absent,
                "jobs": {name: [asdict(row) for row in rows] for name, rows in measured.items()},
            }
        )


def selected(jobs: str, only: str) -> tuple[Size, list[Peer]]:
    """What a command names.

    Raises:
        ConfigError: there is no such job or peer.
    """
    known = {job[0]: job for job in Size().jobs}
    if unknown := set(jobs.split(",")) - known.keys():
        raise ConfigError(f"there is no job {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    names = tuple(filter(None, only.split(",")))
    peers = [peer for peer in PEERS if not names or peer.name.startswith(names)]
    if not peers:
        raise ConfigError(f"no name begins with {only}; there are {', '.join(peer.name for peer in PEERS)}")
    return replace(Size(), jobs=tuple(known[name] for name in jobs.split(","))), peers


class _Kept:
    """Complete runs, each in a file that is named by its job: a job of another size is another run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, peer: Peer, job: Job, what: str, **more: Any) -> Run:
        """A run that is kept, or is made now."""
        path = self._path(peer, job, what)
        if not path.exists():
            self._keep(path, asdict(drive(peer, job, keep=path.with_suffix(""), **more)))
        return Run.of_json(json.loads(path.read_text(encoding="utf-8")))

    def interval(self, peer: Peer, job: Job, measured: Callable[[], int]) -> int:
        """The interval of a peer's saves: once it was measured, runs of the job alone do not change it."""
        path = self._path(peer, job, "interval")
        if not path.exists():
            self._keep(path, measured())
        return int(json.loads(path.read_text(encoding="utf-8")))

    def _path(self, peer: Peer, job: Job, what: str) -> Path:
        name = f"{job.sharding}-{job.ranks}-{job.steps}-{job.interval_iterations}-{peer.name}-{what}"
        return self._folder / ("".join(letter if letter.isalnum() else "-" for letter in name) + ".json")

    @staticmethod
    def _keep(path: Path, content: Any) -> None:
        path.with_suffix(".part").write_text(json.dumps(content, indent=1), encoding="utf-8")
        path.with_suffix(".part").replace(path)


def _measure(call: Measurement, kept: _Kept, job: Job, peers: Sequence[Peer], schedules: int) -> list[Row]:
    """All runs of one job, schedule by schedule, so that an interrupted call has something of each peer."""
    step = call.bar(f"{job.sharding}, {job.ranks} ranks", RUNS_ALONE + len(peers) * (1 + schedules))

    def run(peer: Peer, what: str, of: Job, **more: Any) -> Run:
        found = kept.run(peer, of, what, **more)
        step()
        return found

    first = run(PLAIN, "alone-0", job)
    steady = first.seconds / (job.steps - 1)
    jobs = {peer.name: _with_interval(kept, job, peer, steady) for peer in peers}
    undisturbed = {peer.name: run(peer, "undisturbed", jobs[peer.name]) for peer in peers}
    failed: dict[str, list[Run]] = {peer.name: [] for peer in peers}
    for number in range(schedules):
        limit = LIMIT_FACTOR * steady * job.steps
        schedule = draw_schedule(number, job.ranks, MTBF_SECONDS)
        for peer in peers:
            more: dict[str, Any] = {"failures": schedule, "limit_seconds": limit}
            failed[peer.name].append(run(peer, f"schedule-{number}", jobs[peer.name], **more))
    alone = [first, *(run(PLAIN, f"alone-{number}", job) for number in range(1, RUNS_ALONE))]
    return rows_of(peers, jobs, alone, undisturbed, failed)


def _with_interval(kept: _Kept, job: Job, peer: Peer, steady_seconds: float) -> Job:
    """The job at Young's interval for this peer's saves, where the peer leaves it to the script.

    A save's cost is what it adds to the steps until the next one, its work in the background included.
    """

    def measured() -> int:
        short = replace(job, steps=CALIBRATED_STEPS, interval_iterations=CALIBRATED_INTERVAL)
        extra = _seconds(kept, short, peer) - _seconds(kept, replace(short, interval_iterations=0), PLAIN)
        cost = max(extra / ((CALIBRATED_STEPS - WARM_STEPS) / CALIBRATED_INTERVAL), STALL_SECONDS_MIN)
        return max(1, round(math.sqrt(2 * cost * MTBF_SECONDS) / steady_seconds))

    return replace(job, interval_iterations=kept.interval(peer, job, measured)) if peer.chooses else job


def _seconds(kept: _Kept, job: Job, peer: Peer) -> float:
    """Time of a short run, without its first steps."""
    return sum(kept.run(peer, job, "calibration").step_seconds[WARM_STEPS:])
