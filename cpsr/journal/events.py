"""Event files: rows of ranks that do not write the journal, for rank 0 to import.

One line per row: the xxh3-64 of the JSON in hex, a blank, the JSON, a newline; written by a single append.
"""

import dataclasses
import json
import logging
import os
import sqlite3
from pathlib import Path

import xxhash

from cpsr.journal.rows import BubbleRow, EventRow, to_sql
from cpsr.journal.schema import NO_SPACE, TABLES, insert_sql
from cpsr.journal.statements import Row

__all__ = ["EventFile", "RankRow", "import_events"]

log = logging.getLogger(__name__)

RankRow = EventRow | BubbleRow  # what ranks other than 0 record
# A line names its table; without a name it is an event.
_TABLE = "table"
_ROWS: dict[str, type[RankRow]] = {TABLES[EventRow]: EventRow, TABLES[BubbleRow]: BubbleRow}


class EventFile:
    """The append-only event file of one rank, for example `<run_dir>/events/rank-00001.jsonl`.

    Like the journal, it never stops training: a failing append is logged once, counted in `failed_appends`, and
    returned by `failures()`. If a full disk prevents the creation of the file, every append retries it.

    Raises:
        OSError: the file cannot be opened, for another reason than a full disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed_appends = 0
        self._failures: list[str] = []
        self._descriptor = -1
        self._torn = self._closed = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._fail(error.strerror or str(error))

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        size = os.fstat(self._descriptor).st_size
        # A line torn by the death of an earlier life must not swallow the next one.
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def record(self, *rows: Row) -> None:
        """Append events and bubbles; rows that only rank 0 records are ignored."""
        for row in rows:
            if isinstance(row, RankRow):
                self.append(row)

    def append(self, row: RankRow) -> None:
        """Append one row; it is complete or left out, even if this process is killed."""
        try:
            if self._descriptor < 0 and not self._closed:
                self._open()
            line = (b"\n" if self._torn else b"") + _format_line(row)
            written = os.write(self._descriptor, line)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._torn = written < len(line)
        if self._torn:
            self._fail(f"only {written} of {len(line)} bytes were written")

    def failures(self) -> list[str]:
        """Failures since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Close the file; later rows are lost and reported by `failures()`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._closed = -1, True

    def _fail(self, reason: str) -> None:
        self.failed_appends += 1
        if self.failed_appends == 1:
            message = f"cannot append to the event file {self.path}: {reason}; the row is lost, training goes on"
            self._failures.append(message)
            log.error(message)


def _format_line(row: RankRow) -> bytes:
    named = {} if isinstance(row, EventRow) else {_TABLE: TABLES[type(row)]}
    data = json.dumps({**dataclasses.asdict(row), **named}, sort_keys=True).encode()
    return f"{xxhash.xxh3_64_hexdigest(data)} ".encode() + data + b"\n"


def _parse_line(line: bytes) -> RankRow:
    """Read one complete line, without its newline.

    Raises:
        ValueError: the checksum does not fit, or the content is no row of this version.
    """
    checksum, _, data = line.partition(b" ")
    expected = xxhash.xxh3_64_hexdigest(data).encode()
    if checksum != expected:
        raise ValueError("its checksum does not fit its content")
    try:
        content = dict(json.loads(data))
        row = _ROWS[content.pop(_TABLE, TABLES[EventRow])](**content)
        to_sql(row)  # so that a value of the wrong type is this line's error
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no row of this version: {error}") from error
    return row


def import_events(connection: sqlite3.Connection, directory: Path, life: int) -> None:
    """Copy new lines of the files in `directory` into the journal, in the open transaction.

    The read offset of each file is kept in `meta` and commits with the rows, so that every line arrives exactly once. A
    line without its newline is left for later. A damaged line becomes an event of `life` that names file and line.

    Raises:
        OSError: a file cannot be read; the transaction must be rolled back.
    """
    for path in sorted(directory.glob("*.jsonl")):
        key = f"events_read:{path.name}"
        stored = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        offset_bytes, lines = json.loads(stored[0]) if stored else (0, 0)
        if path.stat().st_size < offset_bytes:
            offset_bytes, lines, rows = _shrunk(path, offset_bytes, life)
        else:
            offset_bytes, lines, rows = _read_new(path, offset_bytes, lines, life)
        for row in rows:
            connection.execute(insert_sql(type(row)), to_sql(row))
        connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps([offset_bytes, lines])))


def _read_new(path: Path, offset_bytes: int, lines: int, life: int) -> tuple[int, int, list[RankRow]]:
    """New offset in bytes, new count of lines, and the rows between the old and the new offset."""
    with path.open("rb") as file:
        file.seek(offset_bytes)
        complete, newline, _torn = file.read().rpartition(b"\n")
    rows: list[RankRow] = []
    for line in complete.split(b"\n") if newline else []:
        lines += 1
        try:
            rows.append(_parse_line(line))
        except ValueError as error:
            rows.append(_damage(path, f"line {lines} is damaged and was skipped: {error}", life))
    return offset_bytes + len(complete) + len(newline), lines, rows


def _shrunk(path: Path, offset_bytes: int, life: int) -> tuple[int, int, list[RankRow]]:
    """Continue at the end of a file that lost its tail: the rest was imported before."""
    content = path.read_bytes()
    message = f"has {len(content)} bytes but {offset_bytes} were read before; it lost its tail, later lines are read"
    return len(content), content.count(b"\n"), [_damage(path, message, life)]


def _damage(path: Path, message: str, life: int) -> RankRow:
    digits = "".join(filter(str.isdigit, path.stem))
    # Only the file name shows whose events were lost.
    rank = int(digits) if digits else 0
    return EventRow(life=life, rank=rank, kind="event_file_damaged", message=f"{path.name} {message}")
