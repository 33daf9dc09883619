"""The stream of events, over a real server."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from cpsr.journal import CheckpointRow, Journal
from cpsr.service import events as events_module
from cpsr.service.app import create_app
from cpsr.service.client import Client
from tests.service.journals import ROWS, error_of, flushed, record_event

WAIT_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "POLL_SECONDS", 0.02)


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """A real server in a thread of this process; its address."""
    app = create_app(run_dir)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.streams.closing = True
            server.should_exit = True
            thread.join(WAIT_SECONDS)


def take(events: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [next(events) for _ in range(count)]


def test_every_row_is_sent_once_in_the_order_of_recording(tmp_path: Path, journal: Journal) -> None:
    journal.record(*ROWS)
    record_event(journal, "last")
    count = 3 * events_module.ROWS_AT_ONCE // 2
    journal.record(*[CheckpointRow(life=0, iteration=at, status="skipped") for at in range(count)])
    flushed(journal)
    with served(tmp_path) as url, Client(url) as client:
        _, life, *sent = take(client.events(after="start"), 2 + len(ROWS) + 1 + count)
        kinds = ["checkpoint", "failure", "recovery", "phase", "fit", "bubble", "plan", "event"]
        assert [one["event"] for one in (life, *sent)] == ["life", *kinds, *["checkpoint"] * count]
        assert "explanation" not in sent[6]["data"]
        assert [one["data"]["row"] for one in sent] == list(range(2, len(sent) + 2))
        assert [one["data"]["iteration"] for one in sent[8:]] == list(range(count))
        resumed = take(client.events(after=sent[6]["id"]), 2)
        assert resumed[1]["data"]["message"] == "last"


def test_a_stream_is_taken_up_where_it_was_left(tmp_path: Path, journal: Journal) -> None:
    record_event(journal, "before")
    flushed(journal)
    with served(tmp_path) as url, Client(url) as client:
        events = client.events()
        (hello,) = take(events, 1)
        assert (hello["event"], hello["data"]) == ("hello", {"run": tmp_path.name})
        record_event(journal, "first")
        (first,) = take(events, 1)
        assert (first["event"], first["data"]["message"]) == ("event", "first")
        events.close()  # type: ignore[attr-defined]  # a generator
        record_event(journal, "while nobody looked")
        record_event(journal, "second")
        flushed(journal)
        again = take(client.events(after=first["id"]), 3)
        assert [one["data"].get("message") for one in again] == [None, "while nobody looked", "second"]
        everything = take(client.events(after="start"), 6)
        assert [one["data"].get("message") for one in everything[2:]] == [
            "before",
            "first",
            "while nobody looked",
            "second",
        ]
        # What a browser sends when it comes back goes before what its address asked for at first.
        headers = {"last-event-id": again[1]["id"]}
        with httpx.stream("GET", f"{url}/events?after=start", headers=headers) as reply:
            text = next(chunk for chunk in reply.iter_text() if "second" in chunk)
        assert "while nobody looked" not in text


@pytest.mark.parametrize("after", ["1-0123456789abcdef", "99-", "nonsense"])
def test_an_id_of_another_journal_begins_anew_and_says_so(tmp_path: Path, journal: Journal, after: str) -> None:
    record_event(journal, "before")
    flushed(journal)
    with served(tmp_path) as url, Client(url) as client:
        events = client.events(after=after)
        hello, reset, life = take(events, 3)
        assert [one["event"] for one in (hello, reset, life)] == ["hello", "reset", "life"]
        record_event(journal, "now")
        sent = [one["data"] for one in take(events, 2)]
        assert [(one["row"], one["message"]) for one in sent] == [(2, "before"), (3, "now")]


def test_rows_that_a_power_cut_took_are_sent_anew_under_their_numbers(tmp_path: Path, journal: Journal) -> None:
    record_event(journal, "kept")
    flushed(journal)
    left = (tmp_path / "journal.db-wal").stat().st_size
    for message in ("lost", "lost too"):
        record_event(journal, message)
        flushed(journal)
    followed, copied = (tmp_path.with_name(f"{tmp_path.name}-{name}") for name in ("followed", "after-the-cut"))
    followed.symlink_to(tmp_path)
    copied.mkdir()
    shutil.copy(tmp_path / "journal.db", copied)
    log = (tmp_path / "journal.db-wal").read_bytes()
    (copied / "journal.db-wal").write_bytes(log[: left + 100])  # torn within the next record
    with served(followed) as url, Client(url) as client:
        events = client.events(after="start")
        sent = take(events, 5)
        assert [one["data"].get("message") for one in sent[2:]] == ["kept", "lost", "lost too"]
        followed.unlink()
        followed.symlink_to(copied)
        again = Journal.open(copied / "journal.db")
        for message in ("new", "newer"):
            record_event(again, message)
        again.close()
        for anew in (take(events, 5), take(client.events(after=sent[-1]["id"]), 6)[1:]):
            assert anew[0]["event"] == "reset"
            assert [one["data"].get("message") for one in anew[2:]] == ["kept", "new", "newer"]


def test_a_stream_with_nothing_to_say_shows_that_it_is_alive(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "QUIET_SECONDS", 0.05)
    with served(tmp_path) as url, httpx.stream("GET", f"{url}/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert any(line == ": still here" for _, line in zip(range(50), lines, strict=False))


def test_so_many_streams_and_no_more(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "STREAMS_MAX", 1)
    with served(tmp_path) as url:
        with httpx.stream("GET", f"{url}/events") as first:
            lines = first.iter_lines()
            next(lines)
            assert error_of(httpx.get(f"{url}/events"), 503)["code"] == "too_many_streams"
        until_there_is_room(url)


def test_a_client_that_takes_nothing_is_let_go_and_holds_up_nobody(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "SEND_SECONDS", 0.3)
    monkeypatch.setattr(events_module, "STREAMS_MAX", 2)
    for number in range(3000):
        record_event(journal, f"{number} " + "x" * 2000)
    flushed(journal)
    with served(tmp_path) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"GET /events?after=start HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert slow.recv(1)
        with Client(url) as client:
            events = client.events(after="start")
            sent = take(events, 3002)  # another one gets all of it meanwhile
            assert sent[-1]["data"]["message"].startswith("2999 ")
            until_there_is_room(url)  # for a third one, once the first is let go
        received = drained(slow)
        assert received < 3000 * 2000, "the stream was ended before all of it was sent"


def until_there_is_room(url: str) -> None:
    """Wait until the server takes another stream."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with httpx.stream("GET", f"{url}/events") as later:
            if later.status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("a stream whose client has gone, or takes nothing, still counts")


def drained(connection: socket.socket) -> int:
    """Bytes until the server has closed the connection."""
    connection.settimeout(WAIT_SECONDS)
    received = 0
    while data := connection.recv(1 << 16):
        received += len(data)
    connection.close()
    return received
