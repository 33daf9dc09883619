"""The scripts for a machine with a GPU still run, on the processor: they move with the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run(tmp_path: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path / "out")},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_first_run_lists_its_steps(tmp_path: Path) -> None:
    assert run(tmp_path, "first-run", "--list").startswith("check")


@pytest.mark.slow
def test_check(tmp_path: Path) -> None:
    assert run(tmp_path, "check", "--device", "cpu").endswith("check: 0 failed\n")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_killed_job_comes_back_in_every_way(tmp_path: Path, stage: str) -> None:
    told = run(tmp_path, "job", "--device", "cpu", "--size", "tiny", "--zero", stage, "--folder", str(tmp_path / "job"))
    assert "job: 4 of 4 cases" in told


def test_the_tests_of_first_run_are_there(tmp_path: Path) -> None:
    listed = next(line for line in run(tmp_path, "first-run", "--list").splitlines() if line.startswith("tests "))
    listed = listed.replace("{{", "{").replace("}}", "}")  # as they are formatted
    expanded = subprocess.run(["bash", "-c", f"echo {listed}"], text=True, capture_output=True, check=True).stdout
    named = [word for word in expanded.split() if word.endswith(".py")]
    root = FOLDER.parent.parent
    assert len(named) > 10
    assert [one for one in named if not (root / one).exists()] == []
