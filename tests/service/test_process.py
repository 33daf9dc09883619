import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cpsr.config import CPSRConfig
from cpsr.service.process import ServiceProcess
from cpsr.service.server import CHILD_NICENESS
from tests.rank_processes import free_port
from tests.service.journals import new_run

WAIT_SECONDS = 30.0
LARGEST_NICENESS = 19


class EventLog:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, kind: str, message: str, **_: Any) -> None:
        self.events.append((kind, message))

    def wait(self, kind: str) -> str:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for name, message in self.events:
                if name == kind:
                    return message
            time.sleep(0.02)
        raise AssertionError(f"{kind} was not reported: {self.events}")


def process_of(run_dir: Path, log: EventLog, **settings: Any) -> ServiceProcess:
    service = {"enabled": True, "port": free_port(), **settings}
    config = CPSRConfig.load({"run_dir": str(run_dir), "service": service})
    return ServiceProcess(config.service, run_dir, log)


def test_its_death_is_reported_once_and_nothing_else(tmp_path: Path) -> None:
    log = EventLog()
    process = process_of(new_run(tmp_path), log)
    process.start()
    assert process.child is not None
    process.child.send_signal(signal.SIGKILL)
    assert "training is not affected" in log.wait("service ended")
    process.close()
    assert [kind for kind, _ in log.events] == ["service", "service ended"]


def test_where_it_cannot_be_started_that_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    process = process_of(tmp_path, log)
    process.start()
    process.close()
    assert [kind for kind, _ in log.events] == ["service ended"]
    assert "could not be started" in log.events[0][1]


JOB = """
import sys
from pathlib import Path
from cpsr import CPSRRecovery
from tests.recovery.test_faults import Loop, config, loader
run_dir, port = Path(sys.argv[1]), int(sys.argv[2])
loop = Loop()
service = {"enabled": True, "port": port}
with CPSRRecovery(loop.adapter, config(run_dir, service=service)) as recovery:
    for x, y in recovery.resume(loader(), repeat=True):
        loop.step(loop.model(x, y))
        if recovery.iteration == 5:
            print("five", flush=True)
            sys.stdin.readline()
        if recovery.iteration >= 8:
            break
"""


@pytest.mark.parametrize("ending", ["clean", "killed"])
def test_a_job_has_its_service_as_long_as_it_lives(tmp_path: Path, ending: str) -> None:
    port = free_port()
    command = [sys.executable, "-c", JOB, str(tmp_path / "run"), str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert job.stdin is not None
    assert job.stdout is not None
    assert job.stdout.readline() == "five\n"
    (child,) = psutil.Process(job.pid).children()
    lowest = min(psutil.Process().nice() + CHILD_NICENESS, LARGEST_NICENESS)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/plan").json()["interval_iterations"] == 3
            assert child.nice() == lowest, "training goes first"
            break
        except (httpx.HTTPError, KeyError):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    if ending == "killed":
        job.kill()
    job.communicate("\n", timeout=WAIT_SECONDS)
    assert job.returncode == (0 if ending == "clean" else -9)
    child.wait(WAIT_SECONDS)
