"""The background thread that makes snapshots durable; every error there becomes an outcome, never a crash."""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError

__all__ = ["NICENESS", "CheckpointWriter", "SaveOutcome", "yield_to_training"]

# On a busy core a tenth of the time remains, so that no save starves. Beyond it, a thread that is displaced while it
# has the interpreter's lock keeps training waiting for longer.
NICENESS = 10
_CANCEL_SECONDS = 2.0  # a cancelled commit ends within its polling interval, the rest is removing a few files

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """The result of one checkpoint on this rank.

    Attributes:
        iteration: the checkpoint.
        status: `committed` (rank 0), `written` (other ranks: rank 0 has yet to commit it), `skipped` (abandoned without
            an error: another rank skipped it or timed out, or the writer was closed), `failed`.
        reason: what happened, where it is not plain success.
        bytes: bytes of all ranks' files where it is committed, else what this rank wrote.
        write_seconds: time for writing, forcing to the disk and reading back.
        commit_seconds: time rank 0 waited for the others and committed.
        stall_seconds: how long the training thread was blocked by the snapshot.
        mean_second_moment: of this rank's gradients, by the optimizer (see `Shard`); None where it keeps none, or
            nothing was written.
        written_bytes: what this rank wrote, without carried files.
    """

    iteration: int
    status: Literal["committed", "written", "skipped", "failed"]
    reason: str = ""
    bytes: int = 0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    stall_seconds: float = 0.0
    mean_second_moment: float | None = None
    written_bytes: int = 0


class CheckpointWriter:
    """Persists snapshots in order, and returns their buffers to the pool.

    Args:
        store: where this rank writes.
        pool: where the snapshots come from, and go back to.
        save_timeout_seconds: rank 0 abandons a checkpoint if other parts are missing after this time.
        retention: how many checkpoints stay; None: the usual number.
        on_outcome: called when there is a further outcome; on any thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        pool: SnapshotPool,
        save_timeout_seconds: float = 600.0,
        retention: Retention | None = None,
        on_outcome: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._on_outcome = on_outcome
        self._pool = pool
        self._save_timeout_seconds = save_timeout_seconds
        self._retention = retention or Retention()
        # Each gives its outcome, and is told if it is dropped, because the writer closes.
        self._queue: queue.SimpleQueue[Callable[[bool], SaveOutcome] | None] = queue.SimpleQueue()
        self._outcomes: deque[SaveOutcome] = deque()
        self._pending = 0  # submitted and not yet through
        self._idle = threading.Condition()
        self._closing = False
        self._cancelled = threading.Event()
        # A daemon: an interpreter that exits without close() must not hang on a disk that does not answer.
        self._thread = threading.Thread(target=self._run, name="cpsr-writer", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a finished snapshot; returns at once."""
        if not self._put(partial(self._persist, snapshot)):
            self._add(self._persist(snapshot, dropped=True))

    def skip(self, iteration: int, reason: str) -> None:
        """Record that this rank has no snapshot for a due checkpoint, and mark it for rank 0; returns at once.

        The marker takes its turn behind the saves that were submitted before, also where these are dropped: no file
        system call is made here.
        """
        marked = partial(self._mark_skipped, iteration, reason)
        if not self._put(lambda _: SaveOutcome(iteration, "skipped", marked())):
            self._add(SaveOutcome(iteration, "skipped", reason))

    def _add(self, outcome: SaveOutcome) -> None:
        self._outcomes.append(outcome)
        self._on_outcome()

    def outcomes(self) -> list[SaveOutcome]:
        """What happened since the last call, oldest first."""
        drained: list[SaveOutcome] = []
        while self._outcomes:
            drained.append(self._outcomes.popleft())
        return drained

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until nothing is under way; False when the time is out."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Finish submitted work; after the timeout cancel a waiting commit, and drop what was not begun.

        Returns:
            False where the thread is still in the file system: its files are not committed, and ignored later.
        """
        with self._idle:
            self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        self._cancelled.set()
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            _log.warning("the checkpoint writer did not end within %.1f s; its last save is lost", timeout_seconds)
        return not self._thread.is_alive()

    def _put(self, work: Callable[[bool], SaveOutcome]) -> bool:
        """Queue it; False where the writer closes."""
        with self._idle:
            if not self._closing:
                self._pending += 1
                self._queue.put(work)
                return True
        return False

    def _run(self) -> None:
        yield_to_training()
        while (work := self._queue.get()) is not None:
            self._add(work(self._cancelled.is_set()))
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _persist(self, snapshot: Snapshot, dropped: bool) -> SaveOutcome:
        try:
            outcome = self._dropped(snapshot) if dropped else self._write_and_commit(snapshot)
        except Exception as error:  # noqa: BLE001 - every error must reach the training thread as an outcome
            outcome = self._failed(snapshot, error)
        if self._pool.occupancy.holds(snapshot):  # else nothing was copied
            self._pool.release(snapshot)
        return outcome

    def _dropped(self, snapshot: Snapshot) -> SaveOutcome:
        reason, stall = "the writer was closed before its turn", snapshot.stall_seconds
        return SaveOutcome(snapshot.iteration, "skipped", reason, stall_seconds=stall)

    def _write_and_commit(self, snapshot: Snapshot) -> SaveOutcome:
        started = time.perf_counter()
        written = self._store.write(snapshot)
        took = time.perf_counter() - started
        # Without experts, which a checkpoint may carry: so checkpoints are comparable.
        moments = snapshot.second_moments
        if not snapshot.lacking:
            moments = snapshot.contents.without_experts(snapshot.shard).second_moments()
        moment = None if moments is None else float(moments.double().mean())
        outcome = SaveOutcome(
            snapshot.iteration, "written", "", written, took, 0.0, snapshot.stall_seconds, moment, written
        )
        if self._store.rank != 0:
            return outcome
        started = time.perf_counter()
        result = self._store.commit(snapshot.iteration, self._save_timeout_seconds, self._cancelled)
        return replace(
            outcome,
            status="committed" if result.committed else "skipped",
            reason=self._retain() if result.committed else result.reason,
            bytes=result.bytes or written,
            commit_seconds=time.perf_counter() - started,
        )

    def _retain(self) -> str:
        """Delete old checkpoints; a failure here costs disk space and does not affect the new checkpoint."""
        try:
            self._store.retain(self._retention)
        except (OSError, CheckpointError) as error:
            _log.warning("old checkpoints could not be thinned or deleted: %s", error)
            return f"committed, but old checkpoints could not be thinned or deleted: {error}"
        return ""

    def _failed(self, snapshot: Snapshot, error: Exception) -> SaveOutcome:
        if isinstance(error, OSError | CheckpointError):
            reason = str(error)
        else:
            reason = f"unexpected {type(error).__name__}: {error}"
            _log.error("checkpoint %d failed, training goes on", snapshot.iteration, exc_info=error)
        reason = self._mark_skipped(snapshot.iteration, reason)
        return SaveOutcome(snapshot.iteration, "failed", reason, stall_seconds=snapshot.stall_seconds)

    def _mark_skipped(self, iteration: int, reason: str) -> str:
        """Write the skip marker; returns the reason, with the marker's own error."""
        try:
            self._store.skip(iteration, reason)
        except Exception as error:  # noqa: BLE001 - the thread must outlive this and report it
            _log.warning("checkpoint %d: the skip marker failed too: %s", iteration, error)
            return f"{reason}; the skip marker failed too ({error}), so rank 0 waits until its timeout"
        return reason


def yield_to_training() -> None:
    """Lower the priority of the calling thread, until it ends; Linux then lowers that of its transfers as well."""
    os.nice(NICENESS)
