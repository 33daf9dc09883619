"""Effective training time, computed by hand; times are seconds since the run's start."""

from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from cpsr.journal import Journal, LifeRow
from cpsr.service.ettr import PARTS, Ettr, ettr_of
from cpsr.service.run import LifeState
from tests.journal.test_account import START, Timeline
from tests.service.journals import flushed, plan_row, record_steps, recovery_row


def ettr(run: Timeline, state: LifeState = "running", now: float = 0.0, **more: Any) -> Ettr:
    return ettr_of(run.account, run.last, state, START + now, **more)


def check(found: Ettr, wall: float, **parts: float) -> None:
    """Every part is as computed by hand; those that are not named are 0."""
    seconds = {part: getattr(found, f"{part}_seconds") for part in PARTS}
    assert seconds == pytest.approx({part: parts.get(part, 0.0) for part in PARTS}, abs=1e-5)
    assert found.wall_seconds == pytest.approx(wall)
    assert sum(seconds.values()) == pytest.approx(wall)
    assert found.ettr == pytest.approx(parts.get("useful", 0.0) / wall)


def test_one_failure_is_recomputed() -> None:
    run = Timeline()
    run.train(1, 100, begins=10)
    run.begin(1, 130)  # 105 steps were taken, the last ones unreported
    run.fail(0, 105)
    run.train(61, 80, begins=150)
    found = ettr(run)
    check(found, 170, useful=105, recompute=20, restart=35, other=10)
    assert found.lost_iterations == 25
    run.train(81, 120, begins=170)
    found = ettr(run)
    check(found, 210, useful=120, recompute=45, restart=35, other=10)
    assert found.lost_iterations == 0


@pytest.mark.parametrize("state", ["killed", "silent", "error"])
def test_a_job_that_is_down_loses_time_until_now(state: LifeState) -> None:
    run = Timeline()
    run.train(1, 100, begins=10)
    found = ettr(run, state, now=410)
    check(found, 410, useful=100, restart=300, other=10)
    assert (found.state, found.until_unix_seconds) == ("down", START + 410)
    run.begin(1, 500)  # no step yet
    found = ettr(run, "running", now=520)
    check(found, 520, useful=100, restart=410, other=10)
    assert found.state == "starting"


@pytest.mark.parametrize("ending", ["clean", "sigterm"])
def test_the_time_of_a_run_that_has_ended_stands_still(ending: Literal["clean", "sigterm"]) -> None:
    run = Timeline()
    run.train(1, 100, begins=10)
    run.last = LifeRow(life=0, mode="auto", pid=1, host="a", ending=ending, ended_unix_seconds=START + 115)
    found = ettr(run, ending, now=99999)
    check(found, 115, useful=100, other=15)
    assert (found.state, found.until_unix_seconds) == ("ended", START + 115)
    run.begin(1, 1000, ended=115)  # a pause is no wall time, and no restart
    found = ettr(run, "running", now=1010)
    check(found, 125, useful=100, other=25)
    assert (found.state, found.paused_seconds) == ("starting", 885)


def test_a_prediction_recomputes_nothing_and_its_end_cost_is_no_time() -> None:
    run = Timeline()
    run.train(1, 100, begins=0)
    run.begin(1, 130)
    run.fail(0, 105)
    outcomes = (("kept", 12.5), ("watching", -2.0), ("vetoed", 99.0), ("rolled_back", 99.0))
    rows = [recovery_row(outcome=outcome, expected_end_cost_iterations=cost) for outcome, cost in outcomes]
    run.train(106, 165, begins=150)
    found = ettr(run, recoveries=[*rows, recovery_row(method="exact")], failures=1)
    check(found, 210, useful=165, restart=45)
    assert (found.predicted_recoveries, found.end_cost_iterations, found.failures) == (2, 10.5, 1)


def test_it_is_in_the_plan(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    flushed(journal)
    assert client.get("/plan").json()["ettr"]["state"] == "starting"
    record_steps(journal)
    journal.add_memory_stalls(2, 0.5)
    flushed(journal)
    body: dict[str, Any] = client.get("/plan").json()["ettr"]
    assert (body["state"], body["memory_stall_seconds"], body["useful_seconds"]) == ("training", 0.5, 10.0)


# What may happen next to a run: steps, a stall, and the end of a life in some way, with the time that each takes.
seconds = st.floats(0, 5000)
EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 50), seconds, st.floats(-100, 1000)),
    st.tuples(st.just("back"), st.integers(0, 60)),
    st.tuples(st.just("checkpoint"), st.integers(0, 400), st.floats(0, 100)),
    st.tuples(st.just("memory"), st.integers(1, 5), st.floats(0, 100)),
    st.tuples(st.just("life"), st.booleans(), seconds, seconds),
)


@given(st.lists(EVENTS, max_size=12), st.sampled_from(["running", "killed"]), seconds)
def test_the_parts_add_up_to_the_wall_time(events: list[Any], state: LifeState, waits: float) -> None:
    run, now, life, iteration = Timeline(), 0.0, 0, 0
    for kind, *values in events:
        if kind == "steps":
            count, length, later = values
            run.train(iteration + 1, iteration + count, now + later, length)
            now, iteration = now + later + count * length, iteration + count
        elif kind == "back":
            iteration = max(0, iteration - values[0])
        elif kind == "checkpoint":
            run.save(*values)
        elif kind == "memory":
            run.account = run.account.with_memory_stalls(*values)
        else:
            in_order, before, after = values
            ended, now, life = now + before, now + before + after, life + 1
            run.begin(life, now, ended if in_order else None)
            if not in_order:
                run.fail(life - 1, iteration + 7)
    found = ettr(run, state, now + waits)
    parts = [getattr(found, f"{part}_seconds") for part in PARTS]
    assert all(part >= -1e-6 for part in parts)
    assert sum(parts) == pytest.approx(found.wall_seconds, rel=1e-9, abs=1e-5)
    assert found.ettr is None or 0 <= found.ettr <= 1
