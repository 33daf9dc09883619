"""The journal's one writer: a queue, a background thread and a connection, on global rank 0."""

import collections
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cpsr.errors import JournalDamagedError, JournalError
from cpsr.journal.events import import_events
from cpsr.journal.reader import JournalReader
from cpsr.journal.rows import EventRow, LifeRow, encode_json, to_sql
from cpsr.journal.schema import insert_sql, lacks_room, prepare, unreadable
from cpsr.journal.statements import LASTING, Apply, Row, freeze, statement
from cpsr.journal.thinning import thin
from cpsr.journal.totals import add_memory_stalls

__all__ = ["Journal"]

log = logging.getLogger(__name__)

# Writes that wait while the file cannot be written (full disk, locked by another process). Beyond that the oldest step
# rows are dropped first, from a queue of their own: 100,000 steps at the default flush of 20 iterations, about 20 MB.
STEP_WRITES_MAX = 5_000
RECORD_WRITES_MAX = 5_000
RETRY_SECONDS = 1.0  # between attempts to write; a full disk or a lock rarely clears sooner
BUSY_SECONDS = 5.0  # how long SQLite itself waits for another process's lock
START_SECONDS = 10.0  # how long a life waits for its row before it continues without
CLOSE_SECONDS = 10.0  # how long an exit waits for the last rows

# A row that fails with one of these fails every time; everything else may pass at the next attempt.
_ROW_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    JournalError,
    OSError,
    OverflowError,
    ValueError,
)


Outcome = Literal["kept", "vetoed", "rolled_back", "watching"]


@dataclass(frozen=True, slots=True)
class _Write:
    kind: str
    rows: int
    apply: Apply
    lasting: bool = False  # never dropped: a life has few of these, and the other rows depend on them


