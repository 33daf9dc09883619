"""Event files: rows of ranks that do not write the journal, for rank 0 to import.

One line per row: the xxh3-64 of the JSON in hex, a blank, the row's kind, a blank, the JSON, a newline; written by a
single append.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from cpsr.journal.database import NO_SPACE
from cpsr.journal.rows import BubbleRow, EventRow, Row, StepRow, decode, encode, row_type_of

__all__ = ["EventFile", "read_new_rows"]

log = logging.getLogger(__name__)

RankRow = EventRow | BubbleRow  # what ranks other than 0 record


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

    def record(self, *rows: Row | StepRow) -> None:
        """Append events and bubbles; rows that only rank 0 records are ignored.

        A row is complete or left out, even if this process is killed.
        """
        for row in rows:
            if isinstance(row, RankRow):
                self._append(row)

    def _append(self, row: RankRow) -> None:
        try:
            if self._descriptor < 0 and not self._closed:
                self._open()
            kind = "event" if isinstance(row, EventRow) else row.KIND
            data = f"{kind} {encode(row)}".encode()
            line = (b"\n" if self._torn else b"") + f"{xxhash.xxh3_64_hexdigest(data)} ".encode() + data + b"\n"
            written = os.write(self._descriptor, line)
        except (OSError, ValueError) as error:
            self._fail(getattr(error, "strerror", None) or str(error))
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


def read_new_rows(path: Path, place: Sequence[int], life: int) -> tuple[list[Row], list[int]]:
    """The rows behind a place in an event file, and the place behind them.

    A line without its newline is left for later. A damaged line becomes an event that names file and line; so does a
    file that has lost its tail, which is read from its end on.

    Args:
        path: of the file.
        place: bytes and lines that were read before.
        life: of the events about damage.

    Raises:
        OSError: the file cannot be read.
    """
    offset_bytes, lines = place
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < offset_bytes:
            file.seek(0)
            message = f"has {size} bytes but {offset_bytes} were read before; it lost its tail, later lines are read"
            return [_damage(path, message, life)], [size, file.read().count(b"\n")]
        file.seek(offset_bytes)
        complete, newline, _torn = file.read().rpartition(b"\n")
    rows: list[Row] = []
    for line in complete.split(b"\n") if newline else []:
        lines += 1
        try:
            rows.append(_parse(line))
        except ValueError as error:
            rows.append(_damage(path, f"line {lines} is damaged and was skipped: {error}", life))
    return rows, [offset_bytes + len(complete) + len(newline), lines]


def _parse(line: bytes) -> Row:
    """The row of one complete line, without its newline.

    Raises:
        ValueError: the checksum does not fit, or the content is no row.
    """
    checksum, _, data = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(data).encode():
        raise ValueError("its checksum does not fit its content")
    kind, _, content = data.decode().partition(" ")
    row: Row = decode(row_type_of(kind), content)
    if not isinstance(row, RankRow):
        raise ValueError(f"a {kind} is recorded by rank 0 alone")
    return row


def _damage(path: Path, message: str, life: int) -> EventRow:
    digits = "".join(filter(str.isdigit, path.stem))
    # Only the file name shows whose events were lost.
    rank = int(digits) if digits else 0
    return EventRow(life=life, rank=rank, kind="event_file_damaged", message=f"{path.name} {message}")
