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
from cpsr.ranks.sends import Sender

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.planner.live.job_planner import JobPlanner

__all__ = ["MemorySnapshots"]

STALLS = 1000  # that are remembered
# Told that a copy of this iteration does not begin, and why; None: no buffer is free.
Refused = Callable[[int, SaveError | UnsupportedEngineError | None], None]
MEASURED_ITERATIONS = 10  # with a copy: then enough were measured, and the first checkpoint may be far away
# Then `cpsr.experts.in_memory` has compared steps beside much to copy and beside little, in five tens after these.
COMPARED_ITERATIONS = 62


class MemorySnapshots:
    """Snapshots in host memory between the checkpoints: whole ones of some iterations, or windows of each.

    All of it runs on the training thread, which waits neither for the disk nor for other ranks.

    Args:
        memory: the host buffers; its windows, if it has any, take the place of whole snapshots and of their replicas.
        policy: decides what a whole one copies.

    Attributes:
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
        self._survives, self._links, self._send = memory.survives, memory.links, memory.send
        self._sender: Sender | None = None  # nothing is sent
        self.taken = self.skipped = 0
        self.stalls_seconds: deque[float] = deque(maxlen=STALLS)
        self._failed = False
        self._ended = 0
        planner.note_window(None if self._windows is None else self._windows.iterations)

    def send_by(self, sender: Sender) -> None:
        """Send what all ranks send, to the peers; these have the state of the life before that this one begins with."""
        keep = self._pool.occupancy.keep if self._windows is None else self._windows.recorder.keep
        sender.open(self._links, keep, self._last, None if self._windows is not None else self._send)
        self._sender = sender

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
        self._ended += 1
        if self._ended in (MEASURED_ITERATIONS, COMPARED_ITERATIONS):
            self._policy.agree_in_memory()
        return partial(self._begin, self._policy.due_in_memory(iteration))

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
            self._policy.count_tokens()
            self.after_checkpoint(iteration)

        def capture_part() -> None:
            sender = self._sender
            may_send = (lambda: False) if sender is None else sender.may_send
            sent = windows.capture(iteration, self._capture, may_send, may_begin=not between_steps())
            if sender is not None and sent is not None:
                sender.sent(sent.first, sent.is_pending)

        return capture_part

    def at_checkpoint(self, iteration: int) -> None:
        """A checkpoint of this iteration begins, from which all ranks count."""
        self._last = iteration

    def after_checkpoint(self, iteration: int) -> None:
        """Find the number of iterations of later windows anew, and the order of their experts; a collective."""
        if self._windows is not None:
            self._windows.order(self._policy.popularity)
            self._windows.agree(iteration)
            self._planner.note_window(self._windows.iterations)

    # The copy

    def _begin(self, contents: Contents) -> None:
        iteration = self._job.adapter.iteration  # later than due where a batch repeats
        self.begin(iteration, contents, self._capture, self._not_begun, disk=False)

    def begin(
        self, iteration: int, contents: Contents, capture: Callable[[], dict[str, Any]], refused: Refused, *, disk: bool
    ) -> None:
        """Begin a copy, which a checkpoint needs as well, or call `refused`; `capture` gives the small state."""
        started, snapshot, why = time.perf_counter(), None, None
        try:
            with self._job.adapter.at_rest():
                shard, small = self._job.adapter.shard(), capture()
            snapshot = self._pool.begin(shard, iteration, small, contents, disk=disk)
        except (SaveError, UnsupportedEngineError) as error:
            self._pool.occupancy.skip(iteration)
            why = error
        if snapshot is None:
            refused(iteration, why)
        else:
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
        if self._sender is not None:
            self._sender.restart()

    # Reports

    def _not_begun(self, iteration: int, error: SaveError | UnsupportedEngineError | None) -> None:
        if error is not None:
            self.failed(iteration, error)
            return
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
