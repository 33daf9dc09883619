"""The saves that meet faults: those of rank 0 in a new life, plain or of a mixture of experts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.benchmarks.faults.job import (
    ALL,
    COMMITTED,
    KEEP_ALL,
    SparseSave,
    chain,
    frozen_scalars,
    open_sparse,
    scalars_of,
    shard_of,
    snapshot_of,
    sparse_scalars,
    sparse_snapshot,
    write_run,
    write_sparse,
)
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.host_snapshot import WHOLE, Contents
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter
from cpsr.errors import CPSRError

__all__ = ["CHAIN", "LIFE", "PLAIN", "RETENTION", "SPARSE", "RankWriter", "Saves"]

LIFE = 2  # the first one wrote what the run holds
DRAIN_SECONDS = 30.0
SAVE_SECONDS = 600.0
# Of the four checkpoints the newest two stay whole, 20 is thinned to its weights, 10 goes.
RETENTION = Retention(history_span_iterations=10, history_min_checkpoints=3, full_checkpoints=2)
_NO_EXPERTS: Mapping[int, SparseSave] = {}


class RankWriter:
    """One rank's pool and writer, as a job has them.

    Args:
        store: of the rank.
        config: how many checkpoints stay.
        experts: the iterations whose checkpoints are sparse.

    Attributes:
        handed_over_seconds: how long the newest snapshot blocked the thread that trains.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: Retention = KEEP_ALL,
        experts: Mapping[int, SparseSave] = _NO_EXPERTS,
    ) -> None:
        self.pool = SnapshotPool(shard_of(store.rank, 0))
        self.writer = CheckpointWriter(store, self.pool, SAVE_SECONDS, config)
        self.handed_over_seconds = 0.0
        self._store = store
        self._experts = experts

    def begin(self, iteration: int, contents: Contents = WHOLE) -> bool:
        """Take a snapshot and hand it to the writer; False where no buffer was free."""
        shard, save = shard_of(self._store.rank, iteration), self._experts.get(iteration)
        scalars = scalars_of(iteration) if save is None else sparse_scalars(iteration, save)
        scalars |= frozen_scalars(self._store, iteration)
        started = time.perf_counter()
        self.pool.begin(shard, iteration, scalars, contents if save is None else save.contents)
        snapshot = self.pool.finish()
        if snapshot is not None:
            self.writer.submit(snapshot)
        self.handed_over_seconds = time.perf_counter() - started
        return snapshot is not None

    def wait(self) -> list[tuple[int, str, str]]:
        """Iteration, status and reason of every save, once nothing is under way.

        Raises:
            CPSRError: the writer does not come to an end.
        """
        if not self.writer.drain(DRAIN_SECONDS):
            raise CPSRError(f"the writer is not through after {DRAIN_SECONDS:g} s")
        return [(one.iteration, one.status, one.reason) for one in self.writer.outcomes()]

    def save(self, iteration: int, contents: Contents = WHOLE) -> list[tuple[int, str, str]]:
        """Take one snapshot and wait for what becomes of it."""
        self.begin(iteration, contents)
        return self.wait()


@dataclass(frozen=True)
class Saves:
    """What rank 0 saves in a new life.

    Attributes:
        prepare: makes the run directory as it is before.
        iterations: the first of them meets the fault.
        row: more saves than there are host buffers, as they come due while the first is being written.
        before: what the life saves before any fault.
        experts: the iterations whose checkpoints are sparse.
        limit_bytes: the largest file of the first save takes more, those that are written before it less.
    """

    prepare: Callable[[Path], None]
    iterations: tuple[int, ...]
    row: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    experts: Mapping[int, SparseSave] = field(default_factory=dict)
    limit_bytes: int = 5800

    @property
    def committed(self) -> tuple[int, ...]:
        """Iterations of the checkpoints that are there before the fault, where none was removed."""
        return *COMMITTED, *self.before

    def begin(self, run_dir: Path, config: Retention, iterations: Sequence[int]) -> RankWriter:
        """Rank 0 before the fault; the other rank's parts of what is to be saved are there."""
        stores = open_sparse(run_dir, LIFE)
        for iteration in (*self.before, *iterations):
            save = self.experts.get(iteration)
            stores[1].write(sparse_snapshot(1, iteration, save) if save is not None else snapshot_of(1, iteration))
        rank_0 = RankWriter(stores[0], config, self.experts)
        for iteration in self.before:
            rank_0.save(iteration)
        return rank_0


PLAIN = Saves(write_run, (50, 60), (50, 60, 70, 80, 90))
# The save after the one that meets the fault saves all experts, as in a job where a save failed; then it goes on.
SPARSE = Saves(
    write_sparse,
    (60, 70, 80),
    (110, 120, 130, 140, 150),
    (50,),
    chain({50: ALL, 60: [2], 70: ALL, 80: [0]})
    | chain({50: ALL} | {iteration: [2] for iteration in range(110, 160, 10)}),
    limit_bytes=5690,
)
# With a retention pass after each, so that 50, which wrote the files of the third expert, goes before 80 does.
CHAIN = Saves(write_sparse, (60, 70, 80), before=(50,), experts=chain({50: ALL, 60: [0], 70: [1], 80: [0]}))
