"""Rows of the journal behind a number."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal
from cpsr.service import events as events_module
from tests.service.journals import ROWS, flushed, record_event


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
