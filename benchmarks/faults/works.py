"""What a process is doing when it is killed: saves, retention, roll-backs, and the cleaning up of a restart."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.benchmarks.faults.job import (
    ALL,
    COMMITTED,
    INTERVAL,
    KEEP_ALL,
    MERGED,
    chain,
    commit,
    frozen_scalars,
    mark,
    open_run,
    open_sparse,
    snapshot_of,
    sparse_snapshot,
    write_run,
    write_sparse,
)
from cpsr.benchmarks.faults.saves import CHAIN, LIFE, RETENTION, SPARSE, RankWriter
from cpsr.benchmarks.faults.stage import POLL_SECONDS, Gate
from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.checkpoint.manifest import SLABS, step_name
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError

__all__ = ["WORKS", "Work"]

GRACE_SECONDS = 0.1  # for a save of rank 0, once the other rank has died


@dataclass(frozen=True)
class Work:
    """One piece of work that can be interrupted anywhere.

    Attributes:
        name: for the report.
        prepare: makes the run directory as it is before, in a fork.
        run: opens what it needs, waits at the gate, works, and notes `done`.
        newest: one of these is the newest checkpoint after an interruption, unless the work notes others on its way.
        done: the newest one once the work is done.
        kept: whole checkpoints that are there in any case, unless the work notes others on its way.
        damaged: the run had a damaged checkpoint before.
        beside: in a process that is not interrupted, while the work runs.
    """

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path, Gate], None]
    newest: frozenset[int]
    done: int
    kept: frozenset[int] = field(default_factory=lambda: frozenset(COMMITTED))
    damaged: bool = False
    beside: Callable[[Path, Gate], None] | None = None


def _save(run_dir: Path, gate: Gate) -> None:
    stores = open_run(run_dir, LIFE)
    stores[1].write(snapshot_of(1, 50))
    rank_0 = RankWriter(stores[0])
    gate.wait()
    gate.note(done=True, outcomes=rank_0.save(50))


def _save_of_the_other(run_dir: Path, gate: Gate) -> None:
    rank_1 = RankWriter(open_run(run_dir, LIFE)[1])
    # Which of the two makes the directory is chance, and the calls are to be the same every time: rank 0 does.
    while not (run_dir / "checkpoints" / step_name(50)).is_dir():
        time.sleep(POLL_SECONDS)
    gate.wait()
    rank_1.save(50)  # not `done`: whether it is committed is rank 0's affair


def _rank_0_lives_on(run_dir: Path, gate: Gate) -> None:
    """Rank 0 waits for the part of rank 1, until it hears of its death and leaves."""
    rank_0 = RankWriter(open_run(run_dir, LIFE)[0])
    rank_0.begin(50)
    gate.await_end()
    rank_0.writer.close(GRACE_SECONDS)
    (outcome,) = rank_0.writer.outcomes()
    if outcome.status not in ("committed", "skipped") or (outcome.status == "skipped" and not outcome.reason):
        raise CPSRError(f"rank 0 met the death of rank 1 with {outcome}")


def _save_of_both(run_dir: Path, gate: Gate) -> None:
    ranks = [RankWriter(store) for store in open_run(run_dir, LIFE)]
    gate.wait()
    gate.note(done=True, outcomes=_save_by_both(ranks, 50))


def _save_by_both(ranks: Sequence[RankWriter], iteration: int) -> list[list[tuple[int, str, str]]]:
    for rank in ranks:
        rank.begin(iteration)
    return [rank.wait() for rank in reversed(ranks)]


def _with_an_abandoned_save(run_dir: Path) -> None:
    write_run(run_dir)
    stores = open_run(run_dir, LIFE)
    stores[0].write(snapshot_of(0, 50))
    stores[1].write(snapshot_of(1, 50))
    stores[1].skip(50, "a test")
    stores[0].commit(50, 0.0, threading.Event())


def _save_again(run_dir: Path, gate: Gate) -> None:
    stores = open_run(run_dir, LIFE)
    for store in stores:
        store.attempt = 1
    stores[1].write(snapshot_of(1, 50))
    rank_0 = RankWriter(stores[0])
    gate.wait()
    gate.note(done=True, outcomes=rank_0.save(50))


def _save_whole(run_dir: Path, gate: Gate) -> None:
    """The last save of a life, whose newest checkpoint is sparse and of the same iteration."""
    stores = open_sparse(run_dir, LIFE)
    whole = chain({40: ALL})
    stores[1].write(sparse_snapshot(1, 40, whole[40]))
    rank_0 = RankWriter(stores[0], RETENTION, whole)
    gate.wait()
    gate.note(done=True, outcomes=rank_0.save(40))


def _with_remains(run_dir: Path) -> None:
    """Checkpoints that were set aside before two later commits or renamed by a user, and a save that was cut off."""
    write_run(run_dir)
    stores = open_run(run_dir, 1)
    commit(stores, 4)
    (stores[0].directory / step_name(4)).rename(stores[0].directory / "to be looked at")
    commit(stores, 5)
    stores[0].quarantine(5, "a test")
    commit(stores, 50)
    commit(stores, 60)
    stores[0].abandon_after(40, "a test")
    for iteration in (50, 60):
        commit(stores, iteration)
    stores[1].write(snapshot_of(1, 35))


def _with_a_save_under_way(run_dir: Path) -> None:
    write_run(run_dir)
    open_run(run_dir, LIFE)[1].write(snapshot_of(1, 50))


def _with_damage_and_remains(run_dir: Path) -> None:
    _with_a_save_under_way(run_dir)
    _damage(run_dir)


def _damage(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    commit_file(checkpoints / step_name(40)).write_bytes(b"{")
    for directory in (step_name(30), SLABS):
        (checkpoints / directory / ".tmpAbCdEf").write_bytes(b"torn")


def _save_chain(run_dir: Path, gate: Gate) -> None:
    """Sparse saves, each with a retention pass that removes older ones whose slabs are carried along."""
    rank_0 = CHAIN.begin(run_dir, RETENTION, CHAIN.iterations)
    done = CHAIN.before[-1]
    gate.note(newest=[done, done + INTERVAL], kept=[done])
    gate.wait()
    for iteration in CHAIN.iterations:
        outcomes = rank_0.save(iteration)
        gate.note(newest=[iteration, iteration + INTERVAL], kept=[iteration], outcomes=outcomes)
    gate.note(done=True)


def _save_sparse_of_both(run_dir: Path, gate: Gate) -> None:
    ranks = [RankWriter(store, KEEP_ALL, CHAIN.experts) for store in open_sparse(run_dir, LIFE)]
    _save_by_both(ranks, 50)
    gate.wait()
    gate.note(done=True, outcomes=_save_by_both(ranks, 60))


def _write_frozen(run_dir: Path) -> None:
    mark(run_dir)
    write_run(run_dir)


def _save_frozen(run_dir: Path, gate: Gate) -> None:
    """A save that writes other frozen weights than the run had, and one that lists them."""
    stores, iterations = open_run(run_dir, LIFE), (MERGED, MERGED + INTERVAL)
    for iteration in iterations:
        snapshot = snapshot_of(1, iteration)
        snapshot.scalars |= frozen_scalars(stores[1], iteration)
        stores[1].write(snapshot)
    rank_0 = RankWriter(stores[0])
    gate.note(newest=[MERGED - INTERVAL, MERGED], kept=COMMITTED)
    gate.wait()
    for iteration in iterations:
        outcomes = rank_0.save(iteration)
        gate.note(newest=[iteration, iteration + INTERVAL], kept=[*COMMITTED, iteration], outcomes=outcomes)
    gate.note(done=True)


def _with_a_sparse_save_under_way(run_dir: Path) -> None:
    """What the other rank wrote names files of a committed checkpoint."""
    write_sparse(run_dir)
    SPARSE.begin(run_dir, KEEP_ALL, [60])


def _with_sparse_damage_and_remains(run_dir: Path) -> None:
    _with_a_sparse_save_under_way(run_dir)
    _damage(run_dir)


def _by_rank_0(action: Callable[[CheckpointStore], object]) -> Callable[[Path, Gate], None]:
    """Something that rank 0's store does in a new life."""

    def run(run_dir: Path, gate: Gate) -> None:
        store = open_run(run_dir, LIFE)[0]
        gate.wait()
        action(store)
        gate.note(done=True)

    return run


