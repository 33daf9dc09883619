"""Commands to a running job: `<run_dir>/commands.db`, which the service writes and rank 0 reads.

A file of its own: the journal has one writer, and that is the job.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpsr.errors import JournalError, TooManyReportsError
from cpsr.journal.schema import filesystem_of, is_network, unreadable

__all__ = [
    "COMMANDS_FILE",
    "ReportedFailure",
    "read_commands",
    "report_failure",
    "reported_failures",
    "write_command",
]

COMMANDS_FILE = "commands.db"
APPLICATION_ID = int.from_bytes(b"CPSc", "big")
BUSY_SECONDS = 5.0
# Rank 0 reads them all at every fit: far more than the failures of a run, and few enough for one read.
MAX_REPORTED_FAILURES = 10_000
# The loss of a rack causes some hundred reports. A program that reports in a loop must not fill the file, nor distort
# the failure rate.
REPORTS_PER_HOUR_MAX = 1000
HOUR_SECONDS = 3600.0
TABLES = (
    """
CREATE TABLE reported_failures (
    id INTEGER PRIMARY KEY, description TEXT NOT NULL, failed_unix_seconds REAL NOT NULL,
    created_unix_seconds REAL NOT NULL)
""",
    """
CREATE TABLE overrides (
    id INTEGER PRIMARY KEY, interval_min_iterations INTEGER CHECK (interval_min_iterations >= 1),
    interval_max_iterations INTEGER CHECK (interval_max_iterations >= 1), reason TEXT NOT NULL,
    expires_unix_seconds REAL NOT NULL, created_unix_seconds REAL NOT NULL)
""",
)
SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedFailure:
    """A failure reported by people: one that the job's own restarts do not show.

    Attributes:
        description: what failed.
        failed_unix_seconds: when.
        created_unix_seconds: when it was reported.
    """

    description: str
    failed_unix_seconds: float
    created_unix_seconds: float = field(default_factory=time.time)


def report_failure(run_dir: Path, failure: ReportedFailure) -> None:
    """Store a reported failure; it is durable when this returns.

    Raises:
        TooManyReportsError: too many were reported already, in the last hour or in all.
        JournalError: there is no run here, or the file cannot be written.
    """
    values = failure.description, failure.failed_unix_seconds, failure.created_unix_seconds
    columns = "description, failed_unix_seconds, created_unix_seconds"
    statement = f"INSERT INTO reported_failures ({columns}) VALUES (?, ?, ?)"  # noqa: S608

    def refuse_flood(connection: sqlite3.Connection) -> None:
        _refuse_flood(connection, run_dir, failure.created_unix_seconds)

    write_command(run_dir, statement, values, refuse_flood)


def _refuse_flood(connection: sqlite3.Connection, run_dir: Path, now_unix_seconds: float) -> None:
    (count,) = connection.execute("SELECT count(*) FROM reported_failures").fetchone()
    if count >= MAX_REPORTED_FAILURES:
        raise TooManyReportsError(f"{run_dir} has {count} reported failures, the maximum; this one was not written")
    # While the oldest of so many newest ones is younger than an hour, another one would exceed the limit.
    statement = "SELECT created_unix_seconds FROM reported_failures ORDER BY id DESC LIMIT 1 OFFSET ?"
    for (oldest,) in connection.execute(statement, (REPORTS_PER_HOUR_MAX - 1,)):
        retry_seconds = oldest + HOUR_SECONDS - now_unix_seconds
        if retry_seconds > 0:
            raise TooManyReportsError(
                f"{REPORTS_PER_HOUR_MAX} failures of {run_dir} were reported within an hour; this one was not written",
                retry_seconds,
            )


def reported_failures(run_dir: Path) -> list[ReportedFailure]:
    """All reported failures, in their order.

    Raises:
        JournalError: the file cannot be read.
    """
    statement = "SELECT description, failed_unix_seconds, created_unix_seconds FROM reported_failures ORDER BY id"
    return [
        ReportedFailure(description=what, failed_unix_seconds=when, created_unix_seconds=created)
        for what, when, created in read_commands(run_dir, statement)
    ]


def write_command(
    run_dir: Path,
    statement: str,
    values: Sequence[Any],
    check: Callable[[sqlite3.Connection], None] | None = None,
) -> int:
    """Insert one row and return its id; it is durable then.

    Args:
        run_dir: of the run.
        statement: the INSERT.
        values: of its parameters.
        check: raises if the row must not be written; runs in the same transaction.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    if not (run_dir / "journal.db").is_file():
        raise JournalError(f"there is no run in {run_dir} (no journal.db); nothing was written")
    path = run_dir / COMMANDS_FILE
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if version or tables:  # before any change: the file may belong to another program
                _check(connection, path)
            connection.execute(f"PRAGMA journal_mode={'delete' if is_network(filesystem_of(path)) else 'wal'}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                for table in TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            _check(connection, path)
            if check is not None:
                check(connection)
            row = connection.execute(statement, values).lastrowid
            connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise unreadable(path, error) from error
    return int(row or 0)


def read_commands(run_dir: Path, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query; empty if there are no commands of this kind.

    Args:
        run_dir: of the run.
        statement: the query.
        values: of its parameters.

    Raises:
        JournalError: the file cannot be read.
    """
    path = run_dir / COMMANDS_FILE
    try:
        if not path.is_file():
            return []
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as reader:
            (version,) = reader.execute("PRAGMA user_version").fetchone()
            if version == 0:
                return []  # a process is about to write the first row, or was killed before it did
            _check(reader, path)
            return reader.execute(statement, values).fetchall()
    except (sqlite3.Error, OSError) as error:
        raise unreadable(path, error) from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version != SCHEMA_VERSION:
        raise JournalError(
            f"{path} was not written by this version of cpsr (application {application}, version {version}); nothing "
            "in it was changed; move it away, or use the version that wrote it"
        )
