"""What the journal holds of the past: rows of each kind, failures, the loss curve, and rows behind a number."""

import math
from itertools import pairwise
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, FailureRow, Journal, StepRow
from cpsr.service import events as events_module
from tests.service.journals import ROWS, error_of, flushed, plan_row, record_event


def test_the_newest_rows_of_each_kind(client: TestClient, journal: Journal) -> None:
    journal.record(*ROWS, plan_row(from_iteration=70))
    flushed(journal)
    for row in ROWS:
        body = client.get("/history", params={"kind": row.KIND}).json()
        assert body["rows"][-1]["life"] == 0
        assert body["total"] == len(body["rows"]) == (2 if row.KIND == "plan" else 1)
    one = client.get("/history", params={"kind": "plan", "limit": 1}).json()
    assert ([row["from_iteration"] for row in one["rows"]], one["total"]) == ([70], 2)
    assert client.get("/history", params={"kind": "life"}).json()["rows"][0]["ending"] == "running"
    assert client.get("/history", params={"kind": "fit"}).json()["rows"][0]["result"] == {"alpha2": "inf"}
    for query in ("", "?kind=event", "?kind=plan&limit=0", "?kind=plan&limit=1001"):
        assert error_of(client.get(f"/history{query}"), 422)["code"] == "bad_request"


def test_a_reported_failure_is_listed_beside_those_that_the_job_saw(writing: TestClient, journal: Journal) -> None:
    journal.record(
        FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed", created_unix_seconds=100.0)
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


def steps(life: int, first: int, last: int) -> list[StepRow]:
    return [
        StepRow(life=life, iteration=i, loss=10.0 * life + 1 / i, learning_rate=1e-3, seconds=0.1)
        for i in range(first, last + 1)
    ]


def asked(client: TestClient, **parameters: int) -> dict[str, Any]:
    response = client.get("/losses", params=parameters)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("limit", [3, 499])
def test_a_long_one_is_thinned_evenly(client: TestClient, journal: Journal, limit: int) -> None:
    journal.record(*steps(0, 1, 500))
    flushed(journal)
    iterations = asked(client, limit=limit)["iterations"]
    assert (len(iterations), iterations[0], iterations[-1]) == (limit, 1, 500)
    gaps = {later - earlier for earlier, later in pairwise(iterations)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("limit", [10, 1000])
def test_what_was_given_up_is_left_out(client: TestClient, journal: Journal, limit: int) -> None:
    journal.record(*(steps(0, 1, 100) + steps(1, 61, 80)))
    flushed(journal)
    found = asked(client, limit=limit)
    assert found["iterations"] == sorted(set(found["iterations"]))
    assert found["iterations"][-1] == 80
    assert {loss > 9 for i, loss in zip(found["iterations"], found["losses"], strict=True) if i > 60} == {True}


def test_a_loss_that_is_none_is_null(client: TestClient, journal: Journal) -> None:
    losses = [1.5, math.nan, math.inf, None]
    journal.record(
        *[StepRow(life=0, iteration=i, loss=loss, learning_rate=1e-3, seconds=0.1) for i, loss in enumerate(losses, 1)]
    )
    flushed(journal)
    assert asked(client)["losses"] == [1.5, None, None, None]


def ask(client: TestClient, after: int) -> list[dict[str, Any]]:
    reply = client.get("/events", params={"after": after})
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["events"]
    return found


def test_every_row_is_given_once_in_the_order_of_recording(
    client: TestClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "LIMIT_MAX", 4)
    journal.record(*ROWS)
    record_event(journal, "last")
    journal.record(*[CheckpointRow(life=0, iteration=at, status="skipped") for at in range(5)])
    flushed(journal)
    found: list[dict[str, Any]] = []
    while part := ask(client, found[-1]["row"] if found else 0):
        assert len(part) <= 4
        found += part
    kinds = ["life", "checkpoint", "failure", "recovery", "phase", "fit", "plan", "event"]
    assert [one["event"] for one in found] == [*kinds, *["checkpoint"] * 5]
    assert [one["row"] for one in found] == list(range(1, len(found) + 1))
    assert "explanation" not in found[6]["data"]
