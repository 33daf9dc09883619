import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpsr.errors import ConfigError
from cpsr.service.access import TOKEN_VARIABLE, Access
from cpsr.service.server import IDLE_SECONDS, bind
from tests.service.journals import error_of, new_run

TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
WAIT_SECONDS = 30.0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_without_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="--token-file"):
        bind(host, 0, Access())
    with pytest.raises(ConfigError, match="--token-file"):
        bind(host, 0, Access(allow_writes=True))


def test_a_taken_port_is_reported_and_waited_for_where_that_was_asked() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match="choose another"):
        bind("127.0.0.1", port, Access())
    threading.Timer(0.3, taken.close).start()
    bind("127.0.0.1", port, Access(), patience_seconds=WAIT_SECONDS).close()


TRAINER = """
import sys, time
from pathlib import Path
from cpsr.journal import Journal, PlanRow, StepRow
journal = Journal.open(Path(sys.argv[1]) / "journal.db")
life = journal.start_life("auto")
journal.record(PlanRow(life=life, from_iteration=0, interval_iterations=50, origin="fixed"))
iteration = 0
while True:
    iteration += 1
    journal.record(*[StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=1e-3, seconds=0.002)])
    time.sleep(0.002)
"""


@contextmanager
def serving(run_dir: Path, *options: str, **environment: str) -> Iterator[tuple[Any, str]]:
    """`cpsr serve` in a process of its own, and its address."""
    command = [sys.executable, "-m", "cpsr", "serve", "--run-dir", str(run_dir), "--port", "0", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " on http" in line, process.stderr.read() if process.stderr else ""
        yield process, line.split(" on ")[1].strip().removesuffix("/")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def test_serve_beside_a_writing_trainer_until_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, url):
        assert url.startswith("http://127.0.0.1:")
        assert error_of(httpx.get(f"{url}/plan", timeout=20), 503)["code"] == "journal_unavailable"
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)])
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while httpx.get(f"{url}/plan").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            iterations = []
            with httpx.Client(base_url=url) as client:
                for _ in range(20):
                    plan = client.get("/plan").json()
                    assert plan["origin"] == "fixed"
                    iterations.append(plan["last_iteration"] or 0)
                    assert client.get("/healthz").json()["status"] == "ok"
            assert iterations == sorted(iterations)
            assert iterations[-1] > iterations[0]
        finally:
            trainer.kill()
            trainer.wait(10)
        assert "was killed" in httpx.get(f"{url}/healthz").json()["reason"]
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
        assert (server.returncode, errors) == (0, "")


def ended_after_seconds(connection: socket.socket) -> float:
    """How long the server keeps a connection."""
    began = time.monotonic()
    connection.settimeout(WAIT_SECONDS)
    while connection.recv(1000):
        pass
    connection.close()
    return time.monotonic() - began


def test_connections_without_a_request_end(tmp_path: Path) -> None:
    new_run(tmp_path)
    with serving(tmp_path) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        silent, half, asked = (socket.create_connection((host, int(port))) for _ in range(3))
        half.sendall(b"GET /plan HTTP/1.1\r\nHost: loc")
        asked.sendall(f"GET /plan HTTP/1.1\r\nHost: {host}\r\n\r\nGET /pl".encode())
        for connection in (silent, half, asked):
            assert ended_after_seconds(connection) < IDLE_SECONDS + 3


def test_the_token_opens_and_stands_in_no_log(tmp_path: Path) -> None:
    new_run(tmp_path)
    with serving(tmp_path, "--host", "0.0.0.0", **{TOKEN_VARIABLE: TOKEN}) as (server, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
            assert client.get("/plan").json()["last_iteration"] is None
            asked = {"interval_iterations": 9, "reason": "x"}
            assert client.put("/plan/override", json=asked).json()["id"] == 1
        error_of(httpx.get(f"{url}/plan"), 401)
        error_of(httpx.get(f"{url}/plan", headers={"authorization": f"Bearer {TOKEN}x"}), 401)
        error_of(httpx.post(f"{url}/failures", content=b"{", headers={"authorization": f"Bearer {TOKEN}"}), 422)
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=20)
    assert TOKEN not in output + errors
    for file in tmp_path.iterdir():
        assert TOKEN.encode() not in file.read_bytes()
