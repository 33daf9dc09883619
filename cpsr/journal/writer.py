"""The journal's one writer: a queue, a background thread and a connection, on global rank 0."""

import collections
import itertools
import json
import logging
import math
import operator
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cpsr.errors import JournalError
from cpsr.journal.account import Account
from cpsr.journal.database import lacks_room, prepare, read_fact, unreadable, write_fact
from cpsr.journal.events import read_new_rows
from cpsr.journal.reader import JournalReader
from cpsr.journal.rows import CheckpointRow, EventRow, FailureRow, LifeRow, Row, StepRow, columns_of, decode

__all__ = ["FULL_STEPS", "Journal", "insert_event", "insert_steps", "thin"]

log = logging.getLogger(__name__)

# Writes that wait while the file cannot be written (full disk, locked by another process): 100,000 steps, about 20 MB.
# Beyond that the oldest steps are dropped first.
WAITING_MAX = 5_000
RETRY_SECONDS = 1.0  # between attempts to write; a full disk or a lock rarely clears sooner
BUSY_SECONDS = 5.0  # how long SQLite itself waits for another process's lock
START_SECONDS = 10.0  # how long a life waits for its row before it continues without
CLOSE_SECONDS = 10.0  # how long an exit waits for the last rows
# Newest steps that are all kept; of older ones every second, of those twice as old every fourth, and so on: 10 million
# steps become about 430,000 rows. The fit of the loss looks 20,000 back.
FULL_STEPS = 100_000
SLICE_ROWS = 2_000  # most rows deleted in a transaction: some milliseconds, while new rows wait in their queue
PACE_STEPS = 20  # the newest steps before a failure, whose mean is that of the steps that it kept from the journal

# A row that fails with one of these fails every time; everything else may pass at the next attempt.
_ROW_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    OSError,
    OverflowError,
    ValueError,
)
# Writes rows, and returns the account of the run's time with them.
Apply = Callable[[sqlite3.Connection, Account | None], Account | None]


@dataclass(frozen=True, slots=True)
class _Write:
    kind: str
    rows: int
    apply: Apply


