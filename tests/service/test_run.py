"""The runs of a service, and their health."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.journal import CheckpointRow, Journal
from cpsr.service.app import create_app
from cpsr.service.problems import Problem
from cpsr.service.run import Runs
from tests.service.conftest import BASE_URL
from tests.service.journals import Answer, error_of, flushed, new_run, record_steps


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in a directory, and around them what must not be found."""
    root = tmp_path_factory.mktemp("around")
    new_run(root / "outside")
    directory = root / "runs"
    for name in ("a", "b c"):
        new_run(directory / name)
    (directory / "notes").mkdir()
    (directory / "file").touch()
    (directory / "link").symlink_to(root / "outside", target_is_directory=True)
    return directory


def test_a_directory_of_several_runs(several: Path) -> None:
    client = TestClient(create_app(several), base_url=BASE_URL)
    listed = client.get("/runs").json()
    assert ([run["name"] for run in listed["runs"]], listed["total"]) == (["a", "b c"], 2)
    assert listed["runs"][0]["status"] == "ok"
    assert error_of(client.get("/plan"), 409)["code"] == "run_needed"
    for name in ("a", "b c"):
        assert client.get("/plan", params={"run": name}).status_code == 200
    for name in ("link", "notes", "file", "..", "../outside", "a/../a", "/etc", "", ".", "a\0", "c"):
        assert error_of(client.get("/plan", params={"run": name}), 404)["code"] == "no_such_run", name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | st.lists(st.sampled_from(["..", ".", "a", "b c", "outside", "/", "\\", "\0", ""])).map("/".join))
def test_no_name_leads_out(several: Path, name: str) -> None:
    runs = Runs(several)
    if name in runs.names():
        assert runs.find(name) == several / name
        return
    with pytest.raises(Problem) as refused:
        runs.find(name)
    assert refused.value.status == 404


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


def test_health_of_a_killed_job(tmp_path: Path, client: TestClient) -> None:
    code = "import os, sys; from pathlib import Path; from cpsr.journal import Journal;"
    code += "Journal.open(Path(sys.argv[1])).start_life('auto'); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "journal.db")], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    response = client.get("/healthz")
    assert response.status_code == 503
    assert "was killed" in response.json()["reason"]
    assert response.json()["life"] == "killed"
