"""Read-only access to the journal, also while it is being written."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cpsr.errors import JournalError
from cpsr.journal.database import check_identity, unreadable
from cpsr.journal.rows import (
    CheckpointRow,
    EventRow,
    FailureRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    Row,
    StepRow,
    decode,
    row_type_of,
)

__all__ = ["JournalReader", "Recorded"]

RowT = TypeVar("RowT")
Parameters = Sequence[Any] | Mapping[str, Any]

# Longest wait for a writer's lock; readers wait only for a rollback journal or a foreign process.
BUSY_SECONDS = 1.0
_STEP_COLUMNS = "life, iteration, loss, learning_rate, seconds, applied"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of the table of events: its number, its kind and the row."""

    number: int
    kind: str
    row: Row


class JournalReader:
    """A read-only connection to `journal.db`, for one thread; close it, or use it as a context manager.

    Rows come in the order in which they were recorded, unless a method states another. Every method raises
    `JournalError` if the file is locked or damaged.

    Args:
        path: of the file.

    Raises:
        JournalError: the file is absent, is no journal, is truncated, locked, or has another schema.
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
            self._connection = self._connect("mode=ro")
        except sqlite3.Error as error:
            # In a read-only directory, or on a full disk, SQLite cannot create the index of a closed WAL. Without a WAL
            # there is no writer either, and the file can be read as it is.
            name = getattr(error, "sqlite_errorname", "")
            without_index = name.startswith(("SQLITE_READONLY_DIRECTORY", "SQLITE_CANTOPEN", "SQLITE_IOERR_SHM"))
            if not without_index or path.with_name(path.name + "-wal").exists():
                raise unreadable(path, error) from error
            try:
                self._connection = self._connect("immutable=1")
            except sqlite3.Error as damage:
                raise unreadable(path, damage) from damage

    def _connect(self, parameters: str) -> sqlite3.Connection:
        uri = f"{self.path.resolve().as_uri()}?{parameters}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            check_identity(connection, self.path)
        except (sqlite3.Error, JournalError):
            connection.close()
            raise
        return connection

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def lives(self) -> list[LifeRow]:
        """Every life of the run; one that reads `running` although a later one exists was killed."""
        return list({row.life: row for row in self._all(LifeRow)}.values())

    def restored_iterations(self) -> dict[int, int]:
        """Where each life went on, by life; a life that began from scratch has none."""
        return {row.life: row.restored_iteration for row in self.recoveries()}

    def checkpoints(self) -> list[CheckpointRow]:
        """Every checkpoint that was due, also the skipped and the failed ones."""
        return self._all(CheckpointRow)

    def latest_checkpoint(self) -> CheckpointRow | None:
        """The checkpoint that was committed last."""
        return _first(self.newest(CheckpointRow, 1, status="committed"))

    def recoveries(self) -> list[RecoveryRow]:
        """Every recovery, as far as it is known now."""
        return list({row.id: row for row in self._all(RecoveryRow)}.values())

    def latest_recovery(self) -> RecoveryRow | None:
        """The newest recovery; None if the run never had one."""
        return _first(self.newest(RecoveryRow, 1))

    def failures(self) -> list[FailureRow]:
        """Every failure that a later life detected."""
        return self._all(FailureRow)

    def plans(self) -> list[PlanRow]:
        """Every plan, in the order of adoption."""
        return self._all(PlanRow)

    def latest_plan(self) -> PlanRow | None:
        """The plan that was recorded last; None before the first."""
        return _first(self.newest(PlanRow, 1))

    def phases(self) -> list[PhaseRow]:
        """The newest end of each phase, by phase: after a restart from a checkpoint the same one may end again."""
        newest = {row.phase: row for row in self._all(PhaseRow)}
        return [newest[phase] for phase in sorted(newest)]

    def events(self, *kinds: str) -> list[EventRow]:
        """The events of every rank, of some kinds or of all; rows that have a type of their own are none."""
        chosen = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        found = self._events(f"{chosen} ORDER BY row", kinds)
        return [recorded.row for recorded in found if isinstance(recorded.row, EventRow)]

    def newest(self, row_type: type[RowT], limit: int, **equal: str) -> list[RowT]:
        """The rows of a type that were recorded last, newest first.

        Args:
            row_type: of the table of events, but no EventRow.
            limit: of their number.
            equal: only those that have these values.
        """
        clause, values = "WHERE kind = ?", [row_type.KIND]  # type: ignore[attr-defined]
        for name, value in equal.items():
            clause += " AND json_extract(content, ?) = ?"
            values += [f"$.{name}", value]
        found = self._events(f"{clause} ORDER BY row DESC LIMIT ?", (*values, limit))
        return [recorded.row for recorded in found]  # type: ignore[misc]

    def count(self, row_type: type[Any]) -> int:
        """Number of rows of a type."""
        ((count,),) = self._query("SELECT COUNT(*) FROM events WHERE kind = ?", (row_type.KIND,))
        return int(count)

    def after(self, number: int, limit: int) -> list[Recorded]:
        """At most `limit` rows of the table of events that were recorded after this one, oldest first."""
        return self._events("WHERE row > ? ORDER BY row LIMIT ?", (number, limit))

    def losses(self, start: int | None = None, stop: int | None = None) -> list[StepRow]:
        """The newest step of each iteration in [start, stop), by iteration.

        After a restart at an earlier iteration, iterations that were not reached again yet still show the step of the
        discarded branch; `recent_steps` shows where the run is.
        """
        chosen = "(:start IS NULL OR iteration >= :start) AND (:stop IS NULL OR iteration < :stop)"
        # SQLite takes the other columns from the row that has the maximum.
        statement = f"SELECT {_STEP_COLUMNS}, MAX(row) FROM steps WHERE {chosen} GROUP BY iteration ORDER BY iteration"  # noqa: S608
        return [self._step(values[:-1]) for values in self._query(statement, {"start": start, "stop": stop})]

    def step_from(self, iteration: int) -> StepRow | None:
        """The newest step of the first recorded iteration from this one on; None if there is none."""
        first = "SELECT MIN(iteration) FROM steps WHERE iteration >= ?"
        return _first(self._steps(f"WHERE iteration = ({first}) ORDER BY row DESC LIMIT 1", (iteration,)))

    def recent_steps(self, count: int) -> list[StepRow]:
        """The steps that were recorded last, newest first."""
        return self._steps("ORDER BY row DESC LIMIT ?", (count,))

    def trained_iterations(self) -> int:
        """Of the iterations up to the newest step's, how many were trained in this journal; each counts once.

        Rows are numbered as steps are recorded, and keep their numbers when others are thinned out. So between two
        iterations no more can have been trained than their rows are apart: the rest is a jump to another checkpoint,
        or what a run had trained before its journal began.
        """
        newest = "SELECT iteration FROM steps ORDER BY row DESC LIMIT 1"
        once = f"SELECT iteration, MAX(row) AS row FROM steps WHERE iteration <= ({newest}) GROUP BY iteration"  # noqa: S608
        apart = ", ".join(f"ABS({name} - LAG({name}, 1, 0) OVER (ORDER BY iteration))" for name in ("iteration", "row"))
        ((count,),) = self._query(f"SELECT TOTAL(trained) FROM (SELECT MIN({apart}) AS trained FROM ({once}))")  # noqa: S608
        return int(count)

    def life_seconds(self) -> dict[int, float]:
        """How long each life has trained, by life: all its steps, repeated ones too, at the mean pace of the kept."""
        # Rows keep their numbers when others are thinned out; iterations jump where a checkpoint is loaded.
        return dict(self._query("SELECT life, (MAX(row) - MIN(row) + 1) * AVG(seconds) FROM steps GROUP BY life"))

    def checkpoint_totals(self) -> dict[str, dict[str, float]]:
        """Of the checkpoints by status: `count`, and the sums of `bytes`, `stall_`, `write_` and `commit_seconds`."""
        names = "bytes", "stall_seconds", "write_seconds", "commit_seconds"
        sums = ", ".join(f"TOTAL(json_extract(content, '$.{name}'))" for name in names)
        statement = f"SELECT json_extract(content, '$.status'), COUNT(*), {sums} FROM events WHERE kind = 'checkpoint' "  # noqa: S608
        found = self._query(statement + "GROUP BY 1")
        return {status: dict(zip(("count", *names), totals, strict=True)) for status, *totals in found}

    def _all(self, row_type: type[RowT]) -> list[RowT]:
        found = self._events("WHERE kind = ? ORDER BY row", (row_type.KIND,))  # type: ignore[attr-defined]
        return [recorded.row for recorded in found]  # type: ignore[misc]

    def _events(self, clause: str, parameters: Parameters) -> list[Recorded]:
        found = self._query(f"SELECT row, kind, content FROM events {clause}", parameters)  # noqa: S608
        try:
            return [Recorded(number, kind, decode(row_type_of(kind), content)) for number, kind, content in found]
        except ValueError as error:
            raise JournalError(f"the journal {self.path} holds a damaged row: {error}") from error

    def _steps(self, clause: str, parameters: Parameters) -> list[StepRow]:
        statement = f"SELECT {_STEP_COLUMNS} FROM steps {clause}"  # noqa: S608
        return [self._step(values) for values in self._query(statement, parameters)]

    def _step(self, values: Sequence[Any]) -> StepRow:
        life, iteration, loss, rate, seconds, applied = values
        try:
            return StepRow(
                life=life,
                iteration=iteration,
                loss=None if loss is None else float(loss),  # NaN is stored as text
                learning_rate=None if rate is None else float(rate),
                seconds=float(seconds),
                applied=bool(applied),
            )
        except ValueError as error:
            raise JournalError(f"the journal {self.path} holds a damaged step: {error}") from error

    def _query(self, statement: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from error


def _first(rows: list[RowT]) -> RowT | None:
    return rows[0] if rows else None
