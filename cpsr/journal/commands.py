"""What people tell a running job: `<run_dir>/commands.db`, which the service writes and rank 0 reads.

A file of its own: the journal has one writer, and that is the job.
"""

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.errors import JournalError
from cpsr.journal.schema import filesystem_of, is_network, unreadable

__all__ = ["COMMANDS_FILE", "ReportedFailure", "report_failure", "reported_failures"]

COMMANDS_FILE = "commands.db"
APPLICATION_ID = int.from_bytes(b"CPSc", "big")
SCHEMA_VERSION = 1
BUSY_SECONDS = 5.0
_TABLES = """
CREATE TABLE reported_failures (
    id INTEGER PRIMARY KEY, description TEXT NOT NULL, failed_unix_seconds REAL NOT NULL,
    created_unix_seconds REAL NOT NULL)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedFailure:
    """A failure that somebody reports: one that the job's own restarts do not show.

    Attributes:
        description: what failed.
        failed_unix_seconds: when.
        created_unix_seconds: when it was reported.
    """

    description: str
    failed_unix_seconds: float
    created_unix_seconds: float = field(default_factory=time.time)


def report_failure(run_dir: Path, failure: ReportedFailure) -> None:
    """Write one down; it is durable when this returns.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    if not (run_dir / "journal.db").is_file():
        raise JournalError(f"there is no run in {run_dir} (no journal.db); nothing was written")
    path = run_dir / COMMANDS_FILE
    values = failure.description, failure.failed_unix_seconds, failure.created_unix_seconds
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA journal_mode={'delete' if is_network(filesystem_of(path)) else 'wal'}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                connection.execute(_TABLES)
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            _check(connection, path)
            columns = "description, failed_unix_seconds, created_unix_seconds"
            connection.execute(f"INSERT INTO reported_failures ({columns}) VALUES (?, ?, ?)", values)  # noqa: S608
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise unreadable(path, error) from error


def reported_failures(run_dir: Path) -> list[ReportedFailure]:
    """All that were reported, in their order; none where nobody has reported any.

    Raises:
        JournalError: the file cannot be read.
    """
    path = run_dir / COMMANDS_FILE
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as reader:
            if reader.execute("PRAGMA user_version").fetchone()[0] == 0:
                return []  # somebody is about to write the first, or was killed before it was written
            _check(reader, path)
            statement = "SELECT description, failed_unix_seconds, created_unix_seconds FROM reported_failures"
            return [
                ReportedFailure(description=what, failed_unix_seconds=when, created_unix_seconds=told)
                for what, when, told in reader.execute(f"{statement} ORDER BY id")
            ]
    except sqlite3.Error as error:
        raise unreadable(path, error) from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version > SCHEMA_VERSION:
        raise JournalError(
            f"{path} was not written by this version of cpsr (application {application}, version {version}); nothing "
            "in it was changed; move it away, or use the version that wrote it"
        )
