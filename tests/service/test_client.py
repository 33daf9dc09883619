"""The client against the service itself, in this process."""

from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from cpsr.errors import ServiceError
from cpsr.journal import CheckpointRow, Journal
from cpsr.service.access import Access
from cpsr.service.app import create_app
from cpsr.service.client import Client
from tests.service.journals import ROWS, flushed, measured_plan, plan_row, record_steps


class InProcess(httpx.BaseTransport):
    """Hands requests to an app; httpx's own transport for apps is asynchronous."""

    def __init__(self, run_dir: Path, access: Access) -> None:
        self._client = TestClient(create_app(run_dir, access), base_url="http://127.0.0.1:8712")

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        url = str(request.url.copy_with(scheme="http", host="127.0.0.1", port=8712))
        reply = self._client.request(request.method, url, content=request.read(), headers=headers)
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)


def client_of(run_dir: Path, token: str | None = None, run: str | None = None, access: Access | None = None) -> Client:
    return Client(token=token, run=run, transport=InProcess(run_dir, access or Access(allow_writes=True)))


def test_it_asks_everything_that_there_is(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("auto")
    journal.record(*ROWS, plan_row(measured_plan()))
    journal.record(CheckpointRow(life=0, iteration=60, status="committed", bytes=1000))
    record_steps(journal)
    flushed(journal)
    with client_of(tmp_path) as client:
        assert client.plan()["last_iteration"] == 7
        assert client.health()["status"] == "ok"
        assert client.history("plan", limit=1)["total"] == 2
        assert client.preview(mtbf_hours=0.5)["interval_iterations"] < measured_plan().interval_iterations
        assert client.override("x", interval_min_iterations=7)["interval_min_iterations"] == 7
        assert client.withdraw_override()["reason"] == "x"
        assert client.report_failure("node 3", 9.0)["failed_unix_seconds"] == 9.0
        assert client.failures()["total"] == 2
        assert client.events("start")["events"][0]["event"] == "life"
        assert client.runs()["runs"][0]["name"] == tmp_path.name
        assert "cpsr_iteration" in client.metrics()
    journal.close()


def test_a_refusal_has_the_services_word_for_it(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        with pytest.raises(ServiceError, match="there is no journal") as refused:
            client.plan()
        assert (refused.value.code, refused.value.status) == ("journal_unavailable", 503)
        assert client.health()["status"] == "degraded", "a run that is not well is an answer"
        with pytest.raises(ServiceError) as refused:
            client.preview(mtbf_hours=-1)
        assert refused.value.status == 422


def test_a_service_that_is_not_there_is_reported() -> None:
    with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ServiceError, match="start it with `cpsr serve`") as refused:
            client.plan()
        assert refused.value.status is None
    with pytest.raises(ServiceError, match="no address"):
        Client("http://[::")