_retain = _by_rank_0(lambda store: store.retain(RETENTION))
_abandon = _by_rank_0(lambda store: store.abandon_after(20, "a test"))
_quarantine = _by_rank_0(lambda store: store.quarantine(40, "a test"))
_restart = _by_rank_0(lambda store: store.prepare())
_SPARSE_KEPT = frozenset(SPARSE.committed)
WORKS = (
    Work("save and commit", write_run, _save, frozenset({40, 50}), 50),
    Work("save of another rank", write_run, _save_of_the_other, frozenset({40, 50}), 50, beside=_rank_0_lives_on),
    Work("save of both ranks", write_run, _save_of_both, frozenset({40, 50}), 50),
    Work("save again", _with_an_abandoned_save, _save_again, frozenset({40, 50}), 50),
    Work("retention", _with_remains, _retain, frozenset({60}), 60, frozenset({50, 60})),
    Work("roll-back", _with_a_save_under_way, _abandon, frozenset({20, 30, 40}), 20, frozenset({10, 20})),
    Work("setting aside", write_run, _quarantine, frozenset({30, 40}), 30, frozenset({10, 20, 30})),
    Work("restart", _with_damage_and_remains, _restart, frozenset({30}), 30, frozenset({10, 20, 30}), damaged=True),
    Work("saves with frozen weights", _write_frozen, _save_frozen, frozenset(), 60),
    Work("sparse chain", write_sparse, _save_chain, frozenset(), 80, frozenset({70, 80})),
    Work("whole save after a sparse one", write_sparse, _save_whole, frozenset({40}), 40, frozenset({30, 40})),
    Work("sparse save of both ranks", write_sparse, _save_sparse_of_both, frozenset({50, 60}), 60, _SPARSE_KEPT),
    Work(
        "sparse roll-back",
        _with_a_sparse_save_under_way,
        _abandon,
        frozenset({20, 30, 40, 50}),
        20,
        frozenset({10, 20}),
    ),
    Work(
        "sparse restart",
        _with_sparse_damage_and_remains,
        _restart,
        frozenset({50}),
        50,
        _SPARSE_KEPT - {40},
        damaged=True,
    ),
)
