"""Bodies and parameters that no client of ours would send: each is refused in the one form, none is a defect."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.journal import Journal
from tests.service.journals import flushed, measured_plan, plan_row

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
@given(st.sampled_from(["limit", "since_unix_seconds", "run", "kind"]), st.text() | st.integers() | st.floats())
def test_any_parameter(planned: TestClient, name: str, value: Any) -> None:
    refused(planned, "GET", "/fits", params={name: str(value)})
