import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from cpsr.errors import ConfigError
from cpsr.journal import CheckpointRow, FailureRow, Journal, PlanRow, RecoveryRow, RecoverySource, RehearsalRow, StepRow
from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.plan import make_plan
from cpsr.service.app import bind, create_app

FLUSH_SECONDS = 20.0
PLAN = make_plan([PlannerInputs(1.5, 0.5, 3.0, 1 / 43200)], Limits(10, 500), policy="young")


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path), raise_server_exceptions=False)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("predict")
    yield journal
    journal.close()


def record_plan(journal: Journal) -> None:
    journal.record_plan(
        PlanRow(
            life=0,
            from_iteration=20,
            interval_iterations=PLAN.interval_iterations,
            origin=PLAN.origin,
            mode=PLAN.mode,
            explanation=PLAN.explanation,
        )
    )


def record_steps(journal: Journal, seconds: float = 1.5) -> None:
    journal.record_steps(
        [StepRow(life=0, iteration=i, loss=2.0, learning_rate=1e-3, seconds=seconds) for i in range(1, 8)]
    )


def recovery(**changes: Any) -> RecoveryRow:
    values: dict[str, Any] = {
        "id": f"recovery-{time.monotonic_ns()}",
        "life": 0,
        "failure_iteration": 92,
        "checkpoint_iteration": 50,
        "restored_iteration": 92,
        "method": "line",
        "requested_mode": "predict",
        "guard": {"probe_loss_nats": math.nan},
        "sources": (RecoverySource(rank=1, source="disk", iteration=50),),
    }
    return RecoveryRow(**(values | changes))


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    body: dict[str, str] = response.json()
    assert set(body) == {"code", "message", "hint"}
    assert all(body.values())
    return body


def test_plan_of_a_running_job(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "gpt", "world_size": 2, "mode": "auto", "later": 1}')
    record_plan(journal)
    record_steps(journal)
    journal.record_checkpoint(CheckpointRow(life=0, iteration=50, status="committed", bytes=1234, origin="trained"))
    journal.record_checkpoint(CheckpointRow(life=0, iteration=60, status="skipped", reason="slow disk"))
    journal.record_recovery(recovery())
    journal.record_rehearsal(
        RehearsalRow(
            id="d",
            life=0,
            iteration=70,
            failure_iteration=60,
            checkpoint_iteration=50,
            outcome="refused",
            reason="vetoed",
            cost_seconds=2.0,
        )
    )
    assert journal.flush(FLUSH_SECONDS)
    body = client.get("/plan").json()
    assert (body["last_rehearsal"]["outcome"], body["last_rehearsal"]["lag_iterations"]) == ("refused", None)
    assert body["recovery_mode"] == "recompute"
    assert (body["run_id"], body["world_size"], body["mode"], body["last_iteration"]) == ("gpt", 2, "predict", 7)
    assert body["warnings"] == []
    assert [entry["rank"] for entry in body["ranks"]] == [0, 1]
    assert body["ranks"][1] == {
        "rank": 1,
        "interval_iterations": 139,
        "interval_seconds": 139 * 1.5,
        "origin": "young",
        "from_iteration": 20,
    }
    assert body["explanation"]["inputs"]["stall_seconds"] == 0.5
    assert body["explanation"]["bound"] == "none"
    assert (body["newest_checkpoint"]["iteration"], body["newest_checkpoint"]["bytes"]) == (50, 1234)
    assert (body["last_recovery"]["method"], body["last_recovery"]["guard"]) == ("line", {"probe_loss_nats": "nan"})
    assert body["last_recovery"]["sources"] == [{"rank": 1, "source": "disk", "iteration": 50}]
    assert body["descends_from_predicted"] is True


