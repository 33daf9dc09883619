"""What the writer adds up of the run's time while it records other rows."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.journal import Journal, JournalReader, StepRow, thinning
from tests.journal.timeline import START, Timeline, step

FLUSH_SECONDS = 20.0


@pytest.fixture
def timeline(tmp_path: Path) -> Iterator[Timeline]:
    with Timeline(tmp_path / "journal.db") as timeline:
        yield timeline


def moments(timeline: Timeline) -> list[tuple[str, int, float]]:
    return [(row.moment, row.life, row.created_unix_seconds - START) for row in timeline.totals()]


def test_a_life_has_a_row_for_its_start_its_first_step_and_the_newest_one(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 40, begins=10)
    assert moments(timeline) == [("start", 0, 0), ("first", 0, 10), ("step", 0, 50)]
    newest = timeline.totals()[-1]
    assert (newest.iteration, newest.reached_iteration, newest.step_seconds) == (40, 40, 40)
    assert (newest.repeated_seconds, newest.restart_seconds, newest.paused_seconds) == (0, 0, 0)


def test_rows_of_steps_are_one_a_minute_and_of_the_last_two_hours(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    ends = timeline.train(0, 1, 1000, begins=0, seconds=10)
    assert ends == 10_000
    rows = moments(timeline)
    assert [moment for moment, _, _ in rows[:2]] == ["start", "first"]
    at = [at for moment, _, at in rows[2:]]
    assert (at[-1], at[0] >= ends - 7200) == (ends, True)
    assert len(at) <= 37  # every flush, of 20 steps, takes 200 s here
    timeline.train(0, 1001, 2000, begins=ends, seconds=0.5)
    at = [at for moment, _, at in moments(timeline)[2:] if at > ends]
    assert len(at) == 10  # 500 s, in flushes of 10 s: the sixth would end beyond the minute
    assert timeline.totals()[-1].step_seconds == 10_500


def test_an_iteration_that_was_completed_before_is_repeated(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.train(0, 61, 80, begins=100)  # a roll-back in the life
    newest = timeline.totals()[-1]
    assert (newest.repeated_seconds, newest.repeated_until_iteration, newest.iteration) == (20, 100, 80)
    timeline.train(0, 81, 120, begins=120)
    newest = timeline.totals()[-1]
    assert (newest.repeated_seconds, newest.reached_iteration, newest.step_seconds) == (40, 120, 160)


def test_stalls_in_repeated_steps_are_known(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.save(0, 50, 2.0)
    timeline.remember(3, 0.5)
    timeline.train(0, 61, 100, begins=100)
    timeline.save(0, 80, 4.0)
    timeline.remember(1, 0.25)
    timeline.train(0, 101, 120, begins=140)
    timeline.save(0, 100, 8.0)  # in step 101, which was the first of its iteration
    newest = timeline.totals()[-1]
    assert (newest.checkpoint_stall_seconds, newest.memory_stall_seconds) == (14, 0.75)
    assert (newest.repeated_stall_seconds, newest.memory_snapshots) == (4.25, 4)


def test_steps_that_a_killed_life_did_not_report_count_up_to_the_restart(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.begin(1, 130)
    timeline.fail(0, 105, at=140)
    timeline.fail(0, 105, at=140)  # once
    assert moments(timeline)[-1] == ("failure", 0, 105)
    timeline.train(1, 61, 80, begins=150)
    newest = timeline.totals()[-1]
    assert (newest.reached_iteration, newest.repeated_seconds) == (105, 20)
    assert (newest.step_seconds, newest.restart_seconds) == (125, 45)
    timeline.begin(2, 171)  # a second later: there is no room for more steps, whatever the counter says
    timeline.fail(1, 99, at=172)
    newest = timeline.totals()[-1]
    assert (newest.moment, newest.step_seconds, newest.repeated_seconds) == ("failure", 126, 21)


def test_a_life_that_died_before_its_first_step_belongs_to_the_restart(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.begin(1, 110)
    timeline.begin(2, 130)
    timeline.train(2, 101, 120, begins=160)
    assert timeline.totals()[-1].restart_seconds == 60


def test_after_an_end_in_order_the_run_pauses(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.end(0, 105, "sigterm")
    timeline.begin(1, 500)
    timeline.train(1, 101, 120, begins=520)
    assert moments(timeline)[-4:] == [("end", 0, 105), ("start", 1, 500), ("first", 1, 520), ("step", 1, 540)]
    newest = timeline.totals()[-1]
    assert (newest.paused_seconds, newest.restart_seconds) == (395, 0)


def test_a_clock_that_goes_back_and_durations_that_are_none_do_no_harm(timeline: Timeline) -> None:
    timeline.begin(0, 100)
    timeline.record(50, [step(0, 1), step(0, 2, math.nan), step(0, 3, math.inf)])
    timeline.save(0, 2, math.nan)
    newest = timeline.totals()[-1]
    assert (newest.created_unix_seconds, newest.step_seconds) == (START + 100, 1)
    assert (newest.iteration, newest.checkpoint_stall_seconds) == (3, 0)


def test_the_first_rows_of_a_file_may_be_steps_of_several_lives(timeline: Timeline) -> None:
    timeline.remember(1, 1.0)
    timeline.save(0, 1, 1.0)
    timeline.fail(0, 1, 5)
    assert timeline.totals() == []
    timeline.record(10, [step(0, 1), step(0, 2), step(1, 2)])
    newest = timeline.totals()[-1]
    assert (newest.life, newest.step_seconds, newest.repeated_seconds) == (1, 3, 1)


def test_they_survive_thinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "SLICE_ROWS", 20)
    journal = Journal.open(tmp_path / "journal.db", full_steps=20)
    journal.start_life("auto")
    for first in (*range(1, 401, 20), *range(301, 501, 20)):
        journal.record(*[step(0, iteration) for iteration in range(first, first + 20)])
        journal.add_memory_stalls(2, 0.25)
        assert journal.flush(FLUSH_SECONDS)
    journal.close()
    assert (journal.failures(), journal.dropped_rows) == ([], 0)
    with JournalReader(tmp_path / "journal.db") as reader:
        found = reader.totals()
        assert found is not None
        assert reader.last_row(StepRow) == 600 > 2 * len(reader.losses())
        newest = found[1]
    assert (newest.step_seconds, newest.repeated_seconds, newest.reached_iteration) == (600, 100, 500)
    assert (newest.memory_snapshots, newest.memory_stall_seconds, newest.repeated_stall_seconds) == (60, 7.5, 1.25)
