"""`cpsr doctor` as users start it: alone, as ranks of a launcher, and on several machines."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.doctor.command import needs_of
from cpsr.errors import ConfigError
from cpsr.ranks.link import REFUSED_STATUS
from tests.doctor.mounts import obstacle as mount_obstacle
from tests.launch.jobs import BIN, Launched
from tests.machines import MEMORY, Machines, obstacle

LIMIT_SECONDS = 200.0
LAUNCHERS = ("PET_", "TORCHELASTIC", "CPSR_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "KUBERNETES_")
PORT = 29471
Findings = dict[str, dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def doctor(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpsr", "doctor", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, env=environment(**more)
    )


def by_subject(output: str) -> Findings:
    """Of JSON among other lines; of several machines the last one's."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    return {one["subject"]: one for one in json.loads(line)["findings"]}


def test_alone_every_subject_is_looked_at_and_nothing_is_left(tmp_path: Path) -> None:
    ended = doctor("--run-dir", tmp_path / "runs" / "a", "--parameters", "1000000", "--json")
    assert ended.returncode == 0, ended.stderr
    found = by_subject(ended.stdout)
    assert set(found) == {
        *("python", "packages", "devices", "host memory", "shared memory", "memory kind", "memory lifetime"),
        *("open files", "locked memory", "address", "run directory", "file system", "operations", "direct I/O"),
        *("fsync", "bandwidth", "journal", "disk space", "inodes", "launcher", "service port", "rendezvous port"),
    }
    assert found["bandwidth"]["figures"]["commit_seconds"] > 0
    assert found["shared memory"]["figures"]["needed_bytes"] == 36_000_000
    assert list(tmp_path.iterdir()) == []


def test_for_people_it_is_a_line_each_and_warnings_are_no_failure() -> None:
    ended = doctor()
    assert ended.returncode == 0, ended.stderr
    *lines, counts = ended.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert any(line.startswith("warning  run directory    none is given: give --config") for line in lines)
    assert counts.endswith("0 errors")


def errors_on(tmp_path: Path, mount: str) -> dict[str, Any]:
    """What is found, by subject, where this command has mounted something at the path."""
    if (why := mount_obstacle()) is not None:
        pytest.skip(why)
    wanted = [sys.executable, "-m", "cpsr", "doctor", "--run-dir", str(tmp_path / "run"), "--json"]
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *wanted],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env=environment(),
    )
    assert ended.returncode == 1, ended.stderr
    return by_subject(ended.stdout)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    found = errors_on(tmp_path, f"mount -t tmpfs -o ro tmpfs {shlex.quote(str(tmp_path))}")["run directory"]
    assert found["level"] == "error"
    assert "Read-only file system" in found["measured"]


def test_a_full_disk_is_one_error_that_says_to_make_room(tmp_path: Path) -> None:
    place = shlex.quote(str(tmp_path))
    found = errors_on(tmp_path, f"mount -t tmpfs -o size=8m tmpfs {place} && head -c 8388608 /dev/zero > {place}/fill")
    assert [subject for subject, one in found.items() if one["level"] == "error"] == ["operations"]
    assert found["operations"]["advice"].startswith("make room")


def test_a_path_that_cannot_be_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = doctor("--run-dir", tmp_path / "file" / "run")
    assert ended.returncode == 1
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("error")]
    assert line.endswith("no folder can be there: choose another run_dir")


def test_ranks_that_cannot_meet_are_an_error() -> None:
    ended = doctor(RANK="0", WORLD_SIZE="2")
    assert ended.returncode == 1
    assert any(
        line.startswith("error    ranks            the launcher's variables do not say where the ranks meet")
        for line in ended.stdout.splitlines()
    )


@pytest.mark.slow
def test_the_job_is_read_from_where_users_keep_it(tmp_path: Path) -> None:
    own, deepspeed = tmp_path / "cpsr.yaml", tmp_path / "ds.json"
    own.write_text("run_dir: runs/a\nmemory: {buffers: 4}\n")
    deepspeed.write_text(json.dumps({"train_batch_size": 8, "cpsr": {"run_dir": "runs/b"}}))
    needs = needs_of(own, None, None, 1_000_000, 4)
    assert (needs.run_dir, needs.state_bytes) == (Path("runs/a"), 12_000_000)
    assert needs.buffer_bytes == 4 * 4 * 12_000_000
    assert needs_of(deepspeed, None, 5, None, None).run_dir == Path("runs/b")
    assert needs_of(own, Path("elsewhere"), None, None, None).run_dir == Path("elsewhere")


def test_what_contradicts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="either --state-bytes or --parameters"):
        needs_of(None, None, 5, 5, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="the launcher has started 4 here"):
        needs_of(None, None, None, None, 2)
    ended = doctor("--config", tmp_path / "absent.yaml")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


