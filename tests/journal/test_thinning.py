import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.journal import Journal, JournalReader, StepRow, writer
from cpsr.journal.database import prepare
from cpsr.journal.rows import step_columns_of

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
@given(courses(), st.integers(1, 40), st.integers(1, 60))
def test_what_is_kept(course: list[StepRow], full_steps: int, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            prepare(connection, path)
            for start in range(0, len(course), batch):
                columns = [step_columns_of(one) for one in course[start : start + batch]]
                connection.executemany(writer.INSERT_STEP, columns)
                writer.thin(connection, full_steps)
            kept = {row for (row,) in connection.execute("SELECT row FROM steps")}
        with JournalReader(path) as reader:
            losses = reader.losses()
    rows = enumerate(course, 1)
    assert kept == {row for row, one in rows if one.iteration % kept_every(len(course) - row, full_steps) == 0}
    newest = {one.iteration: one for one in course}
    assert all(newest[one.iteration] == one for one in losses), "a step that was given up never stands for a newer one"


def test_the_size_grows_with_the_doublings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "THIN_STEPS", 50)
    full_steps, count = 100, 12_800
    journal = Journal.open(tmp_path / "journal.db", full_steps)
    journal.start_life("auto")
    for first in range(1, count, 20):
        journal.record(*[step(iteration) for iteration in range(first, first + 20)])
    journal.close()
    assert journal.dropped_rows == 0
    with JournalReader(tmp_path / "journal.db") as reader:
        kept = reader.losses()
        (trained,) = reader.life_seconds().values()
        assert reader.trained_iterations() == kept[-1].iteration
    assert trained == pytest.approx(sum(step(iteration).seconds for iteration in range(1, count + 1)), rel=0.05)
    doublings = 7
    assert full_steps * (1 + doublings / 2) <= len(kept) <= full_steps * (1 + doublings / 2) + 60
    assert kept[0].iteration == 2**doublings