class Journal:
    """The writing side of `<run_dir>/journal.db`; opened by global rank 0 alone, called from any of its threads.

    Recording never blocks, and never raises because of the disk: rows wait in a bounded queue and are retried, also if
    the disk is full when the journal is opened. A failure is logged once per kind, and returned once by `failures()`.
    Rows dropped by the bound are counted in `dropped_rows`, and in an event once the file can be written again.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection | None, next_life: int, full_steps: int | None = None
    ) -> None:
        self.path = path
        self._connection = connection  # None: the disk has had no room for it yet
        self._next_life = next_life
        self._full_steps = full_steps
        self._life: int | None = None
        self._closed_because: str | None = None  # why it could not be opened at once
        self._changed = threading.Condition()
        self._lasting: collections.deque[_Write] = collections.deque()
        self._records: collections.deque[_Write] = collections.deque()
        self._steps: collections.deque[_Write] = collections.deque()
        self._batch: list[_Write] = []  # taken by the thread, not committed yet
        self._closing = self._abandoned = self._stopped = False
        self._failures: list[str] = []
        self._noted: set[str] = set()  # kinds of failures
        self._dropped_rows = self._dropped_rows_recorded = 0
        self._thread = threading.Thread(target=self._run, name="cpsr-journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, full_steps: int | None = None) -> "Journal":
        """Open the journal, or create it and its directory.

        If the disk has no room for it, it is opened once there is some; training does not wait for that.

        Args:
            path: of the file.
            full_steps: number of newest steps that are all kept; older ones are thinned out. None keeps every step.

        Raises:
            JournalError: the file is no journal, is damaged or locked, or has a newer schema; it is not changed.
        """
        try:
            connection, next_life = _connect(path)
        except (sqlite3.Error, OSError) as error:
            if lacks_room(error, path):
                journal = cls(path, None, _next_life(path), full_steps)
                journal._note_closed(error)
                return journal
            if isinstance(error, sqlite3.Error):
                raise unreadable(path, error) from error
            raise JournalError(f"cannot create the directory of the journal {path}: {error.strerror}") from error
        return cls(path, connection, next_life, full_steps)

    def start_life(self, mode: str, after: int = -1, ranks: int | None = None) -> int:
        """Begin a life of the run and return its number, counted from 0; waits until its row is written.

        Args:
            mode: the configured recovery mode.
            ranks: number of them; None: not known.
            after: newest life known from another source: a number is never used twice, even if the journal was lost.

        If the file cannot be written, the row is retried like any other. A file that could not be read either may turn
        out to contain this life's number already. Then nothing of this life is recorded, and `failures()` reports that.
        """
        with self._changed:  # the thread may just be opening the file
            life = self._life = max(self._next_life, after + 1)
            self._next_life = life + 1
        self.record(LifeRow(life=life, mode=mode, pid=os.getpid(), host=socket.gethostname(), ranks=ranks))
        if self._closed_because is None:
            self.flush(START_SECONDS)
        else:
            message = f"the life began without its journal ({self._closed_because}); rows waited until now"
            late = EventRow(life=life, rank=0, kind="journal_late", message=message)
            self._enqueue(_Write("EventRow", 1, statement(EventRow, [freeze(late)]), lasting=True))
        return life

    def end_life(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Record how the current life ended."""
        values = (time.time(), ending, self._life)
        statement = "UPDATE lives SET ended_unix_seconds = ?, ending = ? WHERE life = ?"
        self._enqueue(_Write("end_life", 1, lambda connection: connection.execute(statement, values)))

    def record(self, *rows: Row) -> None:
        """Record rows, all of one table.

        A step that is repeated after a recovery keeps its earlier row. A backtest that is recorded already,
        with equal values, is ignored.

        Raises:
            TypeError: the rows are of several tables.
        """
        kinds = {type(row) for row in rows}
        if len(kinds) > 1:
            raise TypeError(f"one call records rows of one table, not of {sorted(kind.__name__ for kind in kinds)}")
        for kind in kinds:
            apply, count = self._statement(kind, rows)
            if count:
                self._enqueue(_Write(kind.__name__, count, apply, lasting=kind in LASTING))

    def update_recovery(self, recovery_id: str, outcome: Outcome, guard: Mapping[str, Any]) -> None:
        """Replace the outcome and the guard's measurements of a recorded recovery."""
        try:
            values = (outcome, encode_json(guard), recovery_id)
        except (TypeError, ValueError) as error:
            self._reject("update_recovery", 1, error)
            return

        def apply(connection: sqlite3.Connection) -> None:
            if connection.execute("UPDATE recoveries SET outcome = ?, guard = ? WHERE id = ?", values).rowcount != 1:
                raise JournalError(f"there is no recovery {recovery_id!r} to update")

        self._enqueue(_Write("update_recovery", 1, apply, lasting=True))

    def add_memory_stalls(self, snapshots: int, seconds: float) -> None:
        """Add the stalls of so many snapshots to host memory to the run's totals."""
        # Among the steps that they lie in: dropped with them, if the file cannot be written.
        self._enqueue(_Write("StepRow", 0, lambda connection: add_memory_stalls(connection, snapshots, seconds)))

    def import_events(self, directory: Path) -> None:
        """Import new rows of the other ranks' event files in `directory`; every line exactly once."""
        kind = f"event files in {directory}"
        with self._changed:
            if any(write.kind == kind for write in self._lasting):
                return  # the import that waits will read these lines too
            life = self._life if self._life is not None else self._next_life
        self._enqueue(_Write(kind, 0, lambda connection: import_events(connection, directory, life), lasting=True))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all rows so far are committed or rejected; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle() or self._stopped, timeout_seconds) and self._idle()

    def failures(self) -> list[str]:
        """Failures since the last call, one message per kind; for the training thread to report."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    @property
    def dropped_rows(self) -> int:
        """Rows that never reached the file."""
        with self._changed:
            return self._dropped_rows

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write the queued rows and close the file; rows not written in time are counted and logged."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
            lost_rows = sum(write.rows for write in (*self._batch, *self._lasting, *self._records, *self._steps))
        if lost_rows:
            with self._changed:
                self._dropped_rows += lost_rows
            self._note(
                "close", f"closed with {lost_rows} rows unwritten after {timeout_seconds} seconds; they are lost"
            )

    def _idle(self) -> bool:
        return not (self._lasting or self._records or self._steps or self._batch)

    def _statement(self, kind: type[Row], rows: Sequence[Row]) -> tuple[Apply, int]:
        """Freeze rows on the caller's thread, which may change the referenced objects later."""
        frozen = []
        for row in rows:
            try:
                frozen.append(freeze(row))
            except (TypeError, ValueError) as error:
                self._reject(kind.__name__, 1, error)
        return statement(kind, frozen), len(frozen)

    def _enqueue(self, write: _Write) -> None:
        queue, limit = self._queue(write)
        with self._changed:
            if self._stopped and not self._closing:
                self._dropped_rows += write.rows  # the reason was reported when the thread stopped
                return
            accepted = not self._closing
            dropped = [queue.popleft()] if accepted and limit is not None and len(queue) >= limit else []
            if accepted:
                queue.append(write)
                self._changed.notify_all()
        for lost in dropped:
            self._drop(lost.kind, lost.rows, f"more than {limit} writes wait for the file; the oldest rows are dropped")
        if not accepted:
            self._drop(write.kind, write.rows, "the row was recorded after the journal had closed and is lost")

    def _queue(self, write: _Write) -> tuple[collections.deque[_Write], int | None]:
        """The queue of a write, and its limit."""
        if write.lasting:
            return self._lasting, None
        return (self._steps, STEP_WRITES_MAX) if write.kind == "StepRow" else (self._records, RECORD_WRITES_MAX)

    def _reject(self, kind: str, rows: int, error: BaseException) -> None:
        self._drop(kind, rows, f"the row cannot be stored and is dropped: {error}")

    def _drop(self, kind: str, rows: int, message: str) -> None:
        with self._changed:
            self._dropped_rows += rows
        self._note(f"{kind} dropped", f"{kind}: {message}")

    def _note(self, kind: str, message: str) -> None:
        with self._changed:
            first = kind not in self._noted
            if first:
                self._noted.add(kind)
                self._failures.append(f"journal {self.path}: {message}")
        if first:
            log.error("journal %s: %s (further failures of this kind are not logged)", self.path, message)

    def _note_closed(self, error: sqlite3.Error | OSError) -> None:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        self._closed_because = f"{name}: {error}"
        message = f"cannot be opened ({self._closed_because}): rows wait for room on its disk, training goes on without"
        self._note("opening", message)

    def _run(self) -> None:
        try:
            while (connection := self._connection) is None:
                if not self._open_late():
                    return
            while self._take_batch():
                while not self._commit_batch(connection):
                    if self._is_abandoned_within(RETRY_SECONDS):
                        return
                self._thin(connection)
        except JournalError as error:
            self._note("file", f"{error}; nothing is recorded in this life, training goes on")
        except Exception as error:
            # A defect in this file: training goes on without a journal, and `failures` reports it.
            log.exception("the journal's thread stopped; nothing more is recorded in this life")
            self._note("thread", f"its thread stopped, nothing more is recorded: {type(error).__name__}: {error}")
        finally:
            if self._connection is not None:
                self._connection.close()
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _is_abandoned_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._abandoned, seconds)

    def _open_late(self) -> bool:
        """Retry to open the file, after a while; False if the journal was abandoned.

        Raises:
            JournalError: the file can be read now, but must not be written, or not under this life's number.
        """
        if self._is_abandoned_within(RETRY_SECONDS):
            return False
        try:
            self._connection, next_life = _connect(self.path)
        except (sqlite3.Error, OSError) as error:
            reported = unreadable(self.path, error)
            if isinstance(reported, JournalDamagedError):
                raise reported from error
            return True
        self._check_life(next_life)
        return True

    def _check_life(self, next_life: int) -> None:
        """Check that the file does not contain this life's number, which was assigned before it could be read.

        Raises:
            JournalError: it does; the rows of two lives would be mixed.
        """
        with self._changed:
            life = self._life
            self._next_life = max(self._next_life, next_life)
        if life is not None and life < next_life:
            raise JournalError(
                f"this life was given number {life} while {self.path} could not be read ({self._closed_because}), "
                f"which has lives up to {next_life - 1}; its content is kept, checkpoints are not affected; restart "
                "the job to have it recorded again"
            )

    def _take_batch(self) -> bool:
        """Wait for work and take all of it; False once the journal is closed and everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._idle() or self._closing)
            # A life's row comes first: other writes update it.
            self._batch = [*self._lasting, *self._records, *self._steps]
            self._lasting.clear()
            self._records.clear()
            self._steps.clear()
            return bool(self._batch)

    def _commit_batch(self, connection: sqlite3.Connection) -> bool:
        dropped_rows = self.dropped_rows
        rejected: list[tuple[_Write, BaseException]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write in self._batch:
                connection.execute("SAVEPOINT one_write")
                try:
                    write.apply(connection)
                except _ROW_ERRORS as error:
                    connection.execute("ROLLBACK TO one_write")
                    rejected.append((write, error))
                connection.execute("RELEASE one_write")
            if dropped_rows > self._dropped_rows_recorded:
                self._record_drops(connection, dropped_rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # After some errors (a full disk) SQLite has rolled back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            self._note(name, f"cannot write ({name}: {error}); rows wait and are tried again, training goes on")
            return False
        self._dropped_rows_recorded = dropped_rows
        for write, row_error in rejected:
            self._reject(write.kind, write.rows, row_error)
        with self._changed:
            self._batch = []
            self._changed.notify_all()
        return True

    def _thin(self, connection: sqlite3.Connection) -> None:
        """Delete one slice per batch: a batch has a few dozen steps, so that even an old file is thinned soon."""
        if self._full_steps is None:
            return
        try:
            thin(connection, self._full_steps)
        except (sqlite3.Error, ValueError) as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            self._note(
                "thinning", f"old steps cannot be thinned out ({name}: {error}); all are kept, and thinning is retried"
            )

    def _record_drops(self, connection: sqlite3.Connection, dropped_rows: int) -> None:
        message = f"{dropped_rows - self._dropped_rows_recorded} rows could not be recorded before this time"
        event = EventRow(life=self._life or 0, rank=0, kind="journal_rows_dropped", message=message)
        connection.execute(insert_sql(EventRow), to_sql(event))


def _connect(path: Path) -> tuple[sqlite3.Connection, int]:
    """A writing connection for the journal's thread, and the number of the next life.

    Raises:
        JournalError: the file is no journal, or has a newer schema.
        OSError: it, or its directory, cannot be created.
        sqlite3.Error: anything else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        prepare(connection, path)
        (last,) = connection.execute("SELECT COALESCE(MAX(life), -1) FROM lives").fetchone()
    except (sqlite3.Error, JournalError):
        connection.close()
        raise
    return connection, last + 1


def _next_life(path: Path) -> int:
    """Number of the next life, from a file that cannot be written now; 0 if it cannot be read."""
    try:
        with JournalReader(path, unwritten=True) as reader:
            return max((life.life for life in reader.lives()), default=-1) + 1
    except JournalError:
        return 0
