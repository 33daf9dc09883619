"""A journal whose rows are recorded at times that the test sets, in seconds since START."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from cpsr.journal import CheckpointRow, FailureRow, LifeRow, RecoveryRow, StepRow
from cpsr.journal.rows import TotalsRow, from_sql
from cpsr.journal.schema import prepare, select_sql
from cpsr.journal.statements import freeze, statement
from cpsr.journal.totals import add_memory_stalls

START = 1_700_000_000.0
FLUSH_ITERATIONS = 20


class Timeline:
    """Writes as the journal's thread does, but at once.

    Args:
        path: of the file, which is created.
    """

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        prepare(self.connection, path)

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def record(self, at: float, rows: Sequence[Any]) -> None:
        """Record rows of one table."""
        with mock.patch("cpsr.journal.statements.time.time", return_value=START + at):
            statement(type(rows[0]), [freeze(row) for row in rows])(self.connection)

    def begin(self, life: int, at: float, ranks: int | None = None) -> None:
        """A life begins."""
        process: dict[str, Any] = {"mode": "auto", "pid": 2**22 + 1, "host": "a", "ranks": ranks}
        self.record(at, [LifeRow(life=life, started_unix_seconds=START + at, **process)])

    def restore(self, life: int, iteration: int) -> None:
        """The life goes on from this iteration."""
        row = {"id": f"{life} {iteration}", "life": life, "restored_iteration": iteration, "method": "exact"}
        row |= {"failure_iteration": None, "checkpoint_iteration": iteration, "requested_mode": "exact"}
        self.record(0.0, [RecoveryRow(**row)])  # type: ignore[arg-type]  # of several types

    def end(self, life: int, at: float, ending: Literal["clean", "sigterm", "error"]) -> None:
        """A life ends by itself."""
        values = (START + at, ending, life)
        self.connection.execute("UPDATE lives SET ended_unix_seconds = ?, ending = ? WHERE life = ?", values)

    def train(self, life: int, first: int, last: int, begins: float, seconds: float = 1.0) -> float:
        """Steps of equal length from a time on, reported every few; returns when they end."""
        for start in range(first, last + 1, FLUSH_ITERATIONS):
            iterations = range(start, min(last, start + FLUSH_ITERATIONS - 1) + 1)
            ends = begins + (iterations[-1] - first + 1) * seconds
            self.record(ends, [step(life, iteration, seconds) for iteration in iterations])
        return begins + (last - first + 1) * seconds

    def fail(self, life: int, iteration: int, at: float) -> None:
        """The next life has detected that one failed."""
        row = FailureRow(
            life=life,
            iteration=iteration,
            checkpoint_iteration=None,
            description="",
            detected_unix_seconds=START + at,
        )
        self.record(at, [row])

    def save(self, life: int, iteration: int, stall: float) -> None:
        """A checkpoint is committed."""
        self.record(0.0, [CheckpointRow(life=life, iteration=iteration, status="committed", stall_seconds=stall)])

    def remember(self, snapshots: int, stall: float) -> None:
        """Snapshots to host memory."""
        add_memory_stalls(self.connection, snapshots, stall)

    def totals(self) -> list[TotalsRow]:
        """All of them."""
        rows = self.connection.execute(f"{select_sql(TotalsRow)} ORDER BY row")
        return [from_sql(TotalsRow, row) for row in rows]


def step(life: int, iteration: int, seconds: float = 1.0) -> StepRow:
    return StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=None, seconds=seconds)
