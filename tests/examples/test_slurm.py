"""The batch script, run as Slurm runs it: a signal to each process of the step, and a next turn after the requeue."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import BIN, Launched

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
NODES = 2
LAST = 1200
FIRST_PORT = 20000  # of the script's ports, by the number of the job

# Stand in for Slurm's commands: a launcher for each node, all on this machine, and the highest of their statuses.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do "$@" & pids+=($!); done
echo "${pids[@]}" > step
highest=0
for pid in "${pids[@]}"; do
    wait "$pid"; status=$?
    ((status > highest)) && highest=$status
done
exit $highest
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) for ((node = 0; node < SLURM_NNODES; node++)); do echo localhost; done ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def turn(folder: Path, job: int, *options: str) -> Launched:
    """Start the script as Slurm would in a job of two nodes."""
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_NNODES": str(NODES),
        "SLURM_CPUS_PER_TASK": "1",
    }
    train = [str(ROOT / "examples" / "train.py"), "--run-dir", "run", "--iterations", str(LAST), *options]
    return Launched(folder, ["/bin/bash", str(SCRIPT), *train], environment)


def signal_step(folder: Path) -> None:
    """SIGTERM to each process of the step, launchers and ranks alike; none to the script or `srun`."""
    for pid in (folder / "step").read_text().split():
        launcher = psutil.Process(int(pid))
        for process in [*launcher.children(recursive=True), launcher]:
            process.send_signal(signal.SIGTERM)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def job() -> int:
    """A number whose port is free."""
    for number in range(os.getpid() % 5000, 10000):
        with socket.socket() as one:
            if one.connect_ex(("localhost", FIRST_PORT + number)):
                return number
    raise AssertionError("no port is free")


def last_loss(launched: Launched) -> str:
    found: list[str] = re.findall(rf"^iteration {LAST}: loss ([0-9.]+)$", launched.output, re.MULTILINE)
    return found[-1]


@pytest.mark.slow
def test_a_job_whose_time_ends_commits_and_its_next_turn_goes_on(folder: Path, job: int) -> None:
    with turn(folder, job) as first:
        first.until(lambda launched: "iteration 200:" in launched.output)
        signal_step(folder)
        assert first.wait() == 143
    assert (folder / "requeued").read_text() == f"{job}\n"
    assert first.output.count("The job left after SIGTERM") == NODES

    with turn(folder, job) as second:
        assert second.wait() == 0
        back = re.search(r"All ranks continue at iteration (\d+), exact from checkpoint (\d+)", second.output)
    assert back is not None, second.output[-3000:]
    assert 200 <= int(back[1]) == int(back[2]) < LAST
    assert (folder / "requeued").read_text() == f"{job}\n"  # who has ended asks for no further turn

    shutil.move(folder / "run", folder / "interrupted")
    with turn(folder, job) as whole:
        assert whole.wait() == 0
    assert last_loss(second) == last_loss(whole)


def test_the_script_asks_slurm_for_what_the_page_says() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(options)
    assert any(re.fullmatch(r"--signal=TERM@\d+", one) for one in options)  # to the steps: not to the script (`B:`)
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_shellcheck_finds_nothing() -> None:
    checker = shutil.which("shellcheck", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    found = subprocess.run([checker, SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
