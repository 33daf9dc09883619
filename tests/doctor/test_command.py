"""`cpsr doctor` as users start it: alone, as ranks of a launcher, and on several machines."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpsr.doctor.command import needs_of
from cpsr.ranks.link import REFUSED_STATUS
from tests.doctor.mounts import mounted
from tests.launch.jobs import Launched

LIMIT_SECONDS = 200.0
LAUNCHERS = ("PET_", "TORCHELASTIC", "CPSR_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
DOCTOR = [sys.executable, "-m", "cpsr", "doctor"]
SUBJECTS = {
    *("devices", "host memory", "shared memory", "memory kind"),
    *("file system", "disk space", "fsync"),
}
Findings = dict[str, dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def doctor(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [*DOCTOR, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, env=environment(**more)
    )


def by_subject(output: str) -> Findings:
    """Of JSON among other lines; of several machines the last one's."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    return {one["subject"]: one for one in json.loads(line)["findings"]}


def test_alone_it_looks_at_the_machine_and_the_disk_and_leaves_nothing(tmp_path: Path) -> None:
    ended = doctor("--run-dir", tmp_path / "runs" / "a", "--parameters", "1000000", "--json")
    assert ended.returncode == 0, ended.stderr
    found = by_subject(ended.stdout)
    assert set(found) == SUBJECTS
    assert "buffers take 36 MB" in found["shared memory"]["measured"]
    assert list(tmp_path.iterdir()) == []


def test_for_people_it_is_a_line_each_and_warnings_are_no_failure() -> None:
    ended = doctor()
    assert ended.returncode == 0, ended.stderr
    assert {line.split()[0] for line in ended.stdout.splitlines()} <= {"ok", "warning"}
    assert any(line.split()[:3] == ["warning", "run", "directory"] for line in ended.stdout.splitlines())


@pytest.mark.parametrize(("options", "fill", "subject"), [("ro", "true", "run directory"), ("size=8m", "fill", "disk")])
def test_a_disk_that_refuses_is_an_error(tmp_path: Path, options: str, fill: str, subject: str) -> None:
    more = "true" if fill == "true" else f"head -c 8388608 /dev/zero > {shlex.quote(str(tmp_path))}/fill"
    ended = mounted(tmp_path, options, [*DOCTOR, "--json", "--run-dir", str(tmp_path / "run")], more)
    assert ended.returncode == 1, ended.stderr
    found = by_subject(ended.stdout)
    assert [name for name, one in found.items() if one["level"] == "error"] == [subject]


def test_the_job_is_read_from_where_users_keep_it(tmp_path: Path) -> None:
    own, deepspeed = tmp_path / "cpsr.yaml", tmp_path / "ds.json"
    own.write_text("run_dir: runs/a\n")
    deepspeed.write_text(json.dumps({"train_batch_size": 8, "cpsr": {"run_dir": "runs/b"}}))
    needs = needs_of(own, None, 1_000_000)
    assert (needs.config.run_dir, needs.state_bytes) == (Path("runs/a"), 12_000_000)
    assert needs_of(deepspeed, None, None).config.run_dir == Path("runs/b")
    assert needs_of(own, Path("elsewhere"), None).config.run_dir == Path("elsewhere")
    ended = doctor("--config", tmp_path / "absent.yaml")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


def test_under_torchrun_the_ranks_look_together(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node=2", "-m", "cpsr", "doctor", "--json"]
    with Launched(tmp_path, [*command, "--run-dir", "run", "--parameters", "1000000"]) as launched:
        assert launched.wait() == 0, launched.output
        found = by_subject(launched.output)
    assert set(found) == SUBJECTS | {"ranks", "shared directory"}
    assert all(found[subject]["level"] == "ok" for subject in ("ranks", "shared directory"))
    assert "buffers take 72 MB" in found["shared memory"]["measured"]


def test_a_snapshot_at_every_iteration_takes_a_buffer_more(tmp_path: Path) -> None:
    (tmp_path / "cpsr.yaml").write_text("run_dir: run\nmemory:\n  interval_iterations: 1\n")
    ended = doctor("--config", tmp_path / "cpsr.yaml", "--parameters", "1000000", "--json")
    assert "buffers take 48 MB" in by_subject(ended.stdout)["shared memory"]["measured"]


@pytest.mark.parametrize(
    ("launcher", "status"), [("cpsr run", REFUSED_STATUS), pytest.param("torchrun", 1, marks=pytest.mark.slow)]
)
def test_ranks_with_other_run_directories_are_an_error(tmp_path: Path, launcher: str, status: int) -> None:
    """Each on a machine of its own, by name; two paths that do not exist yet."""
    script = f"CPSR_NODE=node-$RANK exec {shlex.join(DOCTOR)} --json --run-dir run-$RANK"
    command = [*launcher.split(), "--nproc-per-node=2", "--no-python", "sh", "-c", script]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == status, launched.output
        line = next(line for line in launched.output.splitlines() if line.startswith("{"))
        started = sum(line.startswith("Started") for line in launched.lines())
    found = json.loads(line)["findings"]
    assert {one["machine"] for one in found} == {"", "node-0", "node-1"}  # the ranks that meet are of no machine
    (shared,) = [one for one in found if one["subject"] == "shared directory"]
    assert shared["level"] == "error"
    assert str(tmp_path / "run-1") in shared["measured"]
    assert started == (launcher == "cpsr run")  # an error would be the same again


def test_a_rank_that_does_not_come_is_named_and_rank_0_looks_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    script = "from cpsr.doctor import command; command.WAIT_SECONDS = 3.0; from cpsr.cli.main import main; main()"
    given = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", script, "doctor", "--json"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env=environment(**given, MASTER_PORT=str(port)),
    )
    assert ended.returncode == 1, ended.stderr
    found = by_subject(ended.stdout)
    assert found["ranks"]["level"] == "error"
    assert found["ranks"]["measured"].startswith("ranks 1, 2 of 3 did not come")
    assert found["host memory"]["level"] == "ok"


def test_ranks_that_cannot_meet_are_an_error() -> None:
    ended = doctor("--json", RANK="0", WORLD_SIZE="2")
    assert ended.returncode == 1
    assert by_subject(ended.stdout)["ranks"]["level"] == "error"