@pytest.mark.parametrize(
    ("last", "origin", "descends"),
    [
        ({"outcome": "kept"}, "trained", True),
        ({"outcome": "watching"}, "trained", True),
        ({"outcome": "vetoed", "restored_iteration": 50}, "trained", False),
        ({"outcome": "vetoed", "restored_iteration": 50}, "predicted", True),
        ({"outcome": "rolled_back"}, "trained", False),
        ({"outcome": "rolled_back", "checkpoint_iteration": 40}, "predicted", None),
        ({"method": "exact", "restored_iteration": 50}, "trained", False),
        ({"method": "exact", "restored_iteration": 50}, "predicted", True),
        ({"method": "exact", "restored_iteration": 40}, "predicted", None),
        ({"method": "scratch", "restored_iteration": 0, "checkpoint_iteration": None}, "predicted", False),
        (None, "predicted", False),
    ],
)
def test_descent_from_a_predicted_state(
    client: TestClient, journal: Journal, last: dict[str, Any] | None, origin: Any, descends: bool | None
) -> None:
    record_plan(journal)
    journal.record_checkpoint(CheckpointRow(life=0, iteration=50, status="committed", origin=origin))
    if last is not None:
        journal.record_recovery(recovery(id="earlier", method="exact", restored_iteration=10))
        journal.record_recovery(recovery(**last))
    assert journal.flush(FLUSH_SECONDS)
    assert client.get("/plan").json()["descends_from_predicted"] is descends


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "absent"),
        ("{", "cannot be read"),
        ("[]", "no object"),
        ('{"run_id": "x", "mode": "auto", "world_size": "2"}', "'world_size'"),
        ('{"run_id": "x", "mode": "auto", "world_size": -2}', "'world_size'"),
        ('{"run_id": "x", "mode": "auto", "world_size": 1000000000000}', "'world_size'"),
    ],
)
def test_plan_without_a_usable_run_json(
    tmp_path: Path, client: TestClient, journal: Journal, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    record_plan(journal)
    assert journal.flush(FLUSH_SECONDS)
    response = client.get("/plan")
    body = response.json()
    assert (response.status_code, body["world_size"], len(body["ranks"])) == (200, None, 1)
    assert body["ranks"][0]["interval_seconds"] is None
    assert words in body["warnings"][0]


def test_no_plan_yet(client: TestClient, journal: Journal) -> None:
    assert error_of(client.get("/plan"), 404)["code"] == "no_plan_yet"


def test_unknown_path_and_method_have_the_same_form(client: TestClient) -> None:
    assert error_of(client.get("/nothing"), 404)["code"] == "not_found"
    refused = client.post("/plan")
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "GET"


def newer(path: Path) -> None:
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()


def truncated(path: Path) -> None:
    journal = Journal.open(path)
    record_plan(journal)
    record_steps(journal)
    journal.close()
    os.truncate(path, 6000)


def damaged(path: Path, assignment: str) -> None:
    journal = Journal.open(path)
    record_plan(journal)
    journal.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(f"UPDATE plans SET {assignment}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: None, "there is no journal"),
        (newer, "schema 99"),
        (truncated, "truncated"),
        (lambda path: path.write_bytes(b"x" * 5000), "not a CPSR journal"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.mkdir(), "there is no journal"),
        (lambda path: damaged(path, "explanation = '{torn'"), "damaged PlanRow"),
        (lambda path: damaged(path, "explanation = '3'"), "damaged PlanRow"),
        (lambda path: damaged(path, "from_iteration = 'x'"), "damaged PlanRow"),
        (lambda path: damaged(path, "mode = 'guess'"), "does not know"),
    ],
    ids=["absent", "newer", "truncated", "foreign", "empty", "directory", "torn", "number", "text", "unknown"],
)
def test_unreadable_journal_is_503(tmp_path: Path, client: TestClient, spoil: Any, words: str) -> None:
    spoil(tmp_path / "journal.db")
    body = error_of(client.get("/plan"), 503)
    assert body["code"] == "journal_unavailable"
    assert words in body["message"]
    if "Plan" in words or "know" in words:
        return  # a plan that cannot be read does not make the run unwell
    health = client.get("/healthz")
    assert (health.status_code, health.json()["status"]) == (503, "degraded")
    assert health.json()["reason"]


def test_locked_journal_is_503_and_comes_back(tmp_path: Path, client: TestClient) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    record_plan(journal)
    journal.close()
    connection = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    assert "locked" in error_of(client.get("/plan"), 503)["message"]
    assert client.get("/healthz").status_code == 503
    connection.execute("ROLLBACK")
    connection.close()
    assert client.get("/plan").status_code == 200


def test_health_of_a_running_job(client: TestClient, journal: Journal) -> None:
    record_steps(journal)
    assert journal.flush(FLUSH_SECONDS)
    response = client.get("/healthz")
    body = response.json()
    assert (response.status_code, body["status"], body["reason"], body["last_iteration"]) == (200, "ok", None, 7)
    assert 0 <= body["journal_age_seconds"] < 30


def test_health_names_a_failed_checkpoint_until_the_next_is_good(client: TestClient, journal: Journal) -> None:
    journal.record_checkpoint(CheckpointRow(life=0, iteration=50, status="failed", reason="No space left on device"))
    assert journal.flush(FLUSH_SECONDS)
    response = client.get("/healthz")
    assert response.status_code == 503
    assert "No space left" in response.json()["reason"]
    journal.record_checkpoint(CheckpointRow(life=0, iteration=100, status="committed", bytes=1))
    assert journal.flush(FLUSH_SECONDS)
    assert client.get("/healthz").status_code == 200


