"""Read-only access to the journal, also while it is being written."""

import json
import sqlite3
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cpsr.errors import JournalError
from cpsr.journal.rows import (
    CheckpointRow,
    EventRow,
    FailureRow,
    LearningRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    TotalsRow,
    columns,
    from_sql,
)
from cpsr.journal.schema import OPENED, TABLES, check_identity, select_sql, unreadable
from cpsr.journal.thinning import THINNED_SECONDS

__all__ = ["JournalReader"]

Row = TypeVar("Row")
Parameters = Sequence[Any] | Mapping[str, Any]

# Longest wait for a writer's lock; readers wait only for a rollback journal or a foreign process.
BUSY_SECONDS = 1.0
# Tables that older files lack, by the version that added them; there they have no rows.
# Time column of a row; most have `created_unix_seconds`, steps have none.
TIME_COLUMNS: dict[type[Any], str] = {FailureRow: "detected_unix_seconds"}
_INDEX_ERRORS = "SQLITE_IOERR_SHM"  # prefix of the names of index errors


class JournalReader:
    """A read-only connection to `journal.db`, for one thread; close it, or use it as a context manager.

    Rows come in the order in which they were recorded, unless a method states another. Every method raises
    `JournalError` if the file is locked or damaged.

    Args:
        path: of the file.
        unwritten: the caller knows that no process writes to it.

    Raises:
        JournalError: the file is absent, is no journal, is truncated, locked, or has another schema.
    """

    def __init__(self, path: Path, unwritten: bool = False) -> None:
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
            # In a read-only directory, or on a full disk, SQLite cannot create the index of a closed WAL. Without a WAL
            # there is no writer either, and the file can be read as it is.
            name = getattr(error, "sqlite_errorname", "")
            without_index = name in ("SQLITE_READONLY_DIRECTORY", "SQLITE_CANTOPEN") or name.startswith(_INDEX_ERRORS)
            if not without_index or _may_hold_rows(path.with_name(path.name + "-wal"), unwritten):
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

    @contextmanager
    def at_one_time(self) -> Iterator[None]:
        """All reads inside the block see one consistent state, even if the file is written meanwhile."""
        self._query("BEGIN")
        try:
            yield
        finally:
            self._connection.rollback()

    def openings(self) -> list[tuple[int, dict[type[Any], int]]]:
        """When writers opened the file, in microseconds since 1970, and the last row of each table then, oldest first.

        If the clock went back, an opening counts as one microsecond after the previous one. Files from before the table
        of bubbles have none.
        """
        prefix = OPENED.format(microseconds="")
        found = self._query("SELECT key, value FROM meta WHERE key GLOB ?", (f"{prefix}*",))
        row_types = {table: row_type for row_type, table in TABLES.items()}
        try:
            return sorted(
                (
                    int(key.removeprefix(prefix)),
                    {row_types[table]: int(row) for table, row in json.loads(value).items()},
                )
                for key, value in found
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise JournalError(f"the journal {self.path} does not show who wrote to it when: {error}") from error

    def lives(self) -> list[LifeRow]:
        """Every life of the run; one that reads `running` although a later one exists was killed."""
        return self._rows(LifeRow, "ORDER BY life")

    def checkpoints(self) -> list[CheckpointRow]:
        """Every checkpoint that was due, also the skipped and the failed ones."""
        return self._rows(CheckpointRow, "ORDER BY row")

    def recent_checkpoints(self, count: int) -> list[CheckpointRow]:
        """The checkpoints that were recorded last, newest first, of any status."""
        return self._rows(CheckpointRow, "ORDER BY row DESC LIMIT ?", (count,))

    def latest_checkpoint(self, iteration: int | None = None) -> CheckpointRow | None:
        """The checkpoint that was committed last, of all or of those at one iteration."""
        # Two queries: with one condition for both cases SQLite would not use its index.
        at, parameters = ("", ()) if iteration is None else ("AND iteration = ?", (iteration,))
        clause = f"WHERE status = 'committed' {at} ORDER BY row DESC LIMIT 1"
        return _first(self._rows(CheckpointRow, clause, parameters))

    def committed_in(self, life: int, start: int, stop: int) -> CheckpointRow | None:
        """The checkpoint that a life committed last, of those at the iterations [start, stop)."""
        where = "WHERE status = 'committed' AND life = ? AND iteration >= ? AND iteration < ?"
        return _first(self._rows(CheckpointRow, f"{where} ORDER BY row DESC LIMIT 1", (life, start, stop)))

    def committed_between(self, life: int, first: int, last: int) -> int:
        """Number of iterations, from `first` to `last`, whose checkpoint was committed in that life or a later one."""
        counted = (
            "SELECT COUNT(DISTINCT iteration) FROM checkpoints "
            "WHERE status = 'committed' AND life >= ? AND iteration BETWEEN ? AND ?"
        )
        ((count,),) = self._query(counted, (life, first, last))
        return int(count)

    def latest_learning(self) -> LearningRow | None:
        """What the predictor had taken in last; None in a run that has not begun to learn, or whose file is older."""
        return _first(self._rows(LearningRow, "ORDER BY row DESC LIMIT 1"))

    def is_predicted(self, iteration: int) -> bool:
        """Whether any checkpoint that was committed at this iteration is labelled `predicted`."""
        clause = "WHERE status = 'committed' AND origin = 'predicted' AND iteration = ? LIMIT 1"
        return bool(self._rows(CheckpointRow, clause, (iteration,)))

    def recoveries(self) -> list[RecoveryRow]:
        """Every recovery with the sources of all ranks."""
        return self._rows(RecoveryRow, "ORDER BY row")

    def latest_recovery(self) -> RecoveryRow | None:
        """The newest recovery; None if the run never had one."""
        return _first(self._rows(RecoveryRow, "ORDER BY row DESC LIMIT 1"))

    def recoveries_before(self, life: int) -> Iterator[RecoveryRow]:
        """The recoveries of earlier lives, newest first; each is read when it is asked for."""
        statement = f"{select_sql(RecoveryRow)} WHERE life < ? ORDER BY row DESC"
        try:
            for values in self._connection.execute(statement, (life,)):
                yield self._build(RecoveryRow, values)
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from error

    def trained_seconds(self) -> float:
        """Wall time of all steps together, also of those that were thinned out, and of branches that were given up."""
        # In one query: between two, steps may move from one sum to the other.
        kept, gone = "SELECT TOTAL(seconds) FROM steps", "SELECT TOTAL(CAST(value AS REAL)) FROM meta WHERE key = ?"
        ((seconds,),) = self._query(f"SELECT ({kept}) + ({gone})", (THINNED_SECONDS,))
        return float(seconds)

    def seconds_of_lives(self) -> dict[int, float]:
        """Wall time of the steps of each life, by life."""
        until = "COALESCE(LEAD(MIN(step_seconds)) OVER (ORDER BY life), MAX(step_seconds))"
        return dict(self._query(f"SELECT life, {until} - MIN(step_seconds) FROM totals GROUP BY life"))  # noqa: S608

    def failures(self) -> list[FailureRow]:
        """Every failure that a later life detected."""
        return self._rows(FailureRow, "ORDER BY row")

    def plans(self) -> list[PlanRow]:
        """Every plan, in the order of adoption."""
        return self._rows(PlanRow, "ORDER BY row")

    def latest_plan(self) -> PlanRow | None:
        """The plan that was recorded last; None before the first."""
        return _first(self._rows(PlanRow, "ORDER BY row DESC LIMIT 1"))

    def plan_after(self, plan: PlanRow) -> PlanRow | None:
        """The plan that replaced this one; None if this one is current."""
        own = "SELECT MAX(row) FROM plans WHERE life = ? AND from_iteration = ? AND created_unix_seconds = ?"
        identity = plan.life, plan.from_iteration, plan.created_unix_seconds
        return _first(self._rows(PlanRow, f"WHERE row > ({own}) ORDER BY row LIMIT 1", identity))

    def phases(self) -> list[PhaseRow]:
        """The newest end of each phase; none in a file from before there were phases.

        After a restart from a checkpoint the same phase may end again.
        """
        return self._rows(PhaseRow, "WHERE row IN (SELECT MAX(row) FROM phases GROUP BY phase) ORDER BY phase")

    def latest_phase(self) -> PhaseRow | None:
        """The phase whose end was recorded last; None before the first. Does not read the others."""
        return _first(self._rows(PhaseRow, "ORDER BY row DESC LIMIT 1"))

    def events_of(self, iterations: Sequence[int], kinds: Sequence[str]) -> list[EventRow]:
        """The events of some kinds that belong to some iterations."""
        if not iterations:
            return []
        asked = [*kinds, min(iterations), max(iterations)]
        marks = ", ".join("?" * len(kinds))
        wanted = set(iterations)
        clause = f"WHERE kind IN ({marks}) AND iteration BETWEEN ? AND ? ORDER BY row"
        return [row for row in self._rows(EventRow, clause, asked) if row.iteration in wanted]

    def newest_events(self, kinds: Sequence[str]) -> list[EventRow]:
        """The events of some kinds of the newest life that has any."""
        marks = ", ".join("?" * len(kinds))
        rows = self._rows(EventRow, f"WHERE kind IN ({marks}) ORDER BY row", kinds)
        return [row for row in rows if row.life == max(one.life for one in rows)]

    def events(self) -> list[EventRow]:
        """Every event of every rank."""
        return self._rows(EventRow, "ORDER BY row")

    def losses(self, start: int | None = None, stop: int | None = None) -> list[StepRow]:
        """The newest step of each iteration in [start, stop), by iteration.

        After a restart at an earlier iteration, iterations that were not reached again yet still show the step of the
        discarded branch; `recent_steps` shows where the run is.
        """
        # SQLite takes the other columns from the row that has the maximum.
        statement = select_sql(StepRow).replace(" FROM", ", MAX(row) FROM", 1)
        chosen = "(:start IS NULL OR iteration >= :start) AND (:stop IS NULL OR iteration < :stop)"
        rows = self._query(
            f"{statement} WHERE {chosen} GROUP BY iteration ORDER BY iteration", {"start": start, "stop": stop}
        )
        return [self._build(StepRow, row[:-1]) for row in rows]

    def step_from(self, iteration: int) -> StepRow | None:
        """The newest step of the first recorded iteration from this one on; None if there is none."""
        clause = "WHERE iteration = (SELECT MIN(iteration) FROM steps WHERE iteration >= ?) ORDER BY row DESC LIMIT 1"
        return _first(self._rows(StepRow, clause, (iteration,)))

    def recent_steps(self, count: int) -> list[StepRow]:
        """The steps that were recorded last, newest first."""
        return self._rows(StepRow, "ORDER BY row DESC LIMIT ?", (count,))

    def totals(self) -> tuple[TotalsRow, TotalsRow] | None:
        """The first and the newest totals of the run's time; None in a file of an older version."""
        # In one query: a row of steps is written again until a minute has passed.
        rows = self._rows(
            TotalsRow, "WHERE row IN ((SELECT MIN(row) FROM totals), (SELECT MAX(row) FROM totals)) ORDER BY row"
        )
        return (rows[0], rows[-1]) if rows else None

    def totals_around(self, at_unix_seconds: float) -> list[TotalsRow]:
        """The last totals up to a time, and the first after it; what there is of them."""
        before = self._rows(TotalsRow, "WHERE created_unix_seconds <= ? ORDER BY row DESC LIMIT 1", (at_unix_seconds,))
        after = self._rows(TotalsRow, "WHERE created_unix_seconds > ? ORDER BY row LIMIT 1", (at_unix_seconds,))
        return before + after

    def newest(
        self,
        row_type: type[Row],
        limit: int,
        since_unix_seconds: float | None = None,
        until_unix_seconds: float | None = None,
        kind: str | None = None,
    ) -> list[Row]:
        """The rows of a table that were recorded last, newest first.

        Args:
            row_type: whose rows have a time.
            limit: of their number.
            since_unix_seconds: only those of then and later.
            until_unix_seconds: only those of before.
            kind: only those of one kind, where the table has any (fits and events).
        """
        clause = f"WHERE {_chosen(row_type)} ORDER BY row DESC LIMIT :limit"
        asked = {"since": since_unix_seconds, "until": until_unix_seconds, "kind": kind, "limit": limit}
        return self._rows(row_type, clause, asked)

    def count(
        self,
        row_type: type[Any],
        since_unix_seconds: float | None = None,
        until_unix_seconds: float | None = None,
        kind: str | None = None,
    ) -> int:
        """Number of rows that `newest` selects from."""
        statement = f"SELECT COUNT(*) FROM {TABLES[row_type]} WHERE {_chosen(row_type)}"  # noqa: S608 - no input in it
        asked = {"since": since_unix_seconds, "until": until_unix_seconds, "kind": kind}
        ((count,),) = self._query(statement, asked)
        return int(count)

    def after(self, row_type: type[Row], row: int, limit: int) -> list[tuple[int, Row]]:
        """At most `limit` rows recorded after this row number, oldest first, with their numbers."""
        statement = select_sql(row_type).replace(" FROM", ", row FROM", 1)
        rows = self._query(f"{statement} WHERE row > ? ORDER BY row LIMIT ?", (row, limit))
        return [(values[-1], self._build(row_type, values[:-1])) for values in rows]

    def last_row(self, row_type: type[Any]) -> int:
        """Number of the row that was recorded last; 0 if there is none."""
        ((last,),) = self._query(f"SELECT COALESCE(MAX(row), 0) FROM {TABLES[row_type]}")  # noqa: S608 - no input in it
        return int(last)

    def tally(
        self,
        row_type: type[Any],
        keys: Sequence[str],
        sums: Sequence[str] = (),
        since_unix_seconds: float | None = None,
    ) -> list[tuple[Any, ...]]:
        """For each combination of values of `keys`: the values, the number of rows, and the sums of other columns.

        Args:
            row_type: of the table.
            keys: columns.
            sums: columns, in which NULL counts as 0.
            since_unix_seconds: only the rows of then and later.
        """
        unknown = {*keys, *sums} - set(columns(row_type))
        if unknown:
            raise ValueError(f"{row_type.__name__} has no columns {sorted(unknown)}")
        chosen = ", ".join([*keys, "COUNT(*)", *(f"TOTAL({name})" for name in sums)])
        # The names were checked above: they are this package's own.
        statement = f"SELECT {chosen} FROM {TABLES[row_type]} WHERE {_chosen(row_type)} GROUP BY {', '.join(keys)}"  # noqa: S608
        return self._query(statement, {"since": since_unix_seconds, "until": None, "kind": None})

    def _sources(self, recovery_id: str) -> tuple[RecoverySource, ...]:
        return tuple(self._rows(RecoverySource, "WHERE recovery_id = ? ORDER BY rank, source", (recovery_id,)))

    def _rows(self, row_type: type[Row], clause: str, parameters: Parameters = ()) -> list[Row]:
        rows = self._query(f"{select_sql(row_type)} {clause}", parameters)
        return [self._build(row_type, row) for row in rows]

    def _build(self, row_type: type[Row], values: Sequence[Any]) -> Row:
        more: dict[str, Any] = {}
        if row_type is RecoveryRow:
            more["sources"] = self._sources(values[columns(RecoveryRow).index("id")])
        try:
            return from_sql(row_type, values, **more)
        except (TypeError, ValueError) as error:
            raise JournalError(f"the journal {self.path} holds a damaged {row_type.__name__}: {error}") from error

    def _query(self, statement: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
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


def _may_hold_rows(log: Path, unwritten: bool) -> bool:
    """Whether the file cannot be read without its write-ahead log."""
    if not log.exists():
        return False
    # Opening the file on a full disk leaves an empty log; so does a writer that is about to write.
    return not unwritten or log.stat().st_size > 0


def _connect_archived(path: Path) -> sqlite3.Connection:
    try:
        return _connect(path, "immutable=1")
    except sqlite3.Error as error:
        raise unreadable(path, error) from error


def _chosen(row_type: type[Any]) -> str:
    column = TIME_COLUMNS.get(row_type, "created_unix_seconds")
    kind = "kind" if "kind" in columns(row_type) else "NULL"
    since, until = f":since IS NULL OR {column} >= :since", f":until IS NULL OR {column} < :until"
    return f"({since}) AND ({until}) AND (:kind IS NULL OR {kind} = :kind)"


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None
