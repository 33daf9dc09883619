import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import Journal, latest_override
from tests.service.journals import error_of, flushed, plan_row


def test_an_override_is_written_shown_and_withdrawn(tmp_path: Path, writing: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    flushed(journal)
    asked = {"interval_iterations": 25, "reason": "repairs", "expires_in_seconds": 600}
    reply = writing.put("/plan/override", json=asked)
    assert reply.status_code == 200, reply.text
    written = latest_override(tmp_path)
    assert written is not None
    assert (written.interval_min_iterations, written.interval_max_iterations, written.pinned) == (25, 25, True)
    assert 590 < written.expires_unix_seconds - time.time() <= 600
    shown = writing.get("/plan").json()["override"]
    assert shown == reply.json()
    assert shown["taken_up"] is False
    journal.record(plan_row(origin="override", explanation={"override": {"id": shown["id"]}}))
    flushed(journal)
    assert writing.get("/plan").json()["override"]["taken_up"] is True
    assert writing.delete("/plan/override").json()["id"] == shown["id"]
    assert writing.get("/plan").json()["override"] is None
    assert error_of(writing.delete("/plan/override"), 404)["code"] == "no_override"


def test_the_newest_override_counts_until_it_expires(
    writing: TestClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.record(plan_row())
    flushed(journal)
    writing.put("/plan/override", json={"interval_iterations": 25, "reason": "a"})
    writing.put("/plan/override", json={"interval_max_iterations": 90, "reason": "b", "expires_in_seconds": 60})
    shown = writing.get("/plan").json()["override"]
    assert (shown["interval_min_iterations"], shown["interval_max_iterations"], shown["reason"]) == (None, 90, "b")
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert writing.get("/plan").json()["override"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"reason": "neither"},
        {"interval_iterations": 5},
        {"interval_iterations": 5, "interval_min_iterations": 5, "reason": "both"},
        {"interval_min_iterations": 6, "interval_max_iterations": 5, "reason": "exchanged"},
        {"interval_iterations": 0, "reason": "zero"},
        {"interval_iterations": 2**40, "reason": "huge"},
        {"interval_iterations": 5, "reason": ""},
        {"interval_iterations": 5, "reason": "for ever", "expires_in_seconds": 1e9},
        {"interval_iterations": 5, "reason": "over", "expires_in_seconds": 0},
    ],
    ids=lambda body: body.get("reason", "no reason"),
)
def test_an_override_that_makes_no_sense_is_refused(
    tmp_path: Path, writing: TestClient, journal: Journal, body: dict[str, Any]
) -> None:
    error_of(writing.put("/plan/override", json=body), 422)
    assert latest_override(tmp_path) is None


def test_only_who_may_write_can_override(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    asked = {"interval_iterations": 25, "reason": "x"}
    assert error_of(client.put("/plan/override", json=asked), 403)["code"] == "writes_off"
    assert error_of(client.delete("/plan/override"), 403)["code"] == "writes_off"
    assert latest_override(tmp_path) is None


def test_overrides_that_cannot_be_read_do_not_hide_the_plan(
    tmp_path: Path, writing: TestClient, journal: Journal
) -> None:
    journal.record(plan_row())
    flushed(journal)
    (tmp_path / "commands.db").write_bytes(b"x" * 4096)
    body = writing.get("/plan").json()
    assert body["override"] is None
    assert "overrides of the plan cannot be read" in body["warnings"][-1]
    error_of(writing.put("/plan/override", json={"interval_iterations": 25, "reason": "x"}), 503)


def test_no_run_cannot_be_overridden(writing: TestClient) -> None:
    error_of(writing.put("/plan/override", json={"interval_iterations": 25, "reason": "x"}), 503)
