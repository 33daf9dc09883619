"""The health of a run."""

import os
import time
from pathlib import Path

from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal
from tests.service.journals import Answer, flushed, record_steps


def test_health_of_a_running_job(client: TestClient, journal: Journal) -> None:
    record_steps(journal)
    flushed(journal)
    response = client.get("/healthz")
    body = response.json()
    assert (response.status_code, body["status"], body["reason"], body["last_iteration"]) == (200, "ok", None, 7)
    assert 0 <= body["journal_age_seconds"] < 30
    assert body["life"] == "running"


def test_health_names_a_failed_checkpoint_until_the_next_is_good(client: TestClient, journal: Journal) -> None:
    journal.record(CheckpointRow(life=0, iteration=50, status="failed", reason="No space left on device"))
    flushed(journal)
    response = client.get("/healthz")
    assert response.status_code == 503
    assert "No space left" in response.json()["reason"]
    journal.record(CheckpointRow(life=0, iteration=100, status="committed", bytes=1))
    flushed(journal)
    assert client.get("/healthz").status_code == 200


def test_health_of_a_silent_job_depends_on_its_pace(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    def age(seconds: float) -> Answer:
        for file in tmp_path.glob("journal.db*"):
            os.utime(file, (time.time() - seconds, time.time() - seconds))
        response: Answer = client.get("/healthz")
        return response

    record_steps(journal, seconds=1.5)  # 200 iterations are 300 s
    flushed(journal)
    assert age(290).status_code == 200
    late = age(310)
    assert late.status_code == 503
    assert "ago" in late.json()["reason"]
    assert late.json()["life"] == "silent"
    journal.end_life("clean")
    flushed(journal)
    ended = age(3000)
    assert (ended.status_code, ended.json()["life"]) == (200, "clean")