class Journal:
    """The writing side of `<run_dir>/journal.db`; opened by global rank 0 alone, called from any of its threads.

    Recording never blocks, and never raises because of the disk: rows wait in a bounded queue and are retried. A
    failure is logged once per kind, and returned once by `failures()`. Rows dropped by the bound are counted in
    `dropped_rows`, and in an event once the file can be written again. If the disk has no room for the file when it is
    opened, nothing is recorded in this life.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection | None, next_life: int, full_steps: int) -> None:
        self.path = path
        self._next_life = next_life
        self._full_steps = full_steps
        self._life: LifeRow | None = None
        self._changed = threading.Condition()
        self._queue: collections.deque[_Write] = collections.deque()
        self._batch: list[_Write] = []  # popped by the thread, not committed yet
        self._closing = self._abandoned = False
        self._stopped = connection is None
        self._failures: list[str] = []
        self._noted: set[str] = set()  # kinds of failures
        self._dropped_rows = self._dropped_rows_recorded = 0
        self._thread = threading.Thread(target=self._run, args=(connection,), name="cpsr-journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, full_steps: int = FULL_STEPS) -> "Journal":
        """Open the journal, or create it and its directory.

        Args:
            path: of the file.
            full_steps: number of newest steps that are all kept; older ones are thinned out.

        Raises:
            JournalError: the file is no journal, is damaged or locked, or has another schema; it is not changed.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                prepare(connection, path)
                (last,) = connection.execute("SELECT COALESCE(MAX(life), -1) FROM events").fetchone()
            except (sqlite3.Error, JournalError):
                connection.close()
                raise
            return cls(path, connection, last + 1, full_steps)
        except (sqlite3.Error, OSError) as error:
            if lacks_room(error, path):
                journal = cls(path, None, _next_life(path), full_steps)
                name = getattr(error, "sqlite_errorname", type(error).__name__)
                why = "there is no room on its disk; nothing is recorded in this life, training goes on"
                journal._note("opening", f"cannot be opened ({name}: {error}): {why}")
                return journal
            if isinstance(error, sqlite3.Error):
                raise unreadable(path, error) from error
            raise JournalError(f"cannot create the directory of the journal {path}: {error.strerror}") from error

    def start_life(self, mode: str, after: int = -1, ranks: int | None = None) -> int:
        """Begin a life of the run and return its number, counted from 0; waits until its row is written.

        Args:
            mode: the configured recovery mode.
            after: newest life known from another source: a number is never used twice, even if the journal was lost.
            ranks: number of them; None: not known.
        """
        life = max(self._next_life, after + 1)
        self._next_life = life + 1
        self._life = LifeRow(life=life, mode=mode, pid=os.getpid(), host=socket.gethostname(), ranks=ranks)
        self.record(self._life)
        self.flush(START_SECONDS)
        return life

    def end_life(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Record how the current life ended."""
        if self._life is not None:
            self.record(replace(self._life, ended_unix_seconds=time.time(), ending=ending))

    def record(self, *rows: Row | StepRow) -> None:
        """Record rows; steps that come together are stored together or not at all.

        A life or a recovery is recorded again when something about it has changed: readers take the newest row.
        """
        steps = [row for row in rows if isinstance(row, StepRow)]
        if steps:
            self._record_steps(steps)
        for row in rows:
            if not isinstance(row, StepRow):
                self._record(row)

    def add_memory_stalls(self, snapshots: int, seconds: float) -> None:
        """Add the stalls of so many snapshots to host memory to the run's account."""

        def apply(_: sqlite3.Connection, account: Account | None) -> Account | None:
            return None if account is None else account.with_memory_stalls(snapshots, seconds)

        self._enqueue(_Write("StepRow", 0, apply))

    def import_events(self, directory: Path) -> None:
        """Import new rows of the other ranks' event files in `directory`; every line exactly once."""
        life = self._next_life if self._life is None else self._life.life

        def apply(connection: sqlite3.Connection, account: Account | None) -> Account | None:
            for path in sorted(directory.glob("*.jsonl")):
                key = f"events_read:{path.name}"
                rows, place = read_new_rows(path, json.loads(read_fact(connection, key) or "[0, 0]"), life)
                for row in rows:
                    insert_event(connection, row)
                write_fact(connection, key, json.dumps(place))
            return account

        self._enqueue(_Write(f"event files in {directory}", 0, apply))

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
            lost_rows = sum(write.rows for write in (*self._batch, *self._queue))
        if lost_rows:
            why = f"closed with {lost_rows} rows unwritten after {timeout_seconds} seconds; they are lost"
            self._drop("close", lost_rows, why)

    def _idle(self) -> bool:
        return not (self._queue or self._batch)

    def _record(self, row: Row) -> None:
        try:
            values = columns_of(row)  # on the caller's thread, which may change the referenced objects later
        except (TypeError, ValueError) as error:
            self._reject(type(row).__name__, 1, error)
            return

        def apply(connection: sqlite3.Connection, account: Account | None) -> Account | None:
            account = _accounted(connection, account, row)
            connection.execute(_INSERT_EVENT, values)
            return account

        self._enqueue(_Write(type(row).__name__, 1, apply))

    def _record_steps(self, steps: Sequence[StepRow]) -> None:
        at = time.time()

        def apply(connection: sqlite3.Connection, account: Account | None) -> Account | None:
            for life, of_life in itertools.groupby(steps, key=lambda step: step.life):
                if account is None:
                    account = Account(life=life, began_unix_seconds=at, until_unix_seconds=at)
                account = account.with_steps(list(of_life), at)
            insert_steps(connection, steps)
            return account

        self._enqueue(_Write("StepRow", len(steps), apply))

    def _enqueue(self, write: _Write) -> None:
        dropped: _Write | None = None
        with self._changed:
            if self._stopped and not self._closing:
                self._dropped_rows += write.rows  # the reason was reported when the thread stopped
                return
            accepted = not self._closing
            if accepted:
                if len(self._queue) >= WAITING_MAX:
                    dropped = next((one for one in self._queue if one.kind == "StepRow"), self._queue[0])
                    self._queue.remove(dropped)
                self._queue.append(write)
                self._changed.notify_all()
        if dropped is not None:
            why = f"more than {WAITING_MAX} writes wait for the file; the oldest rows are dropped"
            self._drop(dropped.kind, dropped.rows, why)
        if not accepted:
            self._drop(write.kind, write.rows, "the row was recorded after the journal had closed and is lost")

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

    def _run(self, connection: sqlite3.Connection | None) -> None:
        if connection is None:
            return
        try:
            while self._pop_batch():
                while not self._commit_batch(connection):
                    with self._changed:
                        if self._changed.wait_for(lambda: self._abandoned, RETRY_SECONDS):
                            return
                self._thin(connection)
        except Exception as error:
            # A defect in this file: training goes on without a journal, and `failures` reports it.
            log.exception("the journal's thread stopped; nothing more is recorded in this life")
            self._note("thread", f"its thread stopped, nothing more is recorded: {type(error).__name__}: {error}")
        finally:
            connection.close()
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _pop_batch(self) -> bool:
        """Wait for work and take all of it; False once the journal is closed and everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._idle() or self._closing)
            self._batch = list(self._queue)
            self._queue.clear()
            return bool(self._batch)

    def _commit_batch(self, connection: sqlite3.Connection) -> bool:
        dropped_rows = self.dropped_rows
        rejected: list[tuple[_Write, BaseException]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            before = account = _read_account(connection)
            for write in self._batch:
                connection.execute("SAVEPOINT one_write")
                try:
                    account = write.apply(connection, account)
                except _ROW_ERRORS as error:
                    connection.execute("ROLLBACK TO one_write")
                    rejected.append((write, error))
                connection.execute("RELEASE one_write")
            if account is not None and account is not before:
                row = account.life, json.dumps(asdict(account))
                connection.execute("INSERT OR REPLACE INTO accounts VALUES (?, ?)", row)
            if dropped_rows > self._dropped_rows_recorded:
                message = f"{dropped_rows - self._dropped_rows_recorded} rows could not be recorded before this time"
                life = 0 if self._life is None else self._life.life
                insert_event(connection, EventRow(life=life, rank=0, kind="journal_rows_dropped", message=message))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(connection)
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
        try:
            thin(connection, self._full_steps)
        except (sqlite3.Error, ValueError) as error:
            self._roll_back(connection)
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            why = "all are kept, and thinning is retried"
            self._note("thinning", f"old steps cannot be thinned out ({name}: {error}); {why}")

    @staticmethod
    def _roll_back(connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # after some errors (a full disk) SQLite has rolled back already
            connection.execute("ROLLBACK")


def thin(connection: sqlite3.Connection, full_steps: int) -> bool:
    """Delete one slice of old steps; False if there is no complete slice to delete.

    The newest N steps are all kept. Of those with N later ones every second iteration is, of those with 2 N every
    fourth, and so on: every doubling of the run adds N / 2 rows. The iteration decides, not the row number: of an
    iteration that was trained more than once, the newest step is never deleted first.

    Args:
        connection: a writing one, outside of a transaction.
        full_steps: N.

    Raises:
        sqlite3.Error: nothing was deleted; a transaction may be open.
        ValueError: a value in `meta` is no number; nothing was deleted.
    """
    (newest,) = connection.execute("SELECT COALESCE(MAX(row), 0) FROM steps").fetchone()
    # The finest level first: after it, a slice of the next level has as many rows although it is twice as long.
    every = 2
    while (boundary := newest - full_steps * (every // 2)) > 0:
        key = f"steps_thinned:{every}"  # up to which row only one of so many iterations was kept
        done = int(read_fact(connection, key) or 0)
        until = done + SLICE_ROWS * (every // 2)
        if until <= boundary:
            connection.execute("BEGIN IMMEDIATE")
            chosen = "row > ? AND row <= ? AND iteration % ? != 0"
            connection.execute(f"DELETE FROM steps WHERE {chosen}", (done, until, every))  # noqa: S608
            write_fact(connection, key, str(until))
            connection.execute("COMMIT")
            return True
        every *= 2
    return False


_INSERT_EVENT = "INSERT INTO events (kind, life, iteration, unix_seconds, content) VALUES (?, ?, ?, ?, ?)"


def insert_event(connection: sqlite3.Connection, row: Row) -> None:
    """Insert one row into the table of events, in the open transaction.

    Raises:
        ValueError: it cannot be stored.
    """
    connection.execute(_INSERT_EVENT, columns_of(row))


def insert_steps(connection: sqlite3.Connection, steps: Sequence[StepRow]) -> None:
    """Insert steps, in the open transaction.

    Raises:
        TypeError, ValueError: one cannot be stored.
    """
    columns = "INSERT INTO steps (life, iteration, loss, learning_rate, seconds, applied)"
    connection.executemany(f"{columns} VALUES (?, ?, ?, ?, ?, ?)", map(_step_values, steps))


def _step_values(step: StepRow) -> tuple[Any, ...]:
    def real(value: float | None) -> float | str | None:
        # SQLite turns NaN into NULL, which would read back as "unknown".
        return None if value is None else "nan" if math.isnan(value) else float(value)

    life, iteration = operator.index(step.life), operator.index(step.iteration)
    return life, iteration, real(step.loss), real(step.learning_rate), real(step.seconds), bool(step.applied)


def _accounted(connection: sqlite3.Connection, account: Account | None, row: Row) -> Account | None:
    """The account with what a row adds to it."""
    if isinstance(row, LifeRow) and row.ending == "running":
        at = row.started_unix_seconds
        if account is None:
            return Account(life=row.life, began_unix_seconds=at, until_unix_seconds=at)
        newest = "SELECT content FROM events WHERE kind = 'life' ORDER BY row DESC LIMIT 1"
        before = connection.execute(newest).fetchone()
        return account if before is None else account.with_life(row, decode(LifeRow, before[0]))
    if account is not None and isinstance(row, CheckpointRow):
        return account.with_checkpoint(row)
    if account is not None and isinstance(row, FailureRow):
        newest = "SELECT seconds FROM steps WHERE life = ? ORDER BY row DESC LIMIT ?"
        recent = [float(seconds) for (seconds,) in connection.execute(newest, (row.life, PACE_STEPS))]
        return account.with_failure(row.life, row.iteration, recent)
    return account


def _read_account(connection: sqlite3.Connection) -> Account | None:
    found = connection.execute("SELECT content FROM accounts ORDER BY life DESC LIMIT 1").fetchone()
    return None if found is None else Account(**json.loads(found[0]))


def _next_life(path: Path) -> int:
    """Number of the next life, from a file that cannot be written now; 0 if it cannot be read."""
    try:
        with JournalReader(path, unwritten=True) as reader:
            return max((life.life for life in reader.lives()), default=-1) + 1
    except JournalError:
        return 0
