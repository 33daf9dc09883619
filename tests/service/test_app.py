import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import Journal
from tests.service.journals import error_of, plan_row

OPERATIONS = {
    "delete /plan/override": "withdraw_override",
    "get /events": "list_events",
    "get /failures": "list_failures",
    "get /healthz": "get_health",
    "get /history": "list_history",
    "get /losses": "get_losses",
    "get /metrics": "get_metrics",
    "get /plan": "get_plan",
    "post /failures": "report_failure",
    "post /plan/preview": "preview_plan",
    "put /plan/override": "override_plan",
}


@pytest.fixture
def schema(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_operations_keep_their_ids(schema: dict[str, Any]) -> None:
    """Programs are generated from these: a change breaks them."""
    found = {
        f"{method} {path}": operation["operationId"]
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }
    assert found == OPERATIONS


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
    for operation in OPERATIONS:
        method, path = operation.split()
        if method == "get":
            client.get(path)
    client.post("/plan/preview", json={"mtbf_hours": 3.0})
    assert (tmp_path / "journal.db").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"journal.db", "journal.db-wal", "journal.db-shm"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/openapi.json").json()["openapi"])
