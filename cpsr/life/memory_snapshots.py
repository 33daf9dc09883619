"""Snapshots to host memory between the checkpoints, or windows; which of them all ranks send alike."""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.job import Job
from cpsr.life.policies import Whole
from cpsr.peers.host_memory import HostMemory

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.planner.live.job_planner import JobPlanner

__all__ = ["MemorySnapshots", "Turns"]

STALLS = 1000  # that are remembered
MEASURED_ITERATIONS = 10  # of a life: then enough copies were measured, and the first checkpoint may be far away


class Turns:
    """Follows the ranks' votes on whether links to peers are free.

    After the loss of a machine a restart needs one iteration of which every rank has a state, in its own memory or on
    another machine. Ranks that send whichever is newest when a link is free may have none in common. All ranks read the
    same vote before the same step, and so decide alike. Each rank keeps the newest state that the peers have in full
    until they have the next: if a machine is lost, the others restart from it.

    Args:
        sending: whether a replica of this rank's is under way.
        has_arrived: whether the peers have this rank's state of an iteration.
        keep: called with the iteration of the newest state that the peers have in full, None where they have none.
        iteration: of the state that this life begins with.
    """

    def __init__(
        self,
        sending: Callable[[], bool],
        has_arrived: Callable[[int], bool],
        keep: Callable[[int | None], None],
        iteration: int = 0,
    ) -> None:
        self._sending, self._has_arrived, self._keep = sending, has_arrived, keep
        self._cast_at = self._read_at = -1  # iterations of the votes
        self._busy = False
        self._sent_at = -2
        self._sent: tuple[int, int, Callable[[], bool]] | None = None
        keep(iteration)  # what the peers have of the life before

    def ballot(self) -> tuple[bool, bool]:
        """Whether one of this rank's links is busy or will be, and its newest replica is missing.

        A holder may have refused or dropped what it was sent.
        """
        # In this order: a state that is sealed meanwhile is seen on its link.
        busy = (self._sent is not None and self._sent[2]()) or self._sending()
        begun = self._sent is not None and self._sent[0] == self._sent_at
        missing = self._sent is None or not begun or not self._has_arrived(self._sent[1])
        return busy, missing

    def sent(self, iteration: int, pending: Callable[[], bool], held: int | None = None) -> None:
        """This one goes to the peers.

        Args:
            iteration: as given to `may_send`.
            pending: whether it has still to be sealed and offered.
            held: iteration of the state, if it is another: a window's first, or a later one where a batch repeats.
        """
        self._sent = iteration, iteration if held is None else held, pending

    def read(self, iteration: int, busy: bool, missing: bool) -> None:
        """A ballot was cast after this iteration, and the result of the one before is here.

        Args:
            iteration: the finished one.
            busy: whether any rank's link was busy.
            missing: whether any rank's newest replica was missing.
        """
        self._read_at, self._cast_at = self._cast_at, iteration
        self._busy = busy
        if not busy and not missing and self._sent is not None and self._sent[0] == self._sent_at < self._read_at:
            self._keep(self._sent[1])

    def restart(self) -> None:
        """The run has gone back: votes of later iterations say nothing about those that come again."""
        self._cast_at = self._read_at = -1
        self._sent_at = -2
        self._keep(None)

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


