"""Snapshots to host memory between the checkpoints, and windows: which of them all ranks take and send alike."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cpsr.checkpoint.contents import WHOLE, Contents
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.experts.saving import ExpertSaving
from cpsr.journal import RankJournal
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.replay.windows import Windows
from cpsr.state.losses import Step

__all__ = ["MemorySnapshots", "Turn", "Turns", "WindowSnapshots"]

STALLS = 1000  # that are remembered
MEASURED_ITERATIONS = 10  # of a life: then enough copies were measured, and the first checkpoint may be far away


class Turns:
    """Follows the ranks' votes on whether the next snapshot can be taken, and whether links to peers are free.

    A restart needs one iteration of which every rank has a state, in its own memory or on another machine. Ranks that
    skip snapshots by themselves, or send whichever is newest when a link is free, may have none in common. All ranks
    read the same vote before the same step, and so decide alike. Each rank keeps the newest state that the peers have
    in full until they have the next: if a machine is lost, the others restart from it.

    Args:
        occupancy: of the host buffers.
        sending: whether a replica of this rank's is under way.
        keep: called with the iteration of the newest state that the peers have in full, None where they have none.
        iteration: of the state that this life begins with.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        sending: Callable[[], bool],
        keep: Callable[[int | None], None],
        iteration: int = 0,
    ) -> None:
        self._occupancy = occupancy
        self._sending, self._keep = sending, keep
        self._cast_at = self._read_at = -1  # iterations of the votes
        self._blocked = self._busy = False
        self._sent_at = -2
        self._sent: tuple[int, int, Callable[[], bool]] | None = None
        keep(iteration)  # what the peers have of the life before

    def ballot(self) -> tuple[bool, bool]:
        """Whether this rank cannot take a snapshot now, and whether one of its links is busy, or soon will be."""
        # In this order: a state that is sealed meanwhile is seen on its link.
        busy = (self._sent is not None and self._sent[2]()) or self._sending()
        return not self._occupancy.is_free, busy

    def sent(self, iteration: int, pending: Callable[[], bool], first: int | None = None) -> None:
        """This one goes to the peers.

        Args:
            iteration: as given to `may_send`.
            pending: whether it has still to be sealed and offered.
            first: of a window, whose last iteration that is.
        """
        self._sent = iteration, iteration if first is None else first, pending

    def read(self, iteration: int, blocked: bool, busy: bool) -> None:
        """A ballot was cast after this iteration, and the result of the one before is here.

        Args:
            iteration: the finished one.
            blocked: whether any rank could take none.
            busy: whether any rank's link was busy.
        """
        self._read_at, self._cast_at = self._cast_at, iteration
        self._blocked, self._busy = blocked, busy
        if not busy and self._sent is not None and self._sent[0] == self._sent_at < self._read_at:
            self._keep(self._sent[1])

    def restart(self) -> None:
        """The run has gone back: votes of later iterations say nothing about those that come again."""
        self._cast_at = self._read_at = -1
        self._sent_at = -2
        self._keep(None)

    @property
    def may_take(self) -> bool:
        """Whether every rank could take a snapshot at the last vote."""
        return not self._blocked

    def may_send(self, iteration: int, *, always: bool = False) -> bool:
        """Whether the state of this iteration goes to the peers; every rank asks for the same iterations.

        Args:
            iteration: of the snapshot, or the last of a window.
            always: also if a link is busy; it then waits for its turn. For checkpoints, of which there are few.
        """
        if not always and (self._busy or self._sent_at >= self._read_at):
            return False
        self._sent_at = iteration
        return True


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
        self._views = adapter.shard

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

    def capture(self, iteration: int, turn: Turn, scalars: Callable[[], dict[str, Any]]) -> None:
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


class WindowSnapshots:
    """Does nothing where no windows are wanted.

    Args:
        windows: of this rank; None: none are wanted.
        turns: which of them all ranks send.
        note: is told of how many iterations windows are from now on; None: none are taken.
        experts: token counts that order the experts; None: there are none.

    Attributes:
        wanted: whether windows take the place of snapshots in memory, and of their replicas.
    """

    def __init__(
        self,
        windows: Windows | None,
        turns: Turns,
        note: Callable[[int | None], object],
        experts: ExpertSaving | None = None,
    ) -> None:
        self._windows, self._turns, self._note, self._experts = windows, turns, note, experts
        self.wanted = windows is not None
        self._ended = 0
        note(None if windows is None else windows.iterations)

    def end_of(self, iteration: int, capture: Callable[[], Any]) -> Callable[[], None] | None:
        """Decide right after the step; returns what the iteration ends with, None without windows.

        Args:
            iteration: the finished one.
            capture: gives the whole small state.
        """
        windows = self._windows
        if windows is None:
            return None
        self._ended += 1
        if self._ended == MEASURED_ITERATIONS:
            windows.agree(iteration)
            self._note(windows.iterations)
        send = windows.ends_after(iteration) and self._turns.may_send(iteration)

        def capture_part() -> None:
            sent = windows.capture(iteration, capture, send=send)
            if sent is not None:
                self._turns.sent(iteration, sent.is_pending, sent.first)

        return capture_part

    def before_update(self) -> None:
        """The state is about to change."""
        if self._windows is not None:
            self._windows.before_update()

    def agree(self, iteration: int) -> None:
        """Find the number of iterations of later windows anew, and what has its turn when; a collective.

        Args:
            iteration: the finished one, of which a checkpoint has begun.
        """
        if self._windows is not None:
            if self._experts is not None:
                self._windows.order(self._experts.popularity)
            self._windows.agree(iteration)
            self._note(self._windows.iterations)
