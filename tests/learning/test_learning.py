"""What a running job records of its predictor's progress."""

import time
from pathlib import Path

from cpsr import CPSRRecovery
from cpsr.journal import JournalReader, LearningRow
from tests.recovery.test_faults import Loop, config, train

PATIENCE_SECONDS = 60.0


def learn(run_dir: Path, until: int, checkpoints: int) -> list[LearningRow]:
    """One life that ends once its predictor has taken in so many checkpoints; returns the run's rows, oldest first."""
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(run_dir, learning={"budget_fraction": 1.0})) as recovery:
        train(recovery, loop, until)
        learning, deadline = recovery.life.loop.learning, time.monotonic() + PATIENCE_SECONDS
        while learning.learner.ask(learning.predictor.progress).checkpoints < checkpoints:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with JournalReader(run_dir / "journal.db") as reader:
        return reader.newest(LearningRow, 999)[::-1]


def test_every_checkpoint_that_was_taken_in_is_counted_over_lives(tmp_path: Path) -> None:
    rows = learn(tmp_path, until=10, checkpoints=3)
    assert (rows[0].iteration, rows[0].checkpoints, rows[0].updates) == (None, 0, 0)
    assert (rows[-1].life, rows[-1].iteration, rows[-1].checkpoints, rows[-1].first_iteration) == (0, 9, 3, 0)
    assert [row.checkpoints for row in rows] == sorted({row.checkpoints for row in rows}), "one row for each change"
    later = learn(tmp_path, until=16, checkpoints=5)[len(rows) :]
    assert {row.life for row in later} == {1}
    assert later[-1].checkpoints >= 5
    with JournalReader(tmp_path / "journal.db") as reader:
        assert later[-1].checkpoints <= reader.committed_between(0, 0, 999)


def test_a_life_that_does_not_learn_records_nothing(tmp_path: Path) -> None:
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(tmp_path, learning={"budget_fraction": 0.0})) as recovery:
        train(recovery, loop, 5)
    with JournalReader(tmp_path / "journal.db") as reader:
        assert reader.latest_learning() is None