class MemorySnapshots:
    """Snapshots in host memory between the checkpoints: whole ones of some iterations, or windows of each.

    All of it runs on the training thread, which waits neither for the disk nor for other ranks.

    Args:
        memory: the host buffers; its windows, if it has any, take the place of whole snapshots and of their replicas.
        policy: decides what a whole one copies.

    Attributes:
        turns: which of them all ranks take and send.
        taken: number of snapshots that are complete.
        skipped: number of due ones that this rank has not taken, because it had no buffer free.
        stalls_seconds: how long the newest ones have kept the training thread from its work, each.
    """

    def __init__(
        self,
        job: Job,
        memory: HostMemory,
        planner: "JobPlanner",
        policy: Whole,
        capture: Callable[[], dict[str, Any]],
        iteration: int,
    ) -> None:
        self._job, self._pool, self._windows, self._planner = job, memory.pool, memory.windows, planner
        self._policy, self._capture, self._last = policy, capture, iteration
        self._survives = memory.survives
        keep = self._pool.occupancy.replicated if self._windows is None else self._windows.recorder.replicated
        links = memory.links
        self.turns = Turns(
            lambda: any(link.busy for link in links),
            lambda iteration: all(link.has_arrived(iteration) for link in links),
            keep,
            iteration,
        )
        self.taken = self.skipped = 0
        self.stalls_seconds: deque[float] = deque(maxlen=STALLS)
        self._failed = False
        self._ended = 0
        planner.note_window(None if self._windows is None else self._windows.iterations)

    # Right after a step, at the same place on all ranks

    def due(self, iteration: int, interval_iterations: int | None) -> Callable[[], None] | None:
        """The whole snapshot of this iteration, if one is due; the ranks have agreed on what it copies, and for whom.

        None is with windows, nor where it would not survive on every rank.

        Returns:
            What starts it, once the loop has finished its iteration; it returns while the state is being copied.
        """
        due_at = self.due_at(interval_iterations)
        if due_at is None or iteration < due_at:
            return None
        self._last = iteration
        return partial(self._begin, iteration, self._policy.due_in_memory(), self.turns.may_send(iteration))

    def due_at(self, interval_iterations: int | None) -> int | None:
        """The iteration of the next whole snapshot; None: none are taken."""
        if interval_iterations is None or self._windows is not None or not self._survives:
            return None
        return self._last + interval_iterations

    def end_of(self, iteration: int, between_steps: Callable[[], bool]) -> Callable[[], None] | None:
        """What an iteration ends with: its part of a window, if there are any.

        Args:
            iteration: the finished one.
            between_steps: then tells whether the loop trains once more on the batch, where no window begins.
        """
        windows = self._windows
        if windows is None:
            return None
        self._ended += 1
        if self._ended == MEASURED_ITERATIONS:
            windows.agree(iteration)
            self._planner.note_window(windows.iterations)

        def capture_part() -> None:
            may_send = partial(self.turns.may_send, iteration)
            sent = windows.capture(iteration, self._capture, may_send, may_begin=not between_steps())
            if sent is not None:
                self.turns.sent(iteration, sent.is_pending, sent.first)

        return capture_part

    def at_checkpoint(self, iteration: int) -> bool:
        """A checkpoint of this iteration begins, from which all ranks count; returns whether the peers get it."""
        self._last = iteration
        # With windows these go to the peers instead: checkpoints are on the disk.
        return self._windows is None and self.turns.may_send(iteration, always=True)

    def after_checkpoint(self, iteration: int) -> None:
        """Find the number of iterations of later windows anew, and the order of their experts; a collective."""
        if self._windows is not None:
            self._windows.order(self._policy.popularity)
            self._windows.agree(iteration)
            self._planner.note_window(self._windows.iterations)

    # The copy

    def _begin(self, due: int, contents: Contents, replicate: bool) -> None:
        started, iteration = time.perf_counter(), self._job.adapter.iteration  # later than due where a batch repeats
        try:
            shard = self._job.adapter.shard()
            snapshot = self._pool.begin(shard, iteration, self._capture(), contents, disk=False, replicate=replicate)
        except (SaveError, UnsupportedEngineError) as error:
            self._pool.occupancy.skip(iteration)
            self.failed(iteration, error)
            return
        if snapshot is None:
            self._skip(iteration)
            return
        if replicate:
            self.turns.sent(due, snapshot.is_pending, iteration)
        snapshot.stall_seconds = time.perf_counter() - started

    def before_update(self) -> None:
        """The state is about to change."""
        if self._windows is not None:
            self._windows.recorder.finish()

    def complete(self, snapshot: Snapshot) -> None:
        """Its copy is complete: it stays in memory until newer ones overwrite it."""
        self.taken += 1
        self.stalls_seconds.append(snapshot.stall_seconds)
        self._planner.note_memory(snapshot.stall_seconds, snapshot.copy_seconds)
        self._pool.release(snapshot)

    def restart(self, iteration: int) -> None:
        """The run has gone back to this iteration."""
        self._last = iteration
        self.turns.restart()

    # Reports

    def _skip(self, iteration: int) -> None:
        self.skipped += 1
        if self.skipped == 1:
            self._job.journal.event(
                "memory snapshot skipped",
                f"snapshot {iteration} to host memory is skipped: no buffer is free, because the disk is still writing "
                "or a rank has not sealed those before. A kill now goes back to the snapshot before it. Not reported "
                "again in this life",
                iteration,
                logging.INFO if self._job.group.rank == 0 else logging.DEBUG,
            )

    def failed(self, iteration: int, error: Exception) -> None:
        """Report the first failure; checkpoints, which copy the same state, report theirs."""
        if not self._failed:
            self._failed = True
            self._job.journal.event(
                "memory snapshot failed",
                f"the state of iteration {iteration} was not copied to host memory: {error}; training goes on, older "
                "snapshots and checkpoints are untouched. Not reported again in this life",
                iteration,
                logging.ERROR,
            )
