from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal
from cpsr.planner.plan import fixed_plan, make_plan
from tests.service.journals import LIMITS, error_of, flushed, measured_inputs, measured_plan, plan_row


def test_the_answer_is_the_planners_own(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(measured_plan()))
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=1000))
    flushed(journal)
    same = client.post("/plan/preview", json={}).json()
    assert same["interval_iterations"] == same["held_interval_iterations"] == measured_plan().interval_iterations
    frail = client.post("/plan/preview", json={"mtbf_hours": 0.5}).json()
    expected = make_plan([measured_inputs(mtbf_seconds=1800.0)], LIMITS, recovery_mode="predict")
    assert frail["interval_iterations"] == expected.interval_iterations
    assert frail["cost_per_second"] == expected.explanation["expected"]["cost_per_second"]
    assert frail["interval_seconds"] == 1.5 * expected.interval_iterations
    assert frail["explanation"]["origins"]["failures_per_second"]["kind"] == "configured"
    assert client.get("/plan").json()["ranks"][0]["interval_iterations"] == same["held_interval_iterations"]
    larger = client.post("/plan/preview", json={"state_bytes": 4000}).json()["explanation"]["inputs"]
    assert (larger["stall_seconds"], larger["persist_seconds"]) == (2.0, 12.0)
    slower = client.post("/plan/preview", json={"persist_bytes_per_second": 10}).json()
    assert slower["explanation"]["inputs"]["persist_seconds"] == 100.0
    assert slower["interval_iterations"] >= 100.0 / 1.5


def test_bytes_without_a_checkpoint_are_refused(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(measured_plan()))
    flushed(journal)
    refusal = error_of(client.post("/plan/preview", json={"persist_bytes_per_second": 10}), 409)
    assert refusal["code"] == "size_unknown"
    assert client.post("/plan/preview", json={"mtbf_hours": 2}).status_code == 200


@pytest.mark.parametrize("plans", [[], [fixed_plan(50)]], ids=["none", "fixed"])
def test_what_was_never_measured_cannot_be_previewed(client: TestClient, journal: Journal, plans: list[Any]) -> None:
    for plan in plans:
        journal.record(plan_row(plan))
    flushed(journal)
    assert error_of(client.post("/plan/preview", json={}), 409)["code"] == "nothing_measured"


def test_a_restarted_run_is_previewed_from_the_plan_before(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(measured_plan(), from_iteration=10))
    journal.record(plan_row(explanation={"rule": "as planned before the restart"}, interval_iterations=77))
    flushed(journal)
    body = client.post("/plan/preview", json={}).json()
    assert (body["from_iteration"], body["held_interval_iterations"]) == (10, 77)


@pytest.mark.parametrize(
    "body",
    [{"mtbf_hours": 0}, {"mtbf_hours": -1}, {"mtbf_hours": "nan"}, {"state_bytes": 1e300}, {"mtbf": 1}, [], "x", None],
    ids=str,
)
def test_a_change_that_makes_no_sense_is_refused(client: TestClient, tmp_path: Path, body: Any) -> None:
    error_of(client.post("/plan/preview", json=body), 422)
