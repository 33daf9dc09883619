"""Whatever the moment at which a process is SIGKILLed, the newest committed checkpoint is there and right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_driver(*arguments: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.kill_driver", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


@pytest.mark.parametrize("one_of", [pytest.param(1, marks=pytest.mark.slow), 3])  # of the steps of each kind
def test_killed_at_every_file_system_step_of_saves_and_retention(tmp_path: Path, one_of: int) -> None:
    kills, *steps = run_driver("steps", str(tmp_path), str(one_of))
    # All primitives were met, so the injection really is in the way of the code under test.
    expected = {"chmod", "fsync", "link", "mkdir", "open", "rename", "replace", "rmdir", "unlink", "write"}
    assert set(steps) == expected
    assert int(kills) > 300 / one_of


@pytest.mark.parametrize("seed", [1])
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    kills, *endings = run_driver("random", str(tmp_path), str(seed), "8")
    assert int(kills) == 8
    assert "killed" in endings