def test_health_of_a_silent_job_depends_on_its_pace(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    def age(seconds: float) -> httpx.Response:
        for file in tmp_path.glob("journal.db*"):
            os.utime(file, (time.time() - seconds, time.time() - seconds))
        response: httpx.Response = client.get("/healthz")
        return response

    record_steps(journal, seconds=1.5)  # 200 iterations are 300 s
    assert journal.flush(FLUSH_SECONDS)
    assert age(290).status_code == 200
    late = age(310)
    assert late.status_code == 503
    assert "ago" in late.json()["reason"]
    journal.end_life("clean")
    assert journal.flush(FLUSH_SECONDS)
    assert age(3000).status_code == 200


def test_health_after_an_error(client: TestClient, journal: Journal) -> None:
    journal.end_life("error")
    assert journal.flush(FLUSH_SECONDS)
    assert "ended with an error" in client.get("/healthz").json()["reason"]


def test_health_of_a_killed_job(tmp_path: Path, client: TestClient) -> None:
    code = "import os, sys; from pathlib import Path; from cpsr.journal import Journal;"
    code += "Journal.open(Path(sys.argv[1])).start_life('auto'); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "journal.db")], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    response = client.get("/healthz")
    assert response.status_code == 503
    assert "was killed" in response.json()["reason"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_unless_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-remote"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_loopback_is_served(host: str) -> None:
    bind(host, 0).close()


def test_another_host_is_served_when_allowed() -> None:
    listener = bind("0.0.0.0", 0, allow_remote=True)
    assert listener.getsockname()[0] == "0.0.0.0"
    listener.close()


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another"):
        bind("127.0.0.1", taken.getsockname()[1])


TRAINER = """
import sys, time
from pathlib import Path
from cpsr.journal import Journal, PlanRow, StepRow
journal = Journal.open(Path(sys.argv[1]) / "journal.db")
life = journal.start_life("auto")
journal.record_plan(PlanRow(life=life, from_iteration=0, interval_iterations=50, origin="fixed"))
iteration = 0
while True:
    iteration += 1
    journal.record_steps([StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=1e-3, seconds=0.002)])
    time.sleep(0.002)
"""


def test_serve_beside_a_writing_trainer_until_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cpsr", "serve", "--run-dir", str(tmp_path), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trainer = None
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = line.split(" on ")[1].strip()
        assert url.startswith("http://127.0.0.1:")
        health_url = url.replace("/plan", "/healthz")
        assert error_of(httpx.get(url, timeout=20), 503)["code"] == "journal_unavailable"
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)])
        deadline = time.monotonic() + 30
        while httpx.get(url).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        iterations = []
        for _ in range(50):
            reply = httpx.get(url)
            assert reply.status_code == 200, reply.text
            assert reply.json()["ranks"][0]["origin"] == "fixed"
            iterations.append(reply.json()["last_iteration"] or 0)
            assert httpx.get(health_url).status_code == 200
        assert iterations == sorted(iterations)
        assert iterations[-1] > iterations[0]
        trainer.kill()
        trainer.wait(10)
        assert "was killed" in httpx.get(health_url).json()["reason"]
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
        assert (server.returncode, errors) == (0, "")
    finally:
        for process in (server, trainer):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)


@pytest.fixture
def writing(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path, allow_writes=True), base_url="http://127.0.0.1:8712")


def test_a_reported_failure_is_listed_beside_those_that_the_job_saw(writing: TestClient, journal: Journal) -> None:
    journal.record_failure(
        FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed", detected_unix_seconds=100.0)
    )
    assert journal.flush(FLUSH_SECONDS)
    reply = writing.post("/failures", json={"description": "node 17", "failed_unix_seconds": 200.0})
    assert reply.status_code == 201
    assert reply.json()["reported"] is True
    assert writing.post("/failures", json={"description": "now"}).json()["failed_unix_seconds"] > 1e9
    body = writing.get("/failures").json()
    assert [one["description"] for one in body["failures"]] == ["now", "node 17", "killed"]
    assert (body["failures"][2]["iteration"], body["failures"][1]["iteration"]) == (92, None)
    limited = writing.get("/failures", params={"limit": 1}).json()
    assert (len(limited["failures"]), limited["total"]) == (1, 3)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"description": ""},
        {"description": "x" * 1001},
        {"description": "x", "failed_unix_seconds": -1.0},
        {"d": 1},
        {"description": "x", "failed_unix_seconds": 9e15},
    ],
)
def test_a_report_that_makes_no_sense_is_refused(writing: TestClient, journal: Journal, body: dict[str, Any]) -> None:
    error_of(writing.post("/failures", json=body), 422)
    assert writing.get("/failures").json()["total"] == 0


def test_only_who_may_write_can_report(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    assert error_of(client.post("/failures", json={"description": "x"}), 403)["code"] == "writes_off"
    elsewhere = TestClient(create_app(tmp_path, allow_writes=True), base_url="http://evil.example")
    assert error_of(elsewhere.post("/failures", json={"description": "x"}), 403)["code"] == "foreign_host"
    # What a page of another site can send without being asked first has no JSON type.
    local = TestClient(create_app(tmp_path, allow_writes=True), base_url="http://localhost")
    error_of(local.post("/failures", content='{"description": "x"}', headers={"content-type": "text/plain"}), 422)
    assert local.get("/failures").json()["total"] == 0


def test_a_failure_cannot_be_reported_to_no_run(writing: TestClient) -> None:
    error_of(writing.post("/failures", json={"description": "x"}), 503)
