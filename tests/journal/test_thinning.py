import sqlite3
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.journal import Journal, JournalReader, StepRow, writer
from cpsr.journal.database import prepare

FLUSH_SECONDS = 20.0


def step(iteration: int, life: int = 0) -> StepRow:
    # Whole seconds, so that sums of them are the same in every order.
    return StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=None, seconds=float(iteration % 7 + 1))


@st.composite
def courses(draw: st.DrawFn) -> list[StepRow]:
    """Steps of lives, each of which goes back by some iterations."""
    steps: list[StepRow] = []
    iteration = 0
    for life in range(draw(st.integers(1, 4))):
        iteration = max(0, iteration - draw(st.integers(0, 60)))
        for _ in range(draw(st.integers(0, 150))):
            iteration += 1
            steps.append(step(iteration, life))
    return steps


def kept_every(later_steps: int, full_steps: int) -> int:
    """One of how many iterations is kept of the steps with so many later ones."""
    every = 1
    while later_steps >= full_steps * every:
        every *= 2
    return every


@settings(deadline=None, max_examples=60)
@given(courses(), st.integers(1, 40), st.integers(1, 10), st.integers(1, 60))
def test_what_is_kept(course: list[StepRow], full_steps: int, slice_rows: int, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writer, "SLICE_ROWS", slice_rows):
        path = Path(folder) / "journal.db"
        connection = sqlite3.connect(path, isolation_level=None)
        prepare(connection, path)
        for start in range(0, len(course), batch):
            writer.insert_steps(connection, course[start : start + batch])
            while writer.thin(connection, full_steps):
                pass
        kept = [row for (row,) in connection.execute("SELECT row FROM steps ORDER BY row")]
        connection.close()
        with JournalReader(path) as reader:
            losses = reader.losses()
            last = reader.recent_steps(full_steps)
    assert last == course[::-1][:full_steps], "the newest steps are all there"
    newest = {one.iteration: one for one in course}
    assert all(newest[one.iteration] == one for one in losses), "a step that was given up never stands for a newer one"
    overdue: dict[int, int] = {}
    for row, one in enumerate(course, 1):
        every = kept_every(len(course) - row, full_steps)
        if one.iteration % every == 0:
            assert row in kept, "nothing goes that is to stay"
        elif row in kept:
            overdue[every] = overdue.get(every, 0) + 1
    # What a slice does not fill yet waits; a slice of the next level may be twice as long, and has half as many rows.
    assert all(count <= 2 * slice_rows for count in overdue.values())


def test_the_size_grows_with_the_doublings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SLICE_ROWS", 50)
    full_steps, count = 100, 12_800
    journal = Journal.open(tmp_path / "journal.db", full_steps)
    journal.start_life("auto")
    for first in range(1, count, 20):
        journal.record(*[step(iteration) for iteration in range(first, first + 20)])
        assert journal.flush(FLUSH_SECONDS)
    journal.close()
    assert (journal.failures(), journal.dropped_rows) == ([], 0)
    with JournalReader(tmp_path / "journal.db") as reader:
        kept = reader.losses()
        assert reader.trained_seconds() == sum(step(iteration).seconds for iteration in range(1, count + 1))
    doublings = 7
    assert full_steps * (1 + doublings / 2) <= len(kept) <= full_steps * (1 + doublings / 2) + 50 * doublings
    assert kept[0].iteration == 2**doublings


def test_a_slice_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SLICE_ROWS", 10)
    journal = Journal.open(tmp_path / "journal.db", full_steps=10)
    real, failing = writer.thin, [True]

    def thin(connection: sqlite3.Connection, full_steps: int) -> bool:
        if failing[0]:
            connection.execute("BEGIN IMMEDIATE")
            raise sqlite3.OperationalError("database or disk is full")
        return real(connection, full_steps)

    monkeypatch.setattr(writer, "thin", thin)
    for first in (1, 41):
        journal.record(*[step(iteration) for iteration in range(first, first + 40)])
        assert journal.flush(FLUSH_SECONDS)
    (failure,) = journal.failures()
    assert "cannot be thinned out" in failure
    assert "all are kept" in failure
    failing[0] = False
    for iteration in range(81, 101):
        journal.record(*[step(iteration)])
        assert journal.flush(FLUSH_SECONDS)
    journal.close()
    with JournalReader(tmp_path / "journal.db") as reader:
        assert 10 < len(reader.losses()) < 60
        assert [one.iteration for one in reader.recent_steps(10)] == list(range(100, 90, -1))
