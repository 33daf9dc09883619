"""Following a journal: rows recorded since a position, and that position as a short text."""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpsr.journal import (
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    JournalReader,
    PhaseRow,
    PlanRow,
    RecoveryRow,
)
from cpsr.service.rows import open_journal, plain_row

__all__ = ["FOLLOWED", "ROWS_AT_ONCE", "News", "Place", "Recorded", "end_of", "recorded_after", "start_of"]

# By event name. Their order is part of a position: append new ones at the end.
FOLLOWED: dict[str, type[Any]] = {
    "event": EventRow,
    "checkpoint": CheckpointRow,
    "plan": PlanRow,
    "failure": FailureRow,
    "recovery": RecoveryRow,
    "phase": PhaseRow,
    "fit": FitRow,
    "backtest": BacktestRow,
    "bubble": BubbleRow,
}
ROWS_AT_ONCE = 100  # rows of each table at a time: a reader that was away for long gets small pieces
_ROWS = r"\d{1,18}(?:\.\d{1,18}){%d}" % (len(FOLLOWED) - 1)  # noqa: UP031 - braces
_PLACE = re.compile(rf"([0-9a-f]{{1,24}})-([0-9a-f]{{1,15}})-({_ROWS})")
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Place:
    """How far a journal was followed.

    Attributes:
        journal: which one; a journal that was set aside and begun anew is another.
        opened: when the writer whose rows these were had opened it, in microseconds; 0: not known.
        rows: number of the last row that was sent, of each followed table.
    """

    journal: str
    opened: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.journal}-{self.opened:x}-{'.'.join(map(str, self.rows))}"

    @classmethod
    def parse(cls, text: str) -> "Place | None":
        """The position that a text names; None where it is not of this version."""
        found = _PLACE.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2], 16), tuple(map(int, found[3].split("."))))

    def after(self, table: int, row: int) -> "Place":
        """The place behind one more row."""
        return replace(self, rows=(*self.rows[:table], row, *self.rows[table + 1 :]))


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


@dataclass(frozen=True)
class News:
    """New rows of a journal.

    Attributes:
        begin: the place behind which its rows are: the one that was asked for, as far as the journal still agrees.
        reset: why it is not the one that was asked for; empty where it is.
        rows: in the order of their time; some of them where they are many.
        step: the newest step; None where there is none.
    """

    begin: Place
    reset: str
    rows: list[Recorded]
    step: dict[str, Any] | None


def end_of(run_dir: Path) -> Place:
    """The place behind everything that is recorded now.

    Raises:
        JournalError: the journal cannot be read.
    """
    with open_journal(run_dir) as reader, reader.at_one_time():
        start = _start(reader)
        return replace(start, rows=tuple(reader.last_row(row_type) for row_type in FOLLOWED.values()))


def start_of(place: Place) -> Place:
    """The place before everything in the same journal."""
    return replace(place, rows=(0,) * len(FOLLOWED))


def recorded_after(run_dir: Path, place: Place) -> News:
    """Rows recorded after a position.

    A power cut may take the last rows of a journal, whose numbers are then used again: rows that are
    still there count as sent, and the others are sent. If the journal is another one, nothing of it was sent yet.

    Raises:
        JournalError: the journal cannot be read.
    """
    with open_journal(run_dir) as reader, reader.at_one_time():
        steps = reader.recent_steps(1)
        begin, reset = _agreed(reader, place)
        rows = list(_rows_after(reader, begin))
        return News(begin, reset, rows, plain_row(steps[0]) if steps else None)


def _agreed(reader: JournalReader, place: Place) -> tuple[Place, str]:
    """The place up to which a journal still has the sent rows, and why it is another; "" if it is the same."""
    start = _start(reader)
    if start.journal != place.journal:
        return start, "the journal is another one than the id's: it was begun anew"
    # The first writer after the one whose rows were sent: what it found was sent, or will be.
    later = next((last for opened, last in reader.openings() if opened > place.opened), {})
    kept = tuple(
        min(row, later.get(row_type, row)) for row, row_type in zip(place.rows, FOLLOWED.values(), strict=True)
    )
    lost = "" if kept == place.rows else "the journal has lost its last rows, for example by a power cut"
    return replace(start, rows=kept), lost


def _start(reader: JournalReader) -> Place:
    created = float(reader.meta().get("created_unix_seconds", "0"))
    openings = reader.openings()
    opened = openings[-1][0] if openings else 0
    return Place(f"{round(created * MICROSECONDS):x}", opened, (0,) * len(FOLLOWED))


def _rows_after(reader: JournalReader, place: Place) -> Iterator[Recorded]:
    tables = []
    for table, (name, row_type) in enumerate(FOLLOWED.items()):
        rows = reader.after(row_type, place.rows[table], ROWS_AT_ONCE)
        tables.append([(_time(row), table, number, name, row) for number, row in rows])
    # Merged, not sorted: within a table rows keep their order whatever the clocks of ranks, or a reader that goes
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
