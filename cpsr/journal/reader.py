"""The journal's readers: read-only, while it is being written or after."""

import sqlite3
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from cpsr.errors import JournalError
from cpsr.journal.rows import (
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    RehearsalRow,
    StepRow,
    columns,
    from_sql,
)
from cpsr.journal.schema import check_identity, select_sql, unreadable

__all__ = ["JournalReader"]

Row = TypeVar("Row")

# Readers wait this long for a writer's lock; only a rollback journal or a foreign process makes them wait at all.
BUSY_SECONDS = 1.0
REHEARSALS_SINCE_VERSION = 2
PHASES_SINCE_VERSION = 3
PLAN_COLUMNS_OF_VERSION_2 = "life, from_iteration, interval_iterations, origin, NULL, explanation, created_unix_seconds"


class JournalReader:
    """A read-only connection to `journal.db`, for one thread; close it, or use it as a context manager.

    Rows come in the order in which they were recorded, unless a method says otherwise. Every method raises
    `JournalError` where the file is locked or damaged.

    Raises:
        JournalError: the file is absent, is no journal, is truncated, locked, or has a newer schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = path.is_file()
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be reached: {error.strerror}") from error
        if not found:
            raise JournalError(f"there is no journal {path}; the run has not started, or this is not its directory")
        try:
            self._connection = _connect(path, "mode=ro")
        except sqlite3.Error as error:
            # Where the directory is not ours to write, SQLite cannot make the index of a closed WAL. Without a WAL
            # there is no writer either, and the file can be read as it stands.
            archived = not path.with_name(path.name + "-wal").exists()
            if not archived or getattr(error, "sqlite_errorname", "") not in (
                "SQLITE_READONLY_DIRECTORY",
                "SQLITE_CANTOPEN",
            ):
                raise unreadable(path, error) from error
            self._connection = _connect_archived(path)

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def meta(self) -> dict[str, str]:
        """Facts about the file itself, among them `journal_mode` and `filesystem`."""
        return dict(self._query("SELECT key, value FROM meta"))

    def lives(self) -> list[LifeRow]:
        """Every life of the run; one that reads `running` although a later one exists was killed."""
        return self._rows(LifeRow, "ORDER BY life")

    def checkpoints(self) -> list[CheckpointRow]:
        """Every checkpoint that was due, also the skipped and the failed ones."""
        return self._rows(CheckpointRow, "ORDER BY row")

    def recent_checkpoints(self, count: int) -> list[CheckpointRow]:
        """The checkpoints that were recorded last, newest first, whatever became of them."""
        return self._rows(CheckpointRow, "ORDER BY row DESC LIMIT ?", (count,))

    def latest_checkpoint(self, iteration: int | None = None) -> CheckpointRow | None:
        """The checkpoint that was committed last, of all or of those at one iteration."""
        clause = "WHERE status = 'committed' AND (?1 IS NULL OR iteration = ?1) ORDER BY row DESC LIMIT 1"
        return _first(self._rows(CheckpointRow, clause, (iteration,)))

    def recoveries(self) -> list[RecoveryRow]:
        """Every recovery with the sources of all ranks."""
        return self._recoveries("ORDER BY row")

    def latest_recovery(self) -> RecoveryRow | None:
        """The newest recovery, or None where the run never had one."""
        return _first(self._recoveries("ORDER BY row DESC LIMIT 1"))

    def rehearsals(self) -> list[RehearsalRow]:
        """Every rehearsed recovery; none in a file of version 1, which knows no rehearsals."""
        return self._rows(RehearsalRow, "ORDER BY row") if self._version() >= REHEARSALS_SINCE_VERSION else []

    def trained_seconds(self) -> float:
        """Wall time of all recorded steps together, those of branches that were given up included."""
        ((seconds,),) = self._query("SELECT COALESCE(SUM(seconds), 0) FROM steps")
        return float(seconds)

    def failures(self) -> list[FailureRow]:
        """Every failure that a later life detected."""
        return self._rows(FailureRow, "ORDER BY row")

    def plans(self) -> list[PlanRow]:
        """Every plan, in the order in which they came to hold."""
        return self._plans("ORDER BY row")

    def latest_plan(self) -> PlanRow | None:
        """The plan that was recorded last, or None before the first."""
        return _first(self._plans("ORDER BY row DESC LIMIT 1"))

    def phases(self) -> list[PhaseRow]:
        """The newest end of each phase; none in a file from before there were phases.

        A restart goes back to a checkpoint, from which the same phase may end once more.
        """
        if self._version() < PHASES_SINCE_VERSION:
            return []
        return self._rows(PhaseRow, "WHERE row IN (SELECT MAX(row) FROM phases GROUP BY phase) ORDER BY phase")

    def fits(self, kind: str | None = None) -> list[FitRow]:
        """Every fitted curve, of all kinds or of one; none in a file from before there were any."""
        if self._version() < PHASES_SINCE_VERSION:
            return []
        return self._rows(FitRow, "WHERE ?1 IS NULL OR kind = ?1 ORDER BY row", (kind,))

    def events(self) -> list[EventRow]:
        """Every event of every rank."""
        return self._rows(EventRow, "ORDER BY row")

    def losses(self, start: int | None = None, stop: int | None = None) -> list[StepRow]:
        """The newest step of each iteration in [start, stop), by iteration.

        After a restart at an earlier iteration, iterations that were not reached again yet still show the step of the
        branch that was given up; `recent_steps` says where the run is.
        """
        # SQLite takes the other columns from the row that has the maximum.
        statement = select_sql(StepRow).replace(" FROM", ", MAX(row) FROM", 1)
        clause = "WHERE (?1 IS NULL OR iteration >= ?1) AND (?2 IS NULL OR iteration < ?2) GROUP BY iteration"
        rows = self._query(f"{statement} {clause} ORDER BY iteration", (start, stop))
        return [self._build(StepRow, row[:-1]) for row in rows]

    def recent_steps(self, count: int) -> list[StepRow]:
        """The steps that were recorded last, newest first."""
        return self._rows(StepRow, "ORDER BY row DESC LIMIT ?", (count,))

    def _version(self) -> int:
        ((version,),) = self._query("PRAGMA user_version")
        return int(version)

    def _plans(self, clause: str) -> list[PlanRow]:
        if self._version() >= PHASES_SINCE_VERSION:
            return self._rows(PlanRow, clause)
        rows = self._query(f"SELECT {PLAN_COLUMNS_OF_VERSION_2} FROM plans {clause}")  # noqa: S608 - no input in it
        return [self._build(PlanRow, row) for row in rows]

    def _recoveries(self, clause: str) -> list[RecoveryRow]:
        names = columns(RecoveryRow)
        rows = self._query(f"{select_sql(RecoveryRow)} {clause}")
        return [self._build(RecoveryRow, row, sources=self._sources(row[names.index("id")])) for row in rows]

    def _sources(self, recovery_id: str) -> tuple[RecoverySource, ...]:
        return tuple(self._rows(RecoverySource, "WHERE recovery_id = ? ORDER BY rank, source", (recovery_id,)))

    def _rows(self, row_type: type[Row], clause: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return [self._build(row_type, row) for row in self._query(f"{select_sql(row_type)} {clause}", parameters)]

    def _build(self, row_type: type[Row], values: Sequence[Any], **more: Any) -> Row:
        try:
            return from_sql(row_type, values, **more)
        except (TypeError, ValueError) as error:
            raise JournalError(f"the journal {self.path} holds a damaged {row_type.__name__}: {error}") from error

    def _query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from error


def _connect(path: Path, parameters: str) -> sqlite3.Connection:
    uri = f"file:{urllib.parse.quote(str(path.resolve()))}?{parameters}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        check_identity(connection, path)
    except (sqlite3.Error, JournalError):
        connection.close()
        raise
    return connection


def _connect_archived(path: Path) -> sqlite3.Connection:
    try:
        return _connect(path, "immutable=1")
    except sqlite3.Error as error:
        raise unreadable(path, error) from error


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None
