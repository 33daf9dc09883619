"""Event files: how a rank that may not write the journal leaves word for the one that may.

One line per event: the xxh3-64 of the JSON in hex, a blank, the JSON, a newline; written by a single append.
"""

import dataclasses
import json
import logging
import os
import sqlite3
from pathlib import Path

import xxhash

from cpsr.journal.rows import EventRow, to_sql
from cpsr.journal.schema import insert_sql

__all__ = ["EventFile", "import_events"]

log = logging.getLogger(__name__)


class EventFile:
    """The append-only event file of one rank, for example `<run_dir>/events/rank-00001.jsonl`.

    Like the journal, it never stops training: a failing append is logged once, counted in `failed_appends`, and told
    by `failures()`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed_appends = 0
        self._failures: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        # A line torn by the death of an earlier life must not swallow the next one.
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, event: EventRow) -> None:
        """Append one event; it is complete or left out, whatever happens to this process."""
        line = (b"\n" if self._torn else b"") + _format_line(event)
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._torn = written < len(line)
        if self._torn:
            self._fail(f"only {written} of {len(line)} bytes were written")

    def failures(self) -> list[str]:
        """What went wrong since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Close the file; an event that is appended later is lost and told by `failures()`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _fail(self, reason: str) -> None:
        self.failed_appends += 1
        if self.failed_appends == 1:
            message = f"cannot append to the event file {self.path}: {reason}; the event is lost, training goes on"
            self._failures.append(message)
            log.error(message)


def _format_line(event: EventRow) -> bytes:
    data = json.dumps(dataclasses.asdict(event), sort_keys=True).encode()
    return f"{xxhash.xxh3_64_hexdigest(data)} ".encode() + data + b"\n"


def _parse_line(line: bytes) -> EventRow:
    """Read one complete line, without its newline.

    Raises:
        ValueError: the checksum does not fit, or the content is no event of this version.
    """
    checksum, _, data = line.partition(b" ")
    expected = xxhash.xxh3_64_hexdigest(data).encode()
    if checksum != expected:
        raise ValueError("its checksum does not fit its content")
    try:
        event = EventRow(**json.loads(data))
        to_sql(event)  # so that a value of the wrong type is this line's error
    except TypeError as error:
        raise ValueError(f"it is no event of this version: {error}") from error
    return event


def import_events(connection: sqlite3.Connection, directory: Path, life: int) -> None:
    """Copy what the files in `directory` gained since the last import into the journal, in the open transaction.

    How far each file was read is kept in `meta` and commits with the rows, so that every line arrives exactly once. A
    line without its newline is left for later. A damaged line becomes an event of `life` that names file and line.

    Raises:
        OSError: a file cannot be read; the transaction must be rolled back.
    """
    insert = insert_sql(EventRow)
    for path in sorted(directory.glob("*.jsonl")):
        key = f"events_read:{path.name}"
        stored = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        offset_bytes, lines = json.loads(stored[0]) if stored else (0, 0)
        if path.stat().st_size < offset_bytes:
            offset_bytes, lines, events = _shrunk(path, offset_bytes, life)
        else:
            offset_bytes, lines, events = _read_new(path, offset_bytes, lines, life)
        connection.executemany(insert, [to_sql(event) for event in events])
        connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps([offset_bytes, lines])))


def _read_new(path: Path, offset_bytes: int, lines: int, life: int) -> tuple[int, int, list[EventRow]]:
    """New offset in bytes, new count of lines, and the events between the old and the new offset."""
    with path.open("rb") as file:
        file.seek(offset_bytes)
        complete, newline, _torn = file.read().rpartition(b"\n")
    events = []
    for line in complete.split(b"\n") if newline else []:
        lines += 1
        try:
            events.append(_parse_line(line))
        except ValueError as error:
            events.append(_damage(path, f"line {lines} is damaged and was skipped: {error}", life))
    return offset_bytes + len(complete) + len(newline), lines, events


def _shrunk(path: Path, offset_bytes: int, life: int) -> tuple[int, int, list[EventRow]]:
    """Go on at the end of a file that lost its tail: what it still holds was imported before."""
    content = path.read_bytes()
    message = f"has {len(content)} bytes but {offset_bytes} were read before; it lost its tail, later lines are read"
    return len(content), content.count(b"\n"), [_damage(path, message, life)]


def _damage(path: Path, message: str, life: int) -> EventRow:
    digits = "".join(filter(str.isdigit, path.stem))
    # The file name is all that says whose events were lost.
    rank = int(digits) if digits else 0
    return EventRow(life=life, rank=rank, kind="event_file_damaged", message=f"{path.name} {message}")
