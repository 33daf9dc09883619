from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import Journal
from tests.service.journals import error_of, plan_row


def test_unknown_path_and_method_have_the_same_form(client: TestClient) -> None:
    assert error_of(client.get("/nothing"), 404)["code"] == "not_found"
    refused = client.post("/plan")
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "GET"


def test_a_defect_is_answered_in_the_same_form(
    tmp_path: Path, client: TestClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("cpsr.service.plan.plan_of", broken)
    assert error_of(client.get("/plan"), 500)["code"] == "internal_error"


def test_reading_changes_nothing_in_the_run_directory(tmp_path: Path, client: TestClient) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.record(plan_row())
    journal.close()
    before = (tmp_path / "journal.db").read_bytes()
    asked = [path for path, methods in client.get("/openapi.json").json()["paths"].items() if "get" in methods]
    assert "/plan" in asked
    for path in asked:
        client.get(path)
    client.post("/plan/preview", json={"mtbf_hours": 3.0})
    assert (tmp_path / "journal.db").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"journal.db", "journal.db-wal", "journal.db-shm"}
