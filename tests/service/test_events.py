import asyncio
import json
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
from starlette.requests import Request

from cpsr.errors import ServiceError
from cpsr.journal import Journal
from cpsr.service.app import create_app
from cpsr.service.client import Client
from cpsr.service.events import Streams, follow_events
from cpsr.service.follow import FOLLOWED
from cpsr.service.gate import Limits
from tests.service.journals import error_of, flushed, new_run, record_event, record_steps
from tests.service.test_follow import after_a_power_cut

WAIT_SECONDS = 20.0


@contextmanager
def served(run_dir: Path, **limits: Any) -> Iterator[str]:
    """A real server in a thread of this process; its address."""
    app = create_app(run_dir, limits=Limits(**{"poll_seconds": 0.02, **limits}))
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
        everything = take(client.events(after="start"), 5)
        assert [one["data"].get("message") for one in everything[1:]] == [
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


def test_the_newest_step_is_sent_without_an_id(tmp_path: Path, journal: Journal) -> None:
    with served(tmp_path) as url, Client(url) as client:
        events = client.events()
        take(events, 1)
        record_steps(journal)
        (progress,) = take(events, 1)
    assert (progress["event"], progress["id"], progress["data"]["iteration"]) == ("progress", None, 7)


@pytest.mark.parametrize("after", ["0-0-" + ".".join(["7"] * len(FOLLOWED)), "nonsense", "ff-1-1.2"])
def test_an_id_of_another_journal_begins_anew_and_says_so(tmp_path: Path, journal: Journal, after: str) -> None:
    record_event(journal, "before")
    flushed(journal)
    with served(tmp_path) as url, Client(url) as client:
        events = client.events(after=after)
        hello, reset = take(events, 2)
        assert (hello["event"], reset["event"]) == ("hello", "reset")
        assert reset["data"]["kept"] == dict.fromkeys(FOLLOWED, 0), "nothing stays"
        record_event(journal, "now")
        sent = [one["data"] for one in take(events, 2)]
        assert [(one["row"], one["message"]) for one in sent] == [(1, "before"), (2, "now")]


def test_a_run_that_is_removed_and_begun_anew_under_a_stream(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path / "run")
    with served(run_dir) as url, Client(url) as client:
        events = client.events()
        take(events, 1)
        shutil.rmtree(run_dir)
        (gone,) = take(events, 1)
        assert gone["event"] == "unavailable"
        assert str(run_dir) in gone["data"]["message"]
        new_run(run_dir)
        # A journal that is being made is none yet, which may be sent as well.
        reset = next(one for one in events if one["event"] != "unavailable")
        assert (reset["event"], set(reset["data"]["kept"].values())) == ("reset", {0})
        (plan,) = take(events, 1)
        assert plan["event"] == "plan", "what the new journal holds was not sent yet"
        shutil.rmtree(run_dir)
        with pytest.raises(ServiceError) as refused:
            next(client.events())
        assert refused.value.code == "journal_unavailable"


def test_a_stream_goes_on_where_a_journal_that_a_power_cut_has_shortened_agrees(
    tmp_path: Path, journal: Journal
) -> None:
    run_dir = tmp_path.with_name(f"{tmp_path.name}-followed")
    run_dir.symlink_to(tmp_path)
    copied = after_a_power_cut(tmp_path, journal)
    with served(run_dir) as url, Client(url) as client:
        events = client.events(after="start")
        sent = take(events, 4)
        assert [one["data"].get("message") for one in sent] == [None, "kept", "lost", "lost too"]
        run_dir.unlink()
        run_dir.symlink_to(copied)
        again = Journal.open(copied / "journal.db")
        again.start_life("auto", after=0)
        record_event(again, "again")
        again.close()
        followed = [one for one in take(events, 2) if one["event"] != "progress"]
        resumed = take(client.events(after=sent[-1]["id"]), 3)[1:]
        for reset, event in (followed, resumed):
            assert (reset["event"], event["data"]["message"]) == ("reset", "again")
            kept = [one["data"] for one in sent[1:] if one["data"]["row"] <= reset["data"]["kept"][one["event"]]]
            assert [one["message"] for one in kept] == ["kept"]
            assert event["data"]["row"] == reset["data"]["kept"]["event"] + 1
        # Who comes back with the id of the reset has missed nothing.
        assert take(client.events(after=resumed[0]["id"]), 2)[1]["data"]["message"] == "again"


def test_a_stream_with_nothing_to_say_shows_that_it_is_alive(tmp_path: Path, journal: Journal) -> None:
    with served(tmp_path, quiet_seconds=0.05) as url, httpx.stream("GET", f"{url}/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert any(line == ": still here" for _, line in zip(range(50), lines, strict=False))


def test_so_many_streams_and_no_more(tmp_path: Path, journal: Journal) -> None:
    with served(tmp_path, streams=1) as url:
        with httpx.stream("GET", f"{url}/events") as first:
            lines = first.iter_lines()
            next(lines)
            assert error_of(httpx.get(f"{url}/events"), 503)["code"] == "too_many_streams"
        until_there_is_room(url)


def test_a_client_that_takes_nothing_is_let_go_and_holds_up_nobody(tmp_path: Path, journal: Journal) -> None:
    for number in range(3000):
        record_event(journal, f"{number} " + "x" * 2000)
    flushed(journal)
    with served(tmp_path, send_seconds=0.3, streams=2) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"GET /events?after=start HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert slow.recv(1)
        with Client(url) as client:
            events = client.events(after="start")
            sent = take(events, 3001)  # another one gets all of it meanwhile
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


def test_nothing_waits_in_memory_for_a_client_that_takes_nothing(tmp_path: Path, journal: Journal) -> None:
    """Straight at the operation: what was read of the journal when the first pieces were not taken yet."""
    for number in range(1000):
        record_event(journal, str(number))
    flushed(journal)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 10:
            await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def run() -> int:
        app = create_app(tmp_path)
        streams: Streams = app.state.streams
        streams.limits = Limits(send_seconds=0.2)
        scope = {"type": "http", "app": app, "headers": [], "method": "GET", "path": "/events"}
        response = await follow_events(Request(scope), tmp_path, after="start")
        await response(scope, receive, send)
        return streams.open

    assert asyncio.run(run()) == 0
    bodies = [json.loads(one["body"].split(b"data: ")[1]) for one in sent if b"event: event" in one.get("body", b"")]
    assert [body["message"] for body in bodies] == [str(number) for number in range(len(bodies))]
    assert len(bodies) <= 10
