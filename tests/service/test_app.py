import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.journal import Journal
from tests.service.journals import error_of, flushed, measured_plan, plan_row

OPERATIONS = {
    "delete /plan/override": "withdraw_override",
    "get /events": "follow_events",
    "get /failures": "list_failures",
    "get /healthz": "get_health",
    "get /history": "list_history",
    "get /losses": "get_losses",
    "get /metrics": "get_metrics",
    "get /plan": "get_plan",
    "get /readyz": "get_readiness",
    "get /runs": "list_runs",
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


def test_every_refusal_has_the_one_form(schema: dict[str, Any]) -> None:
    own = {"/healthz", "/readyz"}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            for status, response in operation["responses"].items():
                if status.startswith("2") or (path in own and status == "503"):
                    continue
                (content,) = response["content"].values()
                assert content["schema"]["$ref"].endswith("/Error"), (method, path, status)


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
        if method == "get" and path != "/events":
            client.get(path)
    client.post("/plan/preview", json={"mtbf_hours": 3.0})
    assert (tmp_path / "journal.db").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"journal.db", "journal.db-wal", "journal.db-shm"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/openapi.json").json()["openapi"])


WRITES = (("POST", "/plan/preview"), ("PUT", "/plan/override"), ("POST", "/failures"))
FIELDS = ("mtbf_hours", "state_bytes", "interval_iterations", "reason", "description", "expires_in_seconds")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=8,
)


def refused(client: TestClient, method: str, path: str, **request: Any) -> None:
    reply = client.request(method, path, **request)
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert set(reply.json()) == {"code", "message", "hint"}


@pytest.fixture
def planned(writing: TestClient, journal: Journal) -> TestClient:
    journal.record(plan_row(measured_plan()))
    flushed(journal)
    return writing


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"1" * 5000,
        b"[" * 9000,
        b'{"reason": "\\ud800", "description": "\\ud800"}',
        b'{"mtbf_hours": NaN, "interval_iterations": NaN}',
        b'{"mtbf_hours": Infinity}',
        b'{"mtbf_hours": 1e400}',
        b'{"description": "\\u0000"}',
        b'{"interval_iterations": 99999999999999999999999, "reason": "x"}',
    ],
    ids=repr,
)
def test_a_body_that_is_none(planned: TestClient, content: bytes) -> None:
    for method, path in WRITES:
        refused(planned, method, path, content=content, headers={"content-type": "application/json"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(VALUES)
def test_any_json_body(planned: TestClient, body: Any) -> None:
    for method, path in WRITES:
        # Python writes and reads NaN in JSON, which httpx would not send.
        refused(planned, method, path, content=json.dumps(body), headers={"content-type": "application/json"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.sampled_from(["limit", "run", "kind"]), st.text() | st.integers() | st.floats())
def test_any_parameter(planned: TestClient, name: str, value: Any) -> None:
    refused(planned, "GET", "/history", params={"kind": "fit", name: str(value)})
