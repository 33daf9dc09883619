"""The journal's one writer: a queue, a background thread and a connection, on global rank 0."""

import collections
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from cpsr.errors import JournalError
from cpsr.journal.database import lacks_room, prepare, unreadable
from cpsr.journal.events import read_new_rows
from cpsr.journal.rows import EventRow, LifeRow, Row, StepRow, columns_of, step_columns_of

__all__ = ["FULL_STEPS", "INSERT_STEP", "Journal", "thin"]

log = logging.getLogger(__name__)

RowT = TypeVar("RowT")

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
THIN_STEPS = 2_000  # recorded steps after which old ones are thinned out: some ten milliseconds, while new rows queue

INSERT_STEP = "INSERT INTO steps (life, iteration, loss, learning_rate, seconds, applied) VALUES (?, ?, ?, ?, ?, ?)"
INSERT_EVENT = "INSERT INTO events (kind, life, iteration, unix_seconds, content) VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class _Write:
    """Rows that are stored together.

    Attributes:
        kind: the type of the rows, for messages.
        rows: their number.
        apply: stores them in the open transaction.
    """

    kind: str
    rows: int
    apply: Callable[[sqlite3.Connection], object]


class Journal:
    """The writing side of `<run_dir>/journal.db`; opened by global rank 0 alone, called from any of its threads.

    Recording never blocks, and never raises because of the disk: rows wait in a bounded queue and are retried. A
    failure is logged once per kind. Rows dropped by the bound are counted in `dropped_rows`, and in an event once the
    file can be written again. If the disk has no room for the file when it is opened, nothing is recorded in this life.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection | None, next_life: int, full_steps: int) -> None:
        self.path = path
        self.dropped_rows = 0  # never reached the file
        self._next_life, self._full_steps = next_life, full_steps
        self._life: LifeRow | None = None
        self._changed = threading.Condition()
        self._queue: collections.deque[_Write] = collections.deque()
        self._batch: list[_Write] = []  # popped by the thread, not committed yet
        self._closing = self._abandoned = False
        self._stopped = connection is None
        self._logged: set[str] = set()  # kinds of failures
        self._dropped_rows_recorded = self._thinned_steps = 0
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
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            if lacks_room(error, path):
                journal = cls(path, None, 0, full_steps)
                why = "there is no room on its disk; nothing is recorded in this life, training goes on"
                journal._log_once("opening", f"cannot be opened ({name}: {error}): {why}")
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
            self._record("StepRow", INSERT_STEP, steps, step_columns_of)
        for row in rows:
            if not isinstance(row, StepRow):
                self._record(type(row).__name__, INSERT_EVENT, [row], columns_of)

    def _record(
        self, kind: str, statement: str, rows: Sequence[RowT], columns: Callable[[RowT], tuple[Any, ...]]
    ) -> None:
        try:
            values = [columns(row) for row in rows]  # the caller may change the referenced objects later
        except (TypeError, ValueError) as error:
            self._drop(kind, len(rows), f"the row cannot be stored and is dropped: {error}")
            return
        self._enqueue(kind, len(rows), lambda connection: connection.executemany(statement, values))

    def import_events(self, directory: Path) -> None:
        """Import new rows of the other ranks' event files in `directory`; every line exactly once."""
        life = self._next_life if self._life is None else self._life.life
        self._enqueue("event files", 0, partial(self._store_event_files, directory=directory, life=life))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all rows so far are committed or rejected; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle() or self._stopped, timeout_seconds) and self._idle()

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

    def _enqueue(self, kind: str, rows: int, apply: Callable[[sqlite3.Connection], object]) -> None:
        with self._changed:
            if self._closing or self._stopped:
                dropped, why = (kind, rows), "the row was recorded after the journal had stopped and is lost"
            else:
                dropped, why = ("", 0), f"more than {WAITING_MAX} writes wait for the file; the oldest rows are dropped"
                if len(self._queue) >= WAITING_MAX:
                    oldest = next((one for one in self._queue if one.kind == "StepRow"), self._queue[0])
                    self._queue.remove(oldest)
                    dropped = oldest.kind, oldest.rows
                self._queue.append(_Write(kind, rows, apply))
                self._changed.notify_all()
        if dropped[1]:
            self._drop(*dropped, why)

    def _drop(self, kind: str, rows: int, message: str) -> None:
        with self._changed:
            self.dropped_rows += rows
            known = bool(self._logged & {"opening", "thread"})  # which have said that nothing is recorded
        if not known:
            self._log_once(f"{kind} dropped", f"{kind}: {message}")

    def _log_once(self, kind: str, message: str) -> None:
        with self._changed:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.error("journal %s: %s (further failures of this kind are not logged)", self.path, message)

    # On the background thread

    def _run(self, connection: sqlite3.Connection | None) -> None:
        if connection is None:
            return
        try:
            while self._pop_batch():
                while not self._commit_batch(connection):
                    with self._changed:
                        if self._changed.wait_for(lambda: self._abandoned, RETRY_SECONDS):
                            return
                self._thin_if_due(connection)
        except Exception as error:
            # A defect in this file: training goes on without a journal.
            log.exception("the journal's thread stopped; nothing more is recorded in this life")
            self._log_once("thread", f"its thread stopped, nothing more is recorded: {type(error).__name__}: {error}")
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
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write in self._batch:
                write.apply(connection)
            if dropped_rows > self._dropped_rows_recorded:
                message = f"{dropped_rows - self._dropped_rows_recorded} rows could not be recorded before this time"
                life = 0 if self._life is None else self._life.life
                lost = EventRow(life=life, rank=0, kind="journal_rows_dropped", message=message)
                connection.execute(INSERT_EVENT, columns_of(lost))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:  # after some errors (a full disk) SQLite has rolled back already
                connection.execute("ROLLBACK")
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            self._log_once(name, f"cannot write ({name}: {error}); rows wait and are tried again, training goes on")
            return False
        self._dropped_rows_recorded = dropped_rows
        with self._changed:
            self._thinned_steps += sum(write.rows for write in self._batch if write.kind == "StepRow")
            self._batch = []
            self._changed.notify_all()
        return True

    def _store_event_files(self, connection: sqlite3.Connection, directory: Path, life: int) -> None:
        places = dict(connection.execute("SELECT name, bytes_read FROM event_files").fetchall())
        for path in sorted(directory.glob("*.jsonl")):
            try:
                rows, place = read_new_rows(path, places.get(path.name, 0), life)
            except OSError as error:
                self._log_once("event files", f"events of another rank cannot be read now: {error}")
                continue
            if place == places.get(path.name):
                continue
            connection.executemany(INSERT_EVENT, rows)
            connection.execute("INSERT OR REPLACE INTO event_files VALUES (?, ?)", (path.name, place))

    def _thin_if_due(self, connection: sqlite3.Connection) -> None:
        if self._thinned_steps < THIN_STEPS:
            return
        self._thinned_steps = 0
        try:
            thin(connection, self._full_steps)
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            self._log_once("thinning", f"old steps cannot be thinned out now ({name}: {error}) and are kept")


def thin(connection: sqlite3.Connection, full_steps: int) -> None:
    """Delete old steps.

    The newest N steps are all kept. Of those with N later ones every second iteration is, of those with 2 N every
    fourth, and so on: every doubling of the run adds N / 2 rows. The iteration decides, not the row number: of an
    iteration that was trained more than once, the newest step is never deleted first.

    Args:
        connection: a writing one, outside of a transaction.
        full_steps: N.

    Raises:
        sqlite3.Error: not everything was deleted.
    """
    (newest,) = connection.execute("SELECT COALESCE(MAX(row), 0) FROM steps").fetchone()
    every = 2
    while (boundary := newest - full_steps * (every // 2)) > 0:
        connection.execute("DELETE FROM steps WHERE row <= ? AND iteration % ? != 0", (boundary, every))
        every *= 2
