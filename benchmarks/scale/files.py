"""What each thing costs that ranks do through files, with so many simulated ranks: time, and calls on files."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.scale.calls import calls_of, delayed_seconds, holding_locks
from cpsr.benchmarks.scale.simulated import LIFE, RANKS_PER_MACHINE, SimulatedRun, snapshot_of
from cpsr.checkpoint.tiers import Entry, decide
from cpsr.config import RanksConfig
from cpsr.journal import EventFile, EventRow, Journal
from cpsr.ranks.board import Board
from cpsr.ranks.held import Held, held_by_all
from cpsr.ranks.liveness import Liveness
from cpsr.ranks.proposals import Report, merged

__all__ = ["Cost", "file_costs"]

CHECKPOINTS = 25  # by then retention has thinned, and deletes, with the usual settings
ROUNDS = 5
FLUSH_SECONDS = 600.0
# Snapshots in each rank's memory, and a dump of all ranks but those of one machine.
IN_MEMORY, DUMPED = (500, 510, 515), 517


@dataclass(frozen=True)
class Cost:
    """What one thing costs.

    Attributes:
        seconds: on rank 0, or the rank that does it; median.
        processor_seconds: likewise; other work on the machine takes nothing from it.
        calls: of rank 0 on files of the run; None without strace, or where it makes none.
        calls_of_others: of each other rank.
        delayed_seconds: on rank 0, where each call takes 0.5 ms longer, as on a network; None as `calls`.
    """

    seconds: float
    processor_seconds: float
    calls: int | None = None
    calls_of_others: float | None = None
    delayed_seconds: float | None = None


def file_costs(directory: Path, ranks: int, step: Callable[[], None]) -> dict[str, Cost]:
    """Costs by what is done, in a directory that is empty.

    Args:
        directory: for the run of the simulated ranks.
        ranks: their number.
        step: called after each checkpoint.
    """
    run = SimulatedRun(directory / "run", ranks)
    count = partial(calls_of, below=run.run_dir, log=directory / "log")
    found = _checkpoints(run, count, partial(delayed_seconds, log=directory / "log"), step)
    found["restart: newest checkpoint loaded"] = _restart(directory, run)
    found["restart: states in memory chosen"] = _choice(ranks)
    found["clean-up at the start of a life"] = Cost(*_took(run.store.prepare), count(run.store.prepare))
    found |= _heartbeats(run, count)
    found |= _events(directory / "journal", ranks)
    found["agreement: rank 0 hears all machines"] = _hearing(ranks)
    return found


def _checkpoints(
    run: SimulatedRun,
    count: Callable[..., int | None],
    delayed: Callable[..., float | None],
    step: Callable[[], None],
) -> dict[str, Cost]:
    commits, retentions = [], []
    for _ in range(CHECKPOINTS):
        commits.append(_took(run.commit))
        retentions.append(_took(run.retain))
        run.save_next()
        step()

    def write() -> None:
        run.store_of(1).write(snapshot_of(1, run.ranks, run.iteration + 1))

    counted = count(run.commit), count(run.retain)
    run.save_next()
    slow = delayed(run.commit), delayed(run.retain)
    return {
        "save: one rank's part": Cost(*_took(write), None, count(write)),
        "save: rank 0 commits": Cost(*_medians(commits[-ROUNDS:]), counted[0], None, slow[0]),
        "save: rank 0 removes what is old": Cost(*_medians(retentions[-ROUNDS:]), counted[1], None, slow[1]),
    }


def _restart(directory: Path, run: SimulatedRun) -> Cost:
    place = directory / "restart"
    place.mkdir()
    first, other = run_ranks("scale.restart_job", place, 2, simulated_dir=str(run.run_dir), simulated_ranks=run.ranks)
    return Cost(first["seconds"], first["processor_seconds"], first["calls"], other["calls"], first["delayed_seconds"])


def _choice(ranks: int) -> Cost:
    nodes = [f"machine-{rank // RANKS_PER_MACHINE}" for rank in range(ranks)]
    entries = [Entry(rank, at, "snapshot", nodes[rank], f"{rank}-{at}") for rank in range(ranks) for at in IN_MEMORY]
    dumped = range(max(0, ranks - RANKS_PER_MACHINE))
    entries += [Entry(rank, DUMPED, "departure", nodes[rank], f"{rank}-{DUMPED}") for rank in dumped]
    return Cost(*_took(lambda: decide(nodes, entries, IN_MEMORY[0], DUMPED, alike=range(ranks))))


def _heartbeats(run: SimulatedRun, count: Callable[..., int | None]) -> dict[str, Cost]:
    beats = itertools.count(2)

    def check(boards: Sequence[Board]) -> Callable[[], object]:
        watches = [Liveness(run.run_dir, LIFE, board, RanksConfig(), print, lambda *_: None) for board in boards]
        for watch in watches:
            watch.check(0.0)  # sees the locks, once
        return lambda: [watch.check(0.0) for watch in watches]

    with holding_locks(run.run_dir, run.machines):
        last = max(run.machines)
        first, others = check(run.boards(0)[:1]), check(run.boards(last))
        samples = []
        for _ in range(ROUNDS):
            run.beat(next(beats))
            samples.append(_took(first))
        run.beat(next(beats))
        counted, counted_others = count(first), count(others)
        each = None if counted_others is None else counted_others / len(run.machines[last])
        return {"each second: heartbeats": Cost(*_medians(samples), counted, each)}


def _hearing(ranks: int) -> Cost:
    """What rank 0 does ten times a second, with the store in its own process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    machines = [str(rank) for rank in range(RANKS_PER_MACHINE, ranks, RANKS_PER_MACHINE)]
    first = len(Report().to_bytes())
    for machine in machines:
        store.set(machine, Report().to_bytes() + Held().to_bytes())  # type: ignore[arg-type] # it takes bytes as well

    def hear() -> None:
        found = store.multi_get(machines)
        merged(report for data in found if (report := Report.of_bytes(data[:first])) is not None)
        held_by_all([Held.of_bytes(data[first:]) for data in found], 0)

    return Cost(*_medians([_took(hear) for _ in range(ROUNDS)]))


def _events(directory: Path, ranks: int) -> dict[str, Cost]:
    files = [EventFile(directory / "events" / f"rank-{rank:05d}.jsonl") for rank in range(1, ranks)]
    journal = Journal.open(directory / "journal.db")
    journal.start_life("auto", ranks=ranks)

    def gather() -> None:
        journal.import_events(directory / "events")
        journal.flush(FLUSH_SECONDS)

    def record() -> None:
        for rank, file in enumerate(files, start=1):
            file.record(EventRow(life=0, rank=rank, kind="saved late", message="a rank's disk was slow", iteration=20))

    record()
    new = [_took(gather)]
    for _ in range(ROUNDS):
        record()
        new.append(_took(gather))
    none = [_took(gather) for _ in range(ROUNDS)]
    journal.close()
    return {
        "each checkpoint: an event of each rank": Cost(*_medians(new)),
        "each checkpoint: no event of any": Cost(*_medians(none)),
    }


def _took(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and those of the processor."""
    started, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - processor


def _medians(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    seconds, processor_seconds = zip(*samples, strict=True)
    return statistics.median(seconds), statistics.median(processor_seconds)
