import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from cpsr.errors import ConfigError
from cpsr.service import access
from cpsr.service.access import TOKEN_VARIABLE, Access, Gate, read_token
from cpsr.service.app import create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import error_of, new_run

TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
ASKED = {"interval_iterations": 25, "reason": "x"}


def with_token(run_dir: Path, base_url: str = "http://example.org") -> TestClient:
    return TestClient(create_app(run_dir, Access(TOKEN)), base_url=base_url)


@pytest.mark.parametrize(
    "authorization", [None, TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Bearer \xe9" * 9]
)
def test_with_a_token_every_request_needs_it(tmp_path: Path, authorization: str | None) -> None:
    new_run(tmp_path)
    headers = {} if authorization is None else {b"authorization": authorization.encode("latin-1")}
    for client in (with_token(tmp_path), with_token(tmp_path, BASE_URL)):
        for path in ("/plan", "/healthz", "/metrics", "/openapi.json", "/events", "/nothing"):
            refused = client.get(path, headers=headers)
            assert error_of(refused, 401)["code"] == "token_needed"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert client.put("/plan/override", json=ASKED, headers=headers).status_code == 401


def test_who_has_the_token_may_read_and_write(tmp_path: Path) -> None:
    new_run(tmp_path)
    client = with_token(tmp_path)
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {TOKEN}"}
        assert client.get("/plan", headers=headers).status_code == 200
        assert client.put("/plan/override", json=ASKED, headers=headers).status_code == 200


def test_without_a_token_a_foreign_name_is_refused(tmp_path: Path, client: TestClient, writing: TestClient) -> None:
    new_run(tmp_path)
    for host in ("evil.example", "evil.example:8712", "127.0.0.1.evil.example", "[::2]:1", "", "localhost.evil"):
        for asked in (client, writing):
            assert error_of(asked.get("/plan", headers={"host": host}), 403)["code"] == "foreign_host"
    for host in ("127.0.0.1", "127.0.0.1:1", "localhost:8712", "[::1]:8712", "127.9.9.9"):
        assert client.get("/plan", headers={"host": host}).status_code == 200, host


def test_a_page_of_another_site_changes_nothing(tmp_path: Path, writing: TestClient) -> None:
    new_run(tmp_path)
    report = {"description": "x"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        refused = writing.post("/failures", json=report, headers={"origin": origin})
        assert error_of(refused, 403)["code"] == "foreign_origin"
        assert writing.get("/plan", headers={"origin": origin}).status_code == 200  # it does not get to read it
    own = {"origin": BASE_URL}
    assert writing.post("/failures", json=report, headers=own).status_code == 201


def test_a_token_beside_writes_for_everybody_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave --allow-writes"):
        Access(TOKEN, allow_writes=True)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(path, {}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(path, {TOKEN_VARIABLE: "another-one-that-is-long"}) == TOKEN
    assert read_token(None, {}) is None


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"two words that are long", b"\xff" * 40])
def test_a_token_that_is_none_is_refused_and_not_printed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="nothing is served") as refused:
        read_token(path, {})
    assert str(path) in str(refused.value)
    assert "two words" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "absent", {})


@given(st.text(min_size=16, alphabet=st.characters(min_codepoint=33, max_codepoint=126)), st.text())
def test_only_the_token_itself_opens(token: str, given: str) -> None:
    own = Access(token)
    assert own.refusal("any", f"Bearer {token}") is None
    assert (own.refusal("any", f"Bearer {given}") is None) == (given.strip() == token)


def test_a_body_that_is_too_large_is_refused(
    tmp_path: Path, writing: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(tmp_path)
    monkeypatch.setattr(access, "BODY_BYTES", 100)

    def in_pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 10

    assert writing.post("/failures", json={"description": "x" * 40}).status_code == 201
    assert error_of(writing.post("/failures", json={"description": "x" * 101}), 413)["code"] == "body_too_large"
    kind = {"content-type": "application/json"}
    assert error_of(writing.post("/failures", content=in_pieces(), headers=kind), 413)["code"] == "body_too_large"
    assert writing.get("/failures").json()["total"] == 1


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight at the gate: no client of the tests sends half a body."""
    monkeypatch.setattr(access, "BODY_SECONDS", 0.1)
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
    asyncio.run(Gate(app, Access())(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"body_too_slow" in sent[1]["body"]


@pytest.mark.parametrize("path", ["/plan", "/nothing"])
def test_no_answer_is_kept_or_guessed_at_and_no_other_site_may_read_it(
    tmp_path: Path, client: TestClient, path: str
) -> None:
    new_run(tmp_path)
    headers = client.get(path, headers={"origin": "http://evil.example"}).headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    asked = {"origin": "http://evil.example", "access-control-request-method": "PUT"}
    for answer in (headers, client.options(path, headers=asked).headers):
        assert not [name for name in answer if name.startswith("access-control")]
