"""Event files: events of ranks that do not write the journal, for rank 0 to import.

One line of JSON per event. A newline before and after it, written by the same append, keeps it apart from a line that
an earlier life did not finish.
"""

import errno
import logging
import os
from pathlib import Path

from cpsr.journal.rows import EventColumns, EventRow, Row, StepRow, columns_of, decode, encode

__all__ = ["EventFile", "read_new_rows"]

log = logging.getLogger(__name__)


class EventFile:
    """The append-only event file of one rank, for example `<run_dir>/events/rank-00001.jsonl`.

    Its first event makes it: most ranks have none, and rank 0 reads no file of them. Like the journal, it never stops
    training: a failing append loses its row, and the first one is logged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False

    def record(self, *rows: Row | StepRow) -> None:
        """Append events; rows that only rank 0 records are ignored."""
        for row in rows:
            if isinstance(row, EventRow):
                try:
                    self._append(f"\n{encode(row)}\n".encode())
                except (OSError, ValueError) as error:
                    self._fail(error)

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _fail(self, error: OSError | ValueError) -> None:
        if not self._failed:
            said = getattr(error, "strerror", None) or str(error)
            log.error("cannot append to the event file %s: %s; the row is lost, training goes on", self.path, said)
        self._failed = True


def read_new_rows(path: Path, bytes_read: int, life: int) -> tuple[list[EventColumns], int]:
    """The events behind a place in an event file, for the table of events, and the place behind them.

    A line without its newline is left for later. A damaged line becomes an event that names its place; so does a file
    that has lost its tail, which is read from its end on.

    Args:
        path: of the file.
        bytes_read: before.
        life: of the events about damage.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < bytes_read:
            message = f"has {size} bytes but {bytes_read} were read before; it lost its tail, later lines are read"
            return [_damage(path, message, life)], size
        file.seek(bytes_read)
        complete, newline, _torn = file.read().rpartition(b"\n")
    rows: list[EventColumns] = []
    for line in complete.split(b"\n"):
        try:
            rows += [columns_of(decode(EventRow, line.decode()))] if line else []
        except ValueError as error:
            rows.append(_damage(path, f"has a damaged line near byte {bytes_read}, which was skipped: {error}", life))
        bytes_read += len(line) + 1 if newline else 0
    return rows, bytes_read


def _damage(path: Path, message: str, life: int) -> EventColumns:
    digits = "".join(filter(str.isdigit, path.stem))
    # Only the file name shows whose events were lost.
    rank = int(digits) if digits else 0
    return columns_of(EventRow(life=life, rank=rank, kind="event_file_damaged", message=f"{path.name} {message}"))
