"""Effective training time of journals that were computed by hand; times are seconds since the run's start."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.journal import Journal, JournalReader
from cpsr.service.ettr import PARTS, Ettr, TimeSpent, ettr_of
from cpsr.service.health import LifeState
from tests.journal.timeline import START, Timeline
from tests.service.journals import flushed, plan_row, record_steps, recovery_row

HOUR = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def timeline(path: Path) -> Iterator[Timeline]:
    with Timeline(path) as timeline:
        yield timeline


def ettr(path: Path, state: LifeState = "running", now: float = 0.0) -> Ettr:
    with JournalReader(path) as reader:
        found = ettr_of(reader, reader.lives(), state, START + now)
    assert found is not None
    return found


def check(spent: TimeSpent, wall: float, **parts: float) -> None:
    """Every part is as computed by hand; those that are not named are 0."""
    found = {part: getattr(spent, f"{part}_seconds") for part in PARTS}
    assert found == pytest.approx({part: parts.get(part, 0.0) for part in PARTS}, abs=1e-5)
    assert spent.wall_seconds == pytest.approx(wall)
    assert sum(found.values()) == pytest.approx(wall)
    assert spent.ettr == pytest.approx(parts.get("useful", 0.0) / wall)
    assert spent.overhead_seconds is None


def test_no_failure(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=10)
    timeline.save(0, 50, stall=2.0)
    timeline.remember(4, stall=1.0)
    found = ettr(path, now=112)
    check(found.since_start, 110, useful=97, checkpoint_stall=2, memory_stall=1, other=10)
    assert (found.state, found.until_unix_seconds, found.lost_iterations) == ("training", START + 110, 0)
    assert found.last_hour == found.since_start


def test_one_failure_is_recomputed(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=10)
    timeline.begin(1, 130)  # 105 steps were taken, the last ones unreported
    timeline.fail(0, 105, at=140)
    timeline.train(1, 61, 80, begins=150)
    found = ettr(path)
    check(found.since_start, 170, useful=105, recompute=20, restart=35, other=10)
    assert found.lost_iterations == 25
    timeline.train(1, 81, 120, begins=170)
    found = ettr(path)
    check(found.since_start, 210, useful=120, recompute=45, restart=35, other=10)
    assert (found.lost_iterations, found.since_start.failures) == (0, 1)


def two_failures(timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 720, begins=0, seconds=10)
    timeline.begin(1, 7250)
    timeline.fail(0, 720, at=7290)
    timeline.train(1, 701, 750, begins=7300, seconds=10)
    timeline.begin(2, 7830)
    timeline.fail(1, 750, at=7890)
    timeline.train(2, 741, 800, begins=7900, seconds=10)


def test_two_failures_within_the_last_hour(path: Path, timeline: Timeline) -> None:
    two_failures(timeline)
    found = ettr(path, now=8501)
    check(found.since_start, 8500, useful=8000, recompute=300, restart=200)
    # 4900 to 7200, 7500 to 7800 and 8000 to 8500
    check(found.last_hour, HOUR, useful=3100, recompute=300, restart=200)
    assert (found.since_start.failures, found.last_hour.failures) == (2, 2)
    assert found.last_hour.since_unix_seconds == START + 4900


@pytest.mark.parametrize("state", ["killed", "silent", "error"])
def test_a_job_that_is_down_loses_time_until_now(path: Path, timeline: Timeline, state: LifeState) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=10)
    found = ettr(path, state, now=410)
    check(found.since_start, 410, useful=100, restart=300, other=10)
    assert (found.state, found.until_unix_seconds) == ("down", START + 410)
    found = ettr(path, state, now=110 + 2 * HOUR)
    check(found.last_hour, HOUR, restart=HOUR)
    timeline.begin(1, 500)  # no step yet
    found = ettr(path, "running", now=520)
    check(found.since_start, 520, useful=100, restart=410, other=10)
    assert found.state == "starting"


def test_a_window_may_begin_inside_a_restart(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.begin(1, 900)
    timeline.train(1, 101, 400, begins=1100, seconds=10)
    check(ettr(path).last_hour, HOUR, useful=3000, restart=600)


@pytest.mark.parametrize("ending", ["clean", "sigterm"])
def test_the_time_of_a_run_that_has_ended_stands_still(
    path: Path, timeline: Timeline, ending: Literal["clean", "sigterm"]
) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=10)
    timeline.end(0, 115, ending)
    found = ettr(path, ending, now=99999)
    check(found.since_start, 115, useful=100, other=15)
    assert (found.state, found.until_unix_seconds) == ("ended", START + 115)
    timeline.begin(1, 1000)  # a pause is no wall time, and no restart
    found = ettr(path, "running", now=1010)
    check(found.since_start, 125, useful=100, other=25)
    assert (found.state, found.since_start.paused_seconds) == ("starting", 885)
    timeline.train(1, 101, 200, begins=1020)
    check(ettr(path).since_start, 235, useful=200, other=35)


def test_a_prediction_recomputes_nothing_and_its_end_cost_is_no_time(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.begin(1, 130)
    timeline.fail(0, 105, at=140)
    for outcome, cost in (("kept", 12.5), ("watching", -2.0), ("vetoed", 99.0), ("rolled_back", 99.0)):
        row = recovery_row(outcome=outcome, expected_end_cost_iterations=cost, created_unix_seconds=START + 140)
        timeline.record(140, [row])
    timeline.record(140, [recovery_row(method="exact", created_unix_seconds=START + 140)])
    timeline.train(1, 106, 165, begins=150)
    found = ettr(path).since_start
    check(found, 210, useful=165, restart=45)
    assert (found.predicted_recoveries, found.end_cost_iterations) == (2, 10.5)


def test_a_roll_back_in_a_life(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    timeline.train(0, 1, 100, begins=0)
    timeline.train(0, 61, 80, begins=103)  # three seconds for the roll-back
    timeline.save(0, 70, stall=1.5)
    found = ettr(path)
    check(found.since_start, 123, useful=100, recompute=18.5, checkpoint_stall=1.5, other=3)
    assert found.lost_iterations == 20
    timeline.train(0, 81, 120, begins=123)
    check(ettr(path).since_start, 163, useful=120, recompute=38.5, checkpoint_stall=1.5, other=3)


def test_before_the_first_step(path: Path, timeline: Timeline) -> None:
    timeline.begin(0, 0)
    found = ettr(path, now=0)
    assert (found.state, found.since_start.ettr, found.since_start.wall_seconds) == ("starting", None, 0)
    check(ettr(path, now=30).since_start, 30, other=30)


def test_it_is_in_the_plan_and_in_the_metrics(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    flushed(journal)
    assert client.get("/plan").json()["ettr"]["state"] == "starting"
    record_steps(journal)
    journal.add_memory_stalls(2, 0.5)
    flushed(journal)
    body: dict[str, Any] = client.get("/plan").json()["ettr"]
    assert (body["state"], body["since_start"]["memory_stall_seconds"]) == ("training", 0.5)
    assert body["since_start"]["useful_seconds"] == 10.0
    text = client.get("/metrics").text
    assert 'span="hour"' in text
    assert 'part="memory_stall"' in text
    assert "cpsr_lost_iterations" in text


# What may happen next to a run: steps, a stall, and the end of a life in some way, with the time that each takes.
seconds = st.floats(0, 5000)
EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 50), seconds, st.floats(-100, 1000)),
    st.tuples(st.just("back"), st.integers(0, 60)),
    st.tuples(st.just("checkpoint"), st.integers(0, 400), st.floats(0, 100)),
    st.tuples(st.just("memory"), st.integers(1, 5), st.floats(0, 100)),
    st.tuples(st.just("life"), st.sampled_from(["clean", "sigterm", "error", "killed"]), seconds, seconds),
)


def happen(timeline: Timeline, events: list[Any]) -> float:
    """Let events happen; returns when the last one has."""
    timeline.begin(0, 0)
    now, life, iteration = 0.0, 0, 0
    for kind, *values in events:
        if kind == "steps":
            count, length, waits = values
            first, last = iteration + 1, iteration + count
            now = timeline.train(life, first, last, now + waits, length)
            iteration = last
        elif kind == "back":
            iteration = max(0, iteration - values[0])
        elif kind == "checkpoint":
            timeline.save(life, *values)
        elif kind == "memory":
            timeline.remember(*values)
        else:
            ending, before, after = values
            now += before
            if ending != "killed":
                timeline.end(life, now, ending)
            now, life = now + after, life + 1
            timeline.begin(life, now)
            if ending in ("error", "killed"):
                timeline.fail(life - 1, iteration + 7, now)
    return now


@settings(deadline=None, max_examples=150)
@given(st.lists(EVENTS, max_size=12), st.sampled_from(["running", "killed", "clean", "sigterm"]), seconds)
def test_the_parts_add_up_to_the_wall_time(events: list[Any], state: LifeState, waits: float) -> None:
    with tempfile.TemporaryDirectory() as folder, Timeline(Path(folder) / "journal.db") as timeline:
        now = happen(timeline, events)
        found = ettr(Path(folder) / "journal.db", state, now + waits)
    for spent in (found.since_start, found.last_hour):
        parts = [getattr(spent, f"{part}_seconds") for part in PARTS]
        assert all(part >= -1e-6 for part in parts)
        assert sum(parts) == pytest.approx(spent.wall_seconds, rel=1e-9, abs=1e-5)
        assert spent.ettr is None or 0 <= spent.ettr <= 1
    assert found.last_hour.wall_seconds <= found.since_start.wall_seconds + 1e-5


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90), st.booleans()), min_size=1, max_size=10))
def test_an_iteration_counts_once_however_often_it_is_trained(courses: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder, Timeline(Path(folder) / "journal.db") as timeline:
        timeline.begin(0, 0)
        now, life, iteration, taken = 0.0, 0, 0, 0
        completed: set[int] = set()
        for count, back, restarts in courses:
            now = timeline.train(life, iteration + 1, iteration + count, now)
            completed |= set(range(iteration + 1, iteration + count + 1))
            taken += count
            iteration = max(0, iteration + count - back)
            if restarts:
                life += 1
                timeline.begin(life, now + 5)
                now += 8
        found = ettr(Path(folder) / "journal.db").since_start
    assert found.useful_seconds == pytest.approx(len(completed), abs=1e-5)
    assert found.recompute_seconds == pytest.approx(taken - len(completed), abs=1e-5)
