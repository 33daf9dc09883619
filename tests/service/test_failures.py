from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import FailureRow, Journal, commands
from tests.service.journals import error_of, flushed


def test_a_reported_failure_is_listed_beside_those_that_the_job_saw(writing: TestClient, journal: Journal) -> None:
    journal.record(
        FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed", detected_unix_seconds=100.0)
    )
    flushed(journal)
    reply = writing.post("/failures", json={"description": "node 17", "failed_unix_seconds": 200.0})
    assert reply.status_code == 201
    assert reply.json()["reported"] is True
    assert writing.post("/failures", json={"description": "now"}).json()["failed_unix_seconds"] > 1e9
    body = writing.get("/failures").json()
    assert [one["description"] for one in body["failures"]] == ["now", "node 17", "killed"]
    assert (body["failures"][2]["iteration"], body["failures"][1]["iteration"]) == (92, None)
    limited = writing.get("/failures", params={"limit": 1}).json()
    assert (len(limited["failures"]), limited["total"]) == (1, 3)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"description": ""},
        {"description": "x" * 1001},
        {"description": "x", "failed_unix_seconds": -1.0},
        {"d": 1},
        {"description": "x", "failed_unix_seconds": 9e15},
    ],
)
def test_a_report_that_makes_no_sense_is_refused(writing: TestClient, journal: Journal, body: dict[str, Any]) -> None:
    error_of(writing.post("/failures", json=body), 422)
    assert writing.get("/failures").json()["total"] == 0


def test_only_who_may_write_can_report(tmp_path: Path, client: TestClient, writing: TestClient) -> None:
    Journal.open(tmp_path / "journal.db").close()
    assert error_of(client.post("/failures", json={"description": "x"}), 403)["code"] == "writes_off"
    foreign = writing.post("/failures", json={"description": "x"}, headers={"host": "evil.example"})
    assert error_of(foreign, 403)["code"] == "foreign_host"
    # What a page of another site can send without being asked first has no JSON type.
    text = {"content-type": "text/plain"}
    error_of(writing.post("/failures", content='{"description": "x"}', headers=text), 422)
    assert writing.get("/failures").json()["total"] == 0


def test_a_flood_is_refused_with_when_to_come_again(
    writing: TestClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed(journal)
    monkeypatch.setattr(commands, "REPORTS_PER_HOUR_MAX", 1)
    report = {"description": "x"}
    assert writing.post("/failures", json=report).status_code == 201
    flood = writing.post("/failures", json=report)
    assert error_of(flood, 429)["code"] == "too_many_reports"
    assert 3500 < int(flood.headers["retry-after"]) <= 3600
    monkeypatch.setattr(commands, "MAX_REPORTED_FAILURES", 1)
    assert error_of(writing.post("/failures", json=report), 409)["code"] == "reports_full"
    assert writing.get("/failures").json()["total"] == 1


def test_a_failure_cannot_be_reported_to_no_run(writing: TestClient) -> None:
    error_of(writing.post("/failures", json={"description": "x"}), 503)
