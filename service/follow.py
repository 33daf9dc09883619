"""Following a journal: what was recorded since a place in it, and that place as a short text."""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsr.journal import (
    BacktestRow,
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    JournalReader,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RehearsalRow,
)
from cpsr.service.rows import open_journal, plain_row

__all__ = ["FOLLOWED", "ROWS_AT_ONCE", "Place", "Recorded", "end_of", "recorded_after"]

# By the name under which a row is told. Their order is part of a place: a new one goes to the end.
FOLLOWED: dict[str, type[Any]] = {
    "event": EventRow,
    "checkpoint": CheckpointRow,
    "plan": PlanRow,
    "failure": FailureRow,
    "recovery": RecoveryRow,
    "rehearsal": RehearsalRow,
    "phase": PhaseRow,
    "fit": FitRow,
    "backtest": BacktestRow,
}
ROWS_AT_ONCE = 100  # of each table: a reader that was away for long is told in pieces, and none of them is large
_PLACE = re.compile(r"([0-9a-f]{1,24})-(\d{1,18}(?:\.\d{1,18}){%d})" % (len(FOLLOWED) - 1))  # noqa: UP031 - braces
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Place:
    """How far a journal was followed.

    Attributes:
        journal: which one; a journal that was set aside and begun anew is another.
        rows: number of the last row that was told, of each followed table.
    """

    journal: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.journal}-{'.'.join(map(str, self.rows))}"

    @classmethod
    def parse(cls, text: str) -> "Place | None":
        """The place that a text names; None where it is none of this version's."""
        found = _PLACE.fullmatch(text)
        return None if found is None else cls(found[1], tuple(map(int, found[2].split("."))))

    def after(self, table: int, row: int) -> "Place":
        """The place behind one more row."""
        return Place(self.journal, (*self.rows[:table], row, *self.rows[table + 1 :]))


@dataclass(frozen=True)
class Recorded:
    """One row of the journal.

    Attributes:
        name: of its table, as in FOLLOWED.
        content: plain data.
        place: behind it.
    """

    name: str
    content: dict[str, Any]
    place: Place


def end_of(run_dir: Path) -> Place:
    """The place behind everything that is recorded now.

    Raises:
        JournalError: the journal cannot be read.
    """
    with open_journal(run_dir) as reader:
        return Place(_identity(reader), tuple(reader.last_row(row_type) for row_type in FOLLOWED.values()))


def recorded_after(run_dir: Path, place: Place) -> tuple[list[Recorded], dict[str, Any] | None, bool]:
    """What was recorded after a place, in the order of its time, some of it where it is much.

    Returns:
        The rows; the newest step, None where there is none; and whether `place` is one of another journal than this:
        then there are no rows.

    Raises:
        JournalError: the journal cannot be read.
    """
    with open_journal(run_dir) as reader:
        steps = reader.recent_steps(1)
        newest = plain_row(steps[0]) if steps else None
        if _identity(reader) != place.journal:
            return [], newest, True
        return list(_rows_after(reader, place)), newest, False


def _rows_after(reader: JournalReader, place: Place) -> Iterator[Recorded]:
    tables = []
    for table, (name, row_type) in enumerate(FOLLOWED.items()):
        rows = reader.after(row_type, place.rows[table], ROWS_AT_ONCE)
        tables.append([(_time(row), table, number, name, row) for number, row in rows])
    # Merged, not sorted: within a table rows keep their order whatever the clocks of ranks say, or a reader that goes
    # on from a place would miss some.
    for _, table, number, name, row in heapq.merge(*tables, key=lambda entry: entry[:2]):
        place = place.after(table, number)
        yield Recorded(name, _content(name, row), place)


def _time(row: Any) -> float:
    return float(row.detected_unix_seconds if isinstance(row, FailureRow) else row.created_unix_seconds)


def _content(name: str, row: Any) -> dict[str, Any]:
    content = plain_row(row)
    if name == "plan":
        del content["explanation"]  # kilobytes, which `GET /plan` has
    return content


def _identity(reader: JournalReader) -> str:
    created = float(reader.meta().get("created_unix_seconds", "0"))
    return f"{round(created * MICROSECONDS):x}"
