"""`cpsr qualify` end to end: as a rank of a launcher, and interrupted."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.qualify.ranks import read_records
from tests.device import DEVICE
from tests.qualify.jobs import END_SECONDS, command, start


def test_under_a_launcher_it_is_a_rank(tmp_path: Path) -> None:
    workdir, copy = tmp_path / "work", tmp_path / "result.json"
    launcher = ["-m", "cpsr", "run", "--nproc-per-node=2", "--monitor-interval=0.1"]
    arguments = [*launcher, *command(workdir, "ddp fp32 adamw: restart"), f"--json={copy}"]
    status = start(arguments, tmp_path / "log").wait(END_SECONDS)
    output = (tmp_path / "log").read_text()
    assert status == 0, output
    assert "1 checks passed, 0 failed" in output
    data = json.loads(copy.read_text())
    assert data == json.loads((workdir / "qualify.json").read_text())
    assert (data["passed"], data["ranks"]) == (True, 2)
    assert data["machine"]["device"]["kind"] == DEVICE
    assert [(one["check"], one["status"]) for one in data["checks"]] == [("restart", "passed")]


def test_an_interrupted_run_leaves_no_process_and_no_memory(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    job = start([*command(workdir, "ddp fp32 adamw: memory"), "--ranks=2"], tmp_path / "log")
    deadline = time.monotonic() + END_SECONDS
    while not in_memory(workdir) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    assert in_memory(workdir), (tmp_path / "log").read_text()
    family = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGTERM)
    assert job.wait(END_SECONDS) != 0
    assert [process for process in family if process.is_running() and process.status() != "zombie"] == []
    assert in_memory(workdir) == []
    assert read_records(workdir)


def in_memory(workdir: Path) -> list[Path]:
    """Files of the checks' runs in shared memory."""
    identities = [json.loads(path.read_text()) for path in workdir.glob(f"*/run/{IDENTITY}")]
    return [path for one in identities for path in SHARED_MEMORY.glob(f"cpsr-{one['run_id']}-*")]


def test_without_assertions_it_refuses(tmp_path: Path) -> None:
    arguments = [sys.executable, "-O", *command(tmp_path / "work", "torch")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run Python without -O" in done.stderr
