"""The journal's rows of a rank's waits, by a clock that the test sets."""

from pathlib import Path

import pytest

from cpsr.checkpoint.paced import CopyAccount, CopyPace, Split
from cpsr.journal import BubbleRow, JournalReader, open_journal
from cpsr.learning import bubbles
from cpsr.learning.bubbles import ROW_LIFE_SHARE, ROW_SECONDS_MIN, BubbleLog, Bubbles
from cpsr.ranks.group import Group
from tests.learning.test_bubbles import Clock, iterate


class Job:
    """One rank with waits, a journal, and snapshots."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        self.run_dir, self.clock = run_dir, clock
        self.bubbles = Bubbles()
        self.pace: CopyPace | None = None
        self.journal = open_journal(run_dir, Group(), "auto")
        self.log = BubbleLog(self.bubbles, self.copied, self.journal)

    def copied(self) -> CopyAccount | None:
        return None if self.pace is None else self.pace.account

    def iterate(self, *wait_seconds: float, busy_seconds: float = 1.0) -> None:
        iterate(self.bubbles, self.clock, *(("data", seconds) for seconds in wait_seconds), busy_seconds=busy_seconds)

    def rows(self) -> list[BubbleRow]:
        self.journal.flush(20.0)
        with JournalReader(self.run_dir / "journal.db") as reader:
            return reader.newest(BubbleRow, 9999)[::-1]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    clock = Clock()
    monkeypatch.setattr(bubbles, "perf_counter", clock)
    monkeypatch.setattr(bubbles, "monotonic", clock)
    return Job(tmp_path, clock)


def test_a_row_covers_what_happened_since_the_one_before(job: Job) -> None:
    job.iterate(2.0)
    job.log.record(1)
    job.iterate(3.0, 0.5)
    job.bubbles.worked(job.clock.now - 1.2, job.clock.now - 1.0)  # within the wait of half a second, before the step
    job.iterate()
    job.log.record(3)
    first, second = job.rows()
    assert (first.rank, first.iteration, first.iterations, first.bubble_seconds) == (0, 1, 1, 2.0)
    assert (second.iteration, second.iterations, second.bubble_seconds) == (3, 2, 3.5)
    assert (second.seconds, second.slices, second.late_slices) == (5.5, 1, 0)
    assert second.used_seconds == pytest.approx(0.2)
    assert (second.copied_bytes, second.copied_beside_bytes) == (None, None)


def test_snapshots_are_recorded_once_they_are_complete(job: Job) -> None:
    job.pace = CopyPace(job.bubbles)
    job.log.record(0)
    for split in (Split(in_waits=100, beside=7), Split(in_waits=50, late=2, at_once=1)):
        job.iterate(1.0)
        job.pace.record(split, 0.1, 1.0, 10, in_waits_seconds=0.0625)
    job.log.record(2)
    job.iterate(1.0)
    job.log.record(3)
    copied = [(row.copied_seconds, row.copied_bytes, row.copied_beside_bytes) for row in job.rows()]
    assert copied == [(0.125, 150, 10), (0.0, 0, 0)]


def test_checkpoints_that_come_often_bring_few_rows(job: Job) -> None:
    hours = 48
    for minute in range(60 * hours):
        job.iterate(15.0, busy_seconds=15.0)
        job.log.at_checkpoint(2 * minute)
        job.iterate(15.0, busy_seconds=15.0)
        job.log.at_checkpoint(2 * minute + 1)
    rows = job.rows()
    assert rows[0].iteration == 0, "the first checkpoint brings one"
    spans = [row.seconds for row in rows[1:]]
    assert spans[0] == ROW_SECONDS_MIN
    assert ROW_LIFE_SHARE * 3600 * hours <= spans[-1] + 30 < 2 * ROW_LIFE_SHARE * 3600 * hours
    assert sum(row.bubble_seconds for row in rows) == pytest.approx(30.0 * 60 * hours, rel=0.01)
