"""Commands to a running job: `<run_dir>/commands.db`, which the service writes and rank 0 reads.

A file of its own: the journal has one writer, and that is the job. The two commands are the report of a failure that
the job's own restarts do not show, and an override of the checkpoint interval.
"""

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpsr.errors import JournalError
from cpsr.journal.database import unreadable

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
BUSY_SECONDS = 5.0
TABLE = """
CREATE TABLE IF NOT EXISTS commands (
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
    """A temporary interval between checkpoints; the newest override replaces all earlier ones.

    Attributes:
        interval_iterations: between checkpoints.
        reason: for people.
        expires_unix_seconds: end of its validity, by the clock of rank 0's machine.
        created_unix_seconds: when it was created.
        id: assigned when it is written; ascending.
    """

    interval_iterations: int
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float = field(default_factory=time.time)
    id: int = 0

    def holds(self, now_unix_seconds: float) -> bool:
        """Whether it is in force now."""
        return now_unix_seconds < self.expires_unix_seconds


def report_failure(run_dir: Path, failure: ReportedFailure) -> None:
    """Store a reported failure; it is durable when this returns.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    _write(run_dir, failure)


def override_plan(run_dir: Path, override: PlanOverride) -> int:
    """Store an override and return its id; it is durable when this returns.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    return _write(run_dir, override)


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


def _write(run_dir: Path, command: ReportedFailure | PlanOverride) -> int:
    """Store a command and return its id."""
    if not (run_dir / "journal.db").is_file():
        raise JournalError(f"there is no run in {run_dir} (no journal.db); nothing was written")
    path = run_dir / COMMANDS_FILE
    kind = "failure" if isinstance(command, ReportedFailure) else "override"
    try:
        # The rollback journal that SQLite uses by default is safe on every file system, and durable at the commit.
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(TABLE)
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
            if not reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return []  # a process is about to write the first command, or was killed before it did
            found = reader.execute(f"SELECT id, content FROM commands WHERE {clause}").fetchall()  # noqa: S608
    except (sqlite3.Error, OSError) as error:
        raise unreadable(path, error) from error
    return [(number, json.loads(content)) for number, content in found]
