"""The SQL that records a row: an INSERT, and for some tables further changes."""

import itertools
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cpsr.journal.rows import (
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    LearningRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    SQLValue,
    StepRow,
    to_sql,
)
from cpsr.journal.schema import insert_sql
from cpsr.journal.totals import add_checkpoint_stall, add_steps, begin_life, end_failed

__all__ = ["LASTING", "Apply", "Frozen", "Row", "freeze", "statement"]

Row = (
    LifeRow
    | StepRow
    | CheckpointRow
    | FailureRow
    | RecoveryRow
    | PlanRow
    | PhaseRow
    | FitRow
    | BacktestRow
    | LearningRow
    | BubbleRow
    | EventRow
)
Apply = Callable[[sqlite3.Connection], object]
Count = Callable[[sqlite3.Connection, Sequence[Any], float], None]  # rows, and when they were reported

# Never dropped from the queue: a life has few of these, and the other rows depend on them.
LASTING = frozenset([LifeRow, RecoveryRow])


@dataclass(frozen=True, slots=True)
class Frozen:
    """A copy of a row at the time of recording.

    Attributes:
        row: for its constant fields: ids and names.
        values: of its own columns.
        sources: of a recovery: the values of each source's columns.
    """

    row: Any
    values: tuple[SQLValue, ...]
    sources: tuple[tuple[SQLValue, ...], ...] = ()


def freeze(row: Row) -> Frozen:
    """Convert a row to SQLite values.

    Raises:
        TypeError, ValueError: as `to_sql`.
    """
    sources = tuple(to_sql(source) for source in row.sources) if isinstance(row, RecoveryRow) else ()
    return Frozen(row, to_sql(row), sources)


def statement(kind: type[Row], rows: Sequence[Frozen]) -> Apply:
    """A function that writes rows of one table, in one transaction."""
    if kind is RecoveryRow:
        return lambda connection: _recoveries(connection, rows)
    sql = insert_sql(kind)
    if kind is BacktestRow:
        sql += " ON CONFLICT (iteration, checkpoints, result) DO NOTHING"
    values = [row.values for row in rows]
    count, at = _COUNTED.get(kind), time.time()

    def insert(connection: sqlite3.Connection) -> None:
        if count is not None:
            count(connection, [row.row for row in rows], at)
        connection.executemany(sql, values)

    return insert


def _count_steps(connection: sqlite3.Connection, rows: Sequence[StepRow], at: float) -> None:
    for _, steps in itertools.groupby(rows, key=lambda step: step.life):
        add_steps(connection, list(steps), at)


def _each(count: Callable[[sqlite3.Connection, Any], None]) -> Count:
    def count_all(connection: sqlite3.Connection, rows: Sequence[Any], _: float) -> None:
        for row in rows:
            count(connection, row)

    return count_all


# What these rows add to the run's totals, before they are recorded.
_COUNTED: dict[type[Any], Count] = {
    LifeRow: _each(begin_life),
    StepRow: _count_steps,
    CheckpointRow: _each(add_checkpoint_stall),
    FailureRow: _each(end_failed),
}


def _recoveries(connection: sqlite3.Connection, rows: Sequence[Frozen]) -> None:
    """Restorations with their sources; the life's `restored_iteration` follows them."""
    for frozen in rows:
        row = frozen.row
        connection.execute(insert_sql(RecoveryRow), frozen.values)
        sources = [(*source, row.id) for source in frozen.sources]
        connection.executemany(insert_sql(RecoverySource, ("recovery_id",)), sources)
        if row.method != "scratch":
            values = (row.restored_iteration, row.life)
            connection.execute("UPDATE lives SET restored_iteration = ? WHERE life = ?", values)
