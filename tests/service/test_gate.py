import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message

from cpsr.service.access import Access
from cpsr.service.app import create_app
from cpsr.service.gate import Gate, Limits
from tests.service.conftest import BASE_URL
from tests.service.journals import error_of, new_run


def limited(run_dir: Path, **limits: Any) -> TestClient:
    return TestClient(create_app(run_dir, Access(allow_writes=True), Limits(**limits)), base_url=BASE_URL)


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    new_run(tmp_path)
    client = limited(tmp_path, body_bytes=100)

    def in_pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 10

    assert client.post("/failures", json={"description": "x" * 40}).status_code == 201
    assert error_of(client.post("/failures", json={"description": "x" * 101}), 413)["code"] == "body_too_large"
    kind = {"content-type": "application/json"}
    assert error_of(client.post("/failures", content=in_pieces(), headers=kind), 413)["code"] == "body_too_large"
    assert client.get("/failures").json()["total"] == 1


def test_who_asks_too_often_learns_when_to_come_back(tmp_path: Path) -> None:
    new_run(tmp_path)
    client = limited(tmp_path, requests_per_second=0.1, requests_burst=3)
    assert [client.get("/healthz").status_code for _ in range(3)] == [200] * 3
    refused = client.get("/healthz")
    assert error_of(refused, 429)["code"] == "too_many_requests"
    assert 1 <= int(refused.headers["retry-after"]) <= 10


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    """Straight at the gate: no client of the tests sends half a body."""
    sent: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a request without its body must not arrive")

    async def receive() -> Message:
        if not sent:
            await asyncio.sleep(5)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")], "client": ("x", 1)}
    asyncio.run(Gate(app, Access(), Limits(body_seconds=0.1))(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"body_too_slow" in sent[1]["body"]


@pytest.mark.parametrize("path", ["/plan", "/nothing"])
def test_no_answer_is_kept_or_guessed_at_and_no_other_site_may_read_it(tmp_path: Path, path: str) -> None:
    new_run(tmp_path)
    client = limited(tmp_path)
    headers = client.get(path, headers={"origin": "http://evil.example"}).headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    asked = {"origin": "http://evil.example", "access-control-request-method": "PUT"}
    for answer in (headers, client.options(path, headers=asked).headers):
        assert not [name for name in answer if name.startswith("access-control")]
