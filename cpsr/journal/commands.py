"""Commands to a running job: `<run_dir>/commands.db`, which the service writes and rank 0 reads.

A file of its own: the journal has one writer, and that is the job. The two commands are the report of a failure that
the job's own restarts do not show, and an override of the checkpoint interval.
"""

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpsr.errors import JournalError, TooManyReportsError
from cpsr.journal.database import filesystem_of, is_network, unreadable

__all__ = [
    "COMMANDS_FILE",
    "PlanOverride",
    "ReportedFailure",
    "latest_override",
    "override_plan",
    "report_failure",
    "reported_failures",
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
SCHEMA_VERSION = 1
TABLE = """
CREATE TABLE commands (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('failure', 'override')),
    created_unix_seconds REAL NOT NULL, content TEXT NOT NULL)
"""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOverride:
    """Temporary bounds of the interval; the newest override replaces all earlier ones.

    Attributes:
        interval_min_iterations: None for none. Both None: withdraws an earlier override.
        interval_max_iterations: None for none; equal to the minimum to pin the interval.
        reason: for people.
        expires_unix_seconds: end of its validity, by the clock of rank 0's machine.
        created_unix_seconds: when it was created.
        id: assigned when it is written; ascending.
    """

    interval_min_iterations: int | None
    interval_max_iterations: int | None
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float = field(default_factory=time.time)
    id: int = 0

    @property
    def withdrawn(self) -> bool:
        """Whether it only ends an earlier override."""
        return self.interval_min_iterations is None and self.interval_max_iterations is None

    @property
    def pinned(self) -> bool:
        """Whether it allows only one interval."""
        return not self.withdrawn and self.interval_min_iterations == self.interval_max_iterations

    def holds(self, now_unix_seconds: float) -> bool:
        """Whether it is in force now."""
        return not self.withdrawn and now_unix_seconds < self.expires_unix_seconds

    def within(self, interval_min_iterations: int, interval_max_iterations: int) -> tuple[int, int]:
        """The given bounds, narrowed by this override; if they do not overlap, the nearest given bound."""
        low, high = interval_min_iterations, interval_max_iterations
        own_low = low if self.interval_min_iterations is None else self.interval_min_iterations
        own_high = high if self.interval_max_iterations is None else self.interval_max_iterations
        return min(max(own_low, low), high), max(min(own_high, high), low)


def report_failure(run_dir: Path, failure: ReportedFailure) -> None:
    """Store a reported failure; it is durable when this returns.

    Raises:
        TooManyReportsError: too many were reported already, in the last hour or in all.
        JournalError: there is no run here, or the file cannot be written.
    """

    def refuse_flood(connection: sqlite3.Connection) -> None:
        _refuse_flood(connection, run_dir, failure.created_unix_seconds)

    _write(run_dir, "failure", failure, refuse_flood)


def override_plan(run_dir: Path, override: PlanOverride) -> int:
    """Store an override and return its id; it is durable when this returns.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    return _write(run_dir, "override", override)


def reported_failures(run_dir: Path) -> list[ReportedFailure]:
    """All reported failures, in their order.

    Raises:
        JournalError: the file cannot be read.
    """
    return [ReportedFailure(**content) for _, content in _read(run_dir, "kind = 'failure' ORDER BY id")]


def latest_override(run_dir: Path) -> PlanOverride | None:
    """The newest override, whether it is in force or not; None if there is none.

    Raises:
        JournalError: the file cannot be read.
    """
    found = _read(run_dir, "kind = 'override' ORDER BY id DESC LIMIT 1")
    return replace(PlanOverride(**found[0][1]), id=found[0][0]) if found else None


def _refuse_flood(connection: sqlite3.Connection, run_dir: Path, now_unix_seconds: float) -> None:
    (count,) = connection.execute("SELECT count(*) FROM commands WHERE kind = 'failure'").fetchone()
    if count >= MAX_REPORTED_FAILURES:
        raise TooManyReportsError(f"{run_dir} has {count} reported failures, the maximum; this one was not written")
    # While the oldest of so many newest ones is younger than an hour, another one would exceed the limit.
    statement = "SELECT created_unix_seconds FROM commands WHERE kind = 'failure' ORDER BY id DESC LIMIT 1 OFFSET ?"
    for (oldest,) in connection.execute(statement, (REPORTS_PER_HOUR_MAX - 1,)):
        retry_seconds = oldest + HOUR_SECONDS - now_unix_seconds
        if retry_seconds > 0:
            raise TooManyReportsError(
                f"{REPORTS_PER_HOUR_MAX} failures of {run_dir} were reported within an hour; this one was not written",
                retry_seconds,
            )


def _write(
    run_dir: Path,
    kind: str,
    command: ReportedFailure | PlanOverride,
    check: Callable[[sqlite3.Connection], None] = lambda _: None,
) -> int:
    """Store a command and return its id, unless `check`, in the same transaction, refuses."""
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
                connection.execute(TABLE)
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            _check(connection, path)
            check(connection)
            values = kind, command.created_unix_seconds, json.dumps(asdict(command))
            statement = "INSERT INTO commands (kind, created_unix_seconds, content) VALUES (?, ?, ?)"
            row = connection.execute(statement, values).lastrowid
            connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise unreadable(path, error) from error
    return int(row or 0)


def _read(run_dir: Path, clause: str) -> list[tuple[int, dict[str, Any]]]:
    """Ids and contents of the commands that a WHERE clause selects; empty if there is no file yet."""
    path = run_dir / COMMANDS_FILE
    try:
        if not path.is_file():
            return []
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as reader:
            (version,) = reader.execute("PRAGMA user_version").fetchone()
            if version == 0:
                return []  # a process is about to write the first command, or was killed before it did
            _check(reader, path)
            found = reader.execute(f"SELECT id, content FROM commands WHERE {clause}").fetchall()  # noqa: S608
    except (sqlite3.Error, OSError) as error:
        raise unreadable(path, error) from error
    return [(number, json.loads(content)) for number, content in found]


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version != SCHEMA_VERSION:
        raise JournalError(
            f"{path} was not written by this version of cpsr (application {application}, version {version}); nothing "
            "in it was changed; move it away, or use the version that wrote it"
        )