def test_under_torchrun_the_ranks_look_together(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node=2", "--max-restarts=2", "-m", "cpsr", "doctor", "--json"]
    with Launched(tmp_path, [*command, "--run-dir", "run", "--state-bytes", "1000000"]) as launched:
        assert launched.wait() == 0, launched.output
        found = by_subject(launched.output)
    for subject in ("run directory", "locks", "versions", "clocks", "grace"):
        assert found[subject]["level"] == "ok", found[subject]
    assert "all 2 ranks see each other's files" in found["run directory"]["measured"]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found["launcher"]["advice"]
    assert found["shared memory"]["figures"]["needed_bytes"] == 6_000_000


@pytest.mark.parametrize(
    ("launcher", "status"), [("cpsr run", REFUSED_STATUS), pytest.param("torchrun", 1, marks=pytest.mark.slow)]
)
def test_ranks_with_other_run_directories_are_an_error(tmp_path: Path, launcher: str, status: int) -> None:
    """Each on a machine of its own, by name."""
    script = f"CPSR_NODE=node-$RANK exec {shlex.quote(sys.executable)} -m cpsr doctor --json --run-dir run-$RANK"
    command = [*launcher.split(), "--nproc-per-node=2", "--no-python", "sh", "-c", script]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == status, launched.output
        line = next(line for line in launched.output.splitlines() if line.startswith("{"))
        started = sum(line.startswith("Started") for line in launched.lines())
    found = json.loads(line)
    assert found["machines"] == ["node-0", "node-1"]
    (shared,) = [one for one in found["findings"] if one["subject"] == "run directory"]
    assert shared["level"] == "error"
    assert str(tmp_path / "run-1") in shared["measured"]
    assert started == (launcher == "cpsr run")  # an error would be the same again


@pytest.mark.slow
def test_ranks_that_are_started_again_leave_the_first_report_as_the_last(tmp_path: Path) -> None:
    """torchrun starts them again after an error, at a store where they cannot meet."""
    script = f"exec {shlex.quote(sys.executable)} -m cpsr doctor --json --run-dir run-$RANK"
    command = ["torchrun", "--nproc-per-node=2", "--max-restarts=1", "--no-python", "sh", "-c", script]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == 1, launched.output
    found = by_subject(launched.output)  # of one report
    assert found["run directory"]["level"] == "error"
    assert {one["level"] for subject, one in found.items() if subject in ("versions", "clocks")} == {"ok"}
    _, after = launched.output.split('"findings"')
    assert after.count("see the first report") == 1
    assert "cannot meet" not in launched.output
    assert "in run_doctor" not in launched.output


@pytest.mark.slow
def test_a_rank_that_cannot_look_for_the_directory_is_named_and_no_other_waits(tmp_path: Path) -> None:
    name = "run-$(if [ $RANK = 1 ]; then printf %0300d 1; fi)"  # a longer name than file systems have
    script = f"exec {shlex.quote(sys.executable)} -m cpsr doctor --json --run-dir {name}"
    command = ["torchrun", "--nproc-per-node=2", "--no-python", "sh", "-c", script]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == 1, launched.output
    (line,) = [line for line in launched.output.splitlines() if line.startswith("{")]
    errors = [one for one in json.loads(line)["findings"] if one["level"] == "error"]
    assert [one["subject"] for one in errors] == ["run directory"] * 2
    assert any("File name too long" in one["measured"] and one["figures"] == {"rank": 1} for one in errors)
    assert any(one["figures"].get("blind_ranks") == [0, 1] for one in errors)


@pytest.mark.slow
def test_the_port_of_the_launcher_that_runs_is_not_looked_at(tmp_path: Path) -> None:
    with Launched(tmp_path, ["torchrun", "--nproc-per-node=1", "-m", "cpsr", "doctor", "--json"]) as launched:
        assert launched.wait() == 0, launched.output
    assert "rendezvous port" not in by_subject(launched.output)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    with Machines(2, tmp_path) as found:
        yield found


def on_machines(machines: Machines, directory: Path, run_dir: Path) -> tuple[list[int], str]:
    """Exit statuses of the launchers, and what they print."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=doctor"]
    options += [f"--rdzv-endpoint={machines.names[0]}:{PORT}"]
    command = [str(BIN / "cpsr"), "run", *options, "-m", "cpsr", "doctor", "--json", "--run-dir", str(run_dir)]
    logs = [directory / f"log-{number}" for number in range(2)]
    started = []
    for number, log in enumerate(logs):
        with log.open("w") as output:
            started.append(machines.start(number, command, output, environment(DS_ACCELERATOR="cpu")))
    statuses = [process.wait(LIMIT_SECONDS) for process in started]
    return statuses, "\n".join(log.read_text() for log in logs)


@pytest.mark.slow
def test_two_machines_see_one_directory_and_each_is_looked_at(machines: Machines, tmp_path: Path) -> None:
    statuses, output = on_machines(machines, tmp_path, tmp_path / "run")
    assert statuses == [0, 0], output
    line = next(line for line in output.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert found["machines"] == machines.names
    addresses = {one["figures"]["address"] for one in found["findings"] if one["subject"] == "address"}
    assert addresses == set(machines.addresses)
    assert by_subject(output)["locks"]["level"] == "ok"


@pytest.mark.slow
def test_one_path_that_is_another_directory_on_each_machine_is_an_error(machines: Machines, tmp_path: Path) -> None:
    statuses, output = on_machines(machines, tmp_path, Path(MEMORY) / "run")
    assert statuses == [REFUSED_STATUS] * 2, output
    found = by_subject(output)
    assert found["run directory"]["level"] == "error"
    assert found["run directory"]["figures"]["run_dirs"] == [f"{MEMORY}/run"]
    assert found["file system"]["level"] == "warning"
