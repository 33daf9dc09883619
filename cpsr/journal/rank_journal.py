"""One rank's side of the run's journal: global rank 0 writes it, the others append to their event files."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from cpsr.errors import JournalDamagedError, JournalError
from cpsr.journal.events import EventFile
from cpsr.journal.reader import JournalReader
from cpsr.journal.rows import EventRow, Row, StepRow
from cpsr.journal.writer import Journal
from cpsr.ranks.link import VERBOSE

__all__ = ["RankJournal", "log_to_terminal", "open_journal"]

if TYPE_CHECKING:  # a script that reads a journal does not pay for torch
    from cpsr.ranks.group import Group

logger = logging.getLogger(__name__)

EVENTS = "events"  # directory of the event files
Answer = TypeVar("Answer")


class RankJournal:
    """A rank's side of the journal.

    Rank 0 records all rows in `<run_dir>/journal.db`. The other ranks record events in an event file that rank 0
    reads, and ignore all else, so that callers need not check. It never blocks or stops training.

    Args:
        life: number of this life of the run.
        rank: global rank.
        file: the journal on rank 0, the rank's event file on others; None records nothing.
    """

    def __init__(self, life: int, rank: int, file: Journal | EventFile | None) -> None:
        self.life, self.rank, self._file = life, rank, file
        self._journal = file if isinstance(file, Journal) else None

    def event(self, kind: str, message: str, iteration: int | None = None, level: int = logging.INFO) -> None:
        """Log one line and record it."""
        logger.log(level, "%s", message)
        self.record(EventRow(life=self.life, rank=self.rank, kind=kind, message=message, iteration=iteration))

    def record(self, *rows: Row | StepRow) -> None:
        """Record rows."""
        if self._file is not None:
            self._file.record(*rows)

    def read(self, question: Callable[[JournalReader], Answer], default: Answer, consequence: str) -> Answer:
        """Query the journal for records of earlier lives.

        Args:
            question: called with an open reader.
            default: the answer on other ranks, and if the journal cannot be read.
            consequence: of that, for the warning.
        """
        if self._journal is None:
            return default
        try:
            with JournalReader(self._journal.path) as reader:
                return question(reader)
        except JournalError as error:
            logger.warning("%s: the journal cannot be read: %s", consequence, error)
            return default

    def gather_events(self) -> None:
        """Import new rows of the other ranks' event files."""
        if self._journal is not None:
            self._journal.import_events(self._journal.path.parent / EVENTS)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all rows so far can be read; never on the training thread."""
        if self._journal is not None:
            self._journal.flush(timeout_seconds)

    def close(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Write what waits and end the life's record."""
        if self._journal is not None:
            self.gather_events()
            self._journal.end_life(ending)
            self._journal.close()


def open_journal(run_dir: Path, group: "Group", mode: str, after_life: int = -1) -> RankJournal:
    """Open this rank's side of the journal and begin a life; a collective.

    Args:
        run_dir: the run's directory.
        group: the ranks.
        mode: the configured recovery mode.
        after_life: newest life known from another source; this life gets a larger number.

    Raises:
        JournalError: the journal cannot be used; every rank raises it.
    """
    file: Journal | EventFile = EventFile(run_dir / EVENTS / f"rank-{group.rank:05d}.jsonl")
    refusal, life = None, 0
    if group.rank == 0:
        try:
            file = _open_writer(run_dir / "journal.db")
            life = file.start_life(mode, after_life, group.size)
        except JournalError as error:
            refusal = str(error)
    refusal, life = group.broadcast([refusal, life])
    if refusal is not None:
        raise JournalError(refusal)
    return RankJournal(life, group.rank, file)


def _open_writer(path: Path) -> Journal:
    """Open the journal; a damaged one is set aside, because a restart must not wait for its repair."""
    try:
        return Journal.open(path)
    except JournalDamagedError as error:
        suffix = f".damaged-{int(time.time())}"
        for part in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            if part.exists():
                part.rename(part.with_name(part.name + suffix))
        logger.error("%s; it was set aside as %s and a new journal begins", error, path.name + suffix)
        return Journal.open(path)


def log_to_terminal(rank: int) -> None:
    """Show one line for each important event, unless the user has configured logging."""
    package = logging.getLogger("cpsr")
    if package.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s] [CPSR] [rank {rank}] %(message)s", "%H:%M:%S"))
    package.addHandler(handler)
    level = logging.DEBUG if os.environ.get(VERBOSE) else logging.INFO
    package.setLevel(level if rank == 0 else logging.WARNING)
    package.propagate = False
