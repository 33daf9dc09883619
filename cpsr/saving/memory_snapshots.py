"""Snapshots to host memory between the checkpoints, so that a restart of the processes loses a few iterations."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cpsr.checkpoint.contents import WHOLE, Contents
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.kept_views import KeptViews
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.journal import RankJournal
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.saving.turns import Turns
from cpsr.state.losses import Step

__all__ = ["MemorySnapshots", "Turn"]

STALLS = 1000  # that are remembered


@dataclass(frozen=True)
class Turn:
    """One due snapshot, as all ranks take it.

    Attributes:
        contents: what it copies.
        replicate: whether it is sent to the peers.
    """

    contents: Contents = WHOLE
    replicate: bool = False


class MemorySnapshots:
    """Takes them on the training thread, every so many iterations; the disk and the other ranks are not waited for.

    Args:
        adapter: the engine.
        pool: the host buffers.
        journal: takes an event where a snapshot fails.
        planner: receives their costs.
        turns: which of them all ranks take and send.
        iteration: start of the count.

    Attributes:
        turns: which of them all ranks take and send.
        possible: whether snapshots survive the process; without shared memory none is taken.
        taken: number of snapshots that are complete.
        skipped: number of due ones that came late or not at all, because a rank had no buffer free.
        stalls_seconds: how long the newest ones have kept the training thread from its work, each.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        pool: SnapshotPool,
        journal: RankJournal,
        planner: JobPlanner,
        turns: Turns,
        iteration: int,
    ) -> None:
        self._adapter, self._pool, self._journal, self._planner = adapter, pool, journal, planner
        self.turns = turns
        self._last = iteration
        self._late = False
        self.possible = pool.survives
        self.taken = self.skipped = 0
        self.stalls_seconds: deque[float] = deque(maxlen=STALLS)
        self._unreported, self._unreported_seconds = 0, 0.0  # since the journal was last told
        self._failed = False
        self._sealed: tuple[int, Future[bool]] | None = None  # of the newest one
        self._views = KeptViews(adapter)

    def is_due(self, iteration: int, interval_iterations: int | None) -> bool:
        """Whether one is due after this iteration; None: none is wanted."""
        return self.possible and interval_iterations is not None and iteration - self._last >= interval_iterations

    def restart(self, iteration: int) -> None:
        """Count from here: a snapshot of it is there, or the run has gone back to it."""
        self._last = iteration

    def turn(self, iteration: int, contents: Callable[[], Contents] = lambda: WHOLE) -> Turn | None:
        """What the due snapshot copies, and whether it is sent; called on all ranks at the same place of a step.

        Args:
            iteration: the finished one.
            contents: gives the next turn.

        Returns:
            None where a rank has no buffer free: the snapshot stays due.
        """
        if not self.turns.may_take:
            if not self._late:  # counted once; it stays due
                self._skip(iteration)
            self._late = True
            return None
        self._late, self._last = False, iteration
        return Turn(contents(), self.turns.may_send(iteration))

    def begin(self, iteration: int, turn: Turn, scalars: Callable[[], dict[str, Any]]) -> None:
        """Start the snapshot of a finished iteration; returns while it is being copied.

        Args:
            iteration: the finished one.
            turn: as returned by `turn`.
            scalars: captures the small state.
        """
        started = time.perf_counter()
        self._check_sealed()
        try:
            snapshot = self._pool.begin(
                self._views(), iteration, scalars(), turn.contents, disk=False, replicate=turn.replicate
            )
        except (SaveError, UnsupportedEngineError) as error:
            self.failed(iteration, error)
            return
        if snapshot is None:
            self._skip(iteration)
            return
        if turn.replicate:
            self.turns.sent(iteration, snapshot.is_pending)
        snapshot.stall_seconds = time.perf_counter() - started

    def _skip(self, iteration: int) -> None:
        self.skipped += 1
        if self.skipped == 1:
            self._journal.event(
                "memory snapshot skipped",
                f"snapshot {iteration} to host memory is late: no buffer is free, because the disk is still writing or "
                "the newest snapshot is still hashed. A kill now goes back to the snapshot before it. Further ones are "
                "counted until this life ends",
                iteration,
                logging.INFO if self._journal.rank == 0 else logging.DEBUG,
            )

    def on_steps(self, _: Sequence[Step]) -> None:
        """Steps have gone to the journal: the stalls in them follow."""
        if self._unreported:
            self._journal.add_memory_stalls(self._unreported, self._unreported_seconds)
            self._unreported, self._unreported_seconds = 0, 0.0

    def close(self) -> None:
        """Report how many were skipped."""
        self._check_sealed()
        if self.skipped > 1:
            due = self.taken + self.skipped
            message = f"{self.skipped} of {due} snapshots to host memory were late or skipped: no buffer was free"
            level = logging.INFO if self._journal.rank == 0 else logging.DEBUG
            self._journal.event("memory snapshots skipped", message, self._last, level)

    def complete(self, snapshot: Snapshot) -> None:
        """Its copy is complete: it stays in memory until newer ones overwrite it."""
        self.taken += 1
        self.stalls_seconds.append(snapshot.stall_seconds)
        if snapshot.sealed is not None:
            self._sealed = snapshot.iteration, snapshot.sealed
        self._unreported += 1
        self._unreported_seconds += snapshot.stall_seconds
        self._planner.note_memory(snapshot.stall_seconds)
        self._pool.release(snapshot)

    def _check_sealed(self) -> None:
        """Report the first one that could not be sealed."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None and sealed[1].done() and not sealed[1].result():
            self.failed(sealed[0], SaveError("it could not be sealed; this rank's log has the reason"))

    def failed(self, iteration: int, error: Exception) -> None:
        """Report the first failure; checkpoints, which copy the same state, report theirs."""
        if not self._failed:
            self._failed = True
            self._journal.event(
                "memory snapshot failed",
                f"the state of iteration {iteration} was not copied to host memory: {error}; training goes on, older "
                "snapshots and checkpoints are untouched. Not reported again in this life",
                iteration,
                logging.ERROR,
            )
