"""One run of a job: to its end, alone or under a schedule of failures."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from cpsr.benchmarks.drill.cluster import Cluster
from cpsr.benchmarks.drill.job import Job
from cpsr.benchmarks.drill.peers import Peer
from cpsr.benchmarks.drill.records import Records, Recovery, recovery
from cpsr.benchmarks.drill.schedule import Failure, Kind
from cpsr.errors import CPSRError

__all__ = ["Happened", "Run", "drive"]

POLL_SECONDS = 0.1
MEMORY_SECONDS = 1.0  # between two looks at the memory
STANDS_STILL_SECONDS = 180.0  # then an operator starts the job again by hand
LOG_LINES = 30


@dataclass(frozen=True)
class Happened:
    """A failure that happened.

    Attributes:
        kind: what failed.
        at_seconds: after the first step.
        step_seconds: until a step that began after it was complete; None: never.
        lost_iterations: steps that were trained again; None: as above.
    """

    kind: Kind
    at_seconds: float
    step_seconds: float | None
    lost_iterations: int | None


@dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
        complete: whether the job came to its end.
        seconds: from its first step to its last.
        trained: steps of the job that count, each by the share of its batch that was trained.
        step_seconds: durations of rank 0's steps in its first life.
        failures: in the order of time.
        by_hand: times that an operator had to start the job again.
        memory_bytes: peak on the machines that train.
        weights: digests of the last weights, by rank.
        notes: of the program.
    """

    complete: bool
    seconds: float
    trained: float
    step_seconds: list[float]
    failures: list[Happened]
    by_hand: int
    memory_bytes: int
    weights: list[str]
    notes: list[str]

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Self:
        """From what `asdict` made of it."""
        failures = [Happened(**one | {"kind": Kind(one["kind"])}) for one in plain["failures"]]
        return cls(**{**plain, "failures": failures})


def drive(
    peer: Peer, job: Job, failures: Sequence[Failure] = (), limit_seconds: float = 3600.0, keep: Path | None = None
) -> Run:
    """Train a job to its end.

    Args:
        peer: its way to come back.
        job: whose directory is emptied first.
        failures: in the order of time; one that is due while the job stands still waits until it trains again.
        limit_seconds: after which the run is given up.
        keep: where to copy the logs.

    Raises:
        CPSRError: without failures, the job did not come to its end; the message has the last lines of its logs.
    """
    shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.mkdir(parents=True)
    job.write()
    with Cluster(peer, job) as cluster:
        run = _Driven(cluster, job, list(failures)).to_end(limit_seconds)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for path in job.directory.glob("machine-*.log"):
            shutil.copy(path, keep / path.name)
    if not failures and not run.complete:
        raise CPSRError(f"{peer.name} did not train to the end without a failure\n{_tail(job.directory)}")
    return run


class _Driven:
    """A run under way."""

    def __init__(self, cluster: Cluster, job: Job, due: list[Failure]) -> None:
        self._cluster, self._job, self._due = cluster, job, due
        self._records = Records(job.directory)
        self._failed: list[tuple[Failure, float]] = []
        self._by_hand, self._peak_bytes, self._looked = 0, 0, 0.0
        self._stirred = time.time()

    def to_end(self, limit_seconds: float) -> Run:
        end = time.time() + limit_seconds
        while not self._cluster.complete and time.time() < end:
            time.sleep(POLL_SECONDS)
            self._records.refresh()
            self._cluster.tend()
            self._look_at_memory()
            self._help()
            self._fail()
        self._records.refresh()
        return self._run()

    @property
    def _is_back(self) -> bool:
        return not self._failed or self._recovery(*self._failed[-1]) is not None

    def _recovery(self, failure: Failure, failed: float) -> Recovery | None:
        return recovery(self._records, failed, all_leave=failure.kind is Kind.SIGTERM)

    def _fail(self) -> None:
        if not self._due or time.time() - self._records.first_step_seconds < self._due[0].seconds or not self._is_back:
            return
        failed = self._cluster.fail(self._due[0], self._records)
        if failed is not None:
            self._failed.append((self._due.pop(0), failed))

    def _help(self) -> None:
        """Start a job again that stands still."""
        if time.time() - max(self._stirred, self._records.last_step_seconds) > STANDS_STILL_SECONDS:
            self._cluster.restart_by_hand()
            self._by_hand += 1
            self._stirred = time.time()

    def _look_at_memory(self) -> None:
        if time.time() - self._looked > MEMORY_SECONDS:
            self._peak_bytes = max(self._peak_bytes, self._cluster.host_memory_bytes())
            self._looked = time.time()

    def _run(self) -> Run:
        steps = self._records.steps
        shares: dict[int, float] = {}
        for line in steps:  # of a step that was trained twice, the last time counts
            shares[line.step] = float(str(line.words[2]))
        zero = [line for line in steps if line.rank == 0]
        first = [line.unix_seconds for line in zero if line.pid == zero[0].pid]
        found = [(failure, failed, self._recovery(failure, failed)) for failure, failed in self._failed]
        return Run(
            complete=self._cluster.complete,
            seconds=self._records.last_step_seconds - self._records.first_step_seconds if steps else 0.0,
            trained=sum(shares.values()),
            step_seconds=[later - earlier for earlier, later in pairwise(first)],
            failures=[
                Happened(
                    failure.kind,
                    failed - self._records.first_step_seconds,
                    None if back is None else back.step_seconds,
                    None if back is None else back.lost_iterations,
                )
                for failure, failed, back in found
            ],
            by_hand=self._by_hand,
            memory_bytes=self._peak_bytes,
            weights=self._records.weights,
            notes=sorted({str(line.words[0]) for line in self._records.lines if line.what == "note"}),
        )


def _tail(directory: Path) -> str:
    lines = []
    for path in sorted(directory.glob("machine-*.log")):
        lines += [f"{path.name}:", *path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]]
    return "\n".join(lines)
