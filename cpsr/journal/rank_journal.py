"""One rank's side of the run's journal: global rank 0 writes it, the others append to their event files."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cpsr.errors import JournalDamagedError, JournalError
from cpsr.journal.events import EventFile
from cpsr.journal.reader import JournalReader
from cpsr.journal.rows import EventRow
from cpsr.journal.statements import Row
from cpsr.journal.writer import Journal

__all__ = ["RankJournal", "RunJournal", "open_journal"]

if TYPE_CHECKING:  # a script that reads a journal does not pay for torch
    from cpsr.ranks.group import Group

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
Answer = TypeVar("Answer")


class RankJournal:
    """The journal of a rank other than 0: events and bubbles, in an event file that rank 0 reads.

    It never blocks or stops training. It ignores rows that only rank 0 records, so that callers need not check.

    Args:
        life: number of this life of the run.
        rank: global rank.
        events: the rank's event file; None on rank 0.
    """

    def __init__(self, life: int, rank: int, events: EventFile | None) -> None:
        self.life = life
        self.rank = rank
        self._events = events

    def event(self, kind: str, message: str, iteration: int | None = None, level: int = logging.INFO) -> None:
        """Log one line and record it."""
        logger.log(level, "%s", message)
        self.record(EventRow(life=self.life, rank=self.rank, kind=kind, message=message, iteration=iteration))

    def record(self, *rows: Row) -> None:
        """Record rows of one table."""
        if self._events is not None:
            self._events.record(*rows)

    def update_recovery(
        self, recovery_id: str, outcome: Literal["kept", "rolled_back"], guard: Mapping[str, Any]
    ) -> None:
        """Replace the outcome and the guard's measurements of a recorded recovery (rank 0)."""

    def add_memory_stalls(self, snapshots: int, seconds: float) -> None:
        """Add the stalls of so many snapshots to host memory to the run's totals (rank 0)."""

    def read(self, question: Callable[[JournalReader], Answer], default: Answer, consequence: str) -> Answer:
        """Query the journal for records of earlier lives (rank 0).

        Args:
            question: called with an open reader.
            default: the answer on other ranks, and if the journal cannot be read.
            consequence: of that, for the warning.
        """
        return default

    def gather_events(self) -> None:
        """Import new rows of the other ranks' event files (rank 0)."""

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all rows so far can be read; never on the training thread (rank 0)."""

    def close(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Write what waits and end the life's record."""
        if self._events is not None:
            self._events.close()


class RunJournal(RankJournal):
    """The journal of rank 0: all rows, in `<run_dir>/journal.db`."""

    def __init__(self, life: int, journal: Journal, events_directory: Path) -> None:
        super().__init__(life, 0, None)
        self._journal = journal
        self._directory = events_directory

    def record(self, *rows: Row) -> None:
        """Record rows of one table."""
        self._journal.record(*rows)

    def update_recovery(
        self, recovery_id: str, outcome: Literal["kept", "rolled_back"], guard: Mapping[str, Any]
    ) -> None:
        """Replace the outcome and the guard's measurements of a recorded recovery."""
        self._journal.update_recovery(recovery_id, outcome, guard)

    def add_memory_stalls(self, snapshots: int, seconds: float) -> None:
        """Add the stalls of so many snapshots to host memory to the run's totals."""
        self._journal.add_memory_stalls(snapshots, seconds)

    def read(self, question: Callable[[JournalReader], Answer], default: Answer, consequence: str) -> Answer:
        """Query the journal for records of earlier lives."""
        try:
            with JournalReader(self._journal.path) as reader:
                return question(reader)
        except JournalError as error:
            logger.warning("%s: the journal cannot be read: %s", consequence, error)
            return default

    def gather_events(self) -> None:
        """Import new rows of the other ranks' event files."""
        self._journal.import_events(self._directory)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all rows so far can be read; never on the training thread."""
        self._journal.flush(timeout_seconds)

    def close(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Write what waits and end the life's record."""
        self.gather_events()
        self._journal.end_life(ending)
        self._journal.close(CLOSE_SECONDS)


def open_journal(
    run_dir: Path, group: "Group", mode: str, after_life: int = -1, full_steps: int | None = None
) -> RankJournal:
    """Open this rank's side of the journal and begin a life; a collective.

    Args:
        run_dir: the run's directory.
        group: the ranks.
        mode: the configured recovery mode.
        after_life: newest life known from another source; this life gets a larger number.
        full_steps: number of newest steps that are not thinned out; None for all.

    Raises:
        JournalError: the journal cannot be used; every rank raises it.
    """
    directory = run_dir / "events"
    journal, events, refusal, life = None, None, None, 0
    try:
        if group.rank == 0:
            journal = _open_writer(run_dir / "journal.db", full_steps)
            life = journal.start_life(mode, after_life, group.size)
        else:
            events = EventFile(directory / f"rank-{group.rank:05d}.jsonl")
    except JournalError as error:
        refusal = str(error)
    except OSError as error:
        refusal = f"rank {group.rank} cannot open its event file: {error}"
    opened = group.gather({"refusal": refusal, "life": life})
    refusals = [part["refusal"] for part in opened if part["refusal"] is not None]
    if refusals:
        raise JournalError("; ".join(refusals))
    life = opened[0]["life"]
    return RankJournal(life, group.rank, events) if journal is None else RunJournal(life, journal, directory)


def _open_writer(path: Path, full_steps: int | None) -> Journal:
    """Open the journal; a damaged one is set aside, because a restart must not wait for its repair."""
    try:
        return Journal.open(path, full_steps)
    except JournalDamagedError as error:
        suffix = f".damaged-{int(time.time())}"
        for part in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            if part.exists():
                part.rename(part.with_name(part.name + suffix))
        logger.error("%s; it was set aside as %s and a new journal begins", error, path.name + suffix)
        return Journal.open(path, full_steps)
