"""Whatever the moment at which a copy or a fetch is SIGKILLed, what is committed on both sides is there and right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WRITES = {"fsync", "mkdir", "open", "replace", "rmdir", "sendfile", "unlink", "write"}


@pytest.mark.slow  # of campaigns like this one each change runs those of tests/faults
@pytest.mark.parametrize(("what", "steps", "least"), [("copy", WRITES, 75), ("fetch", WRITES | {"rename"}, 75)])
def test_killed_at_every_file_system_step(tmp_path: Path, what: str, steps: set[str], least: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.remote.kill_driver", what, str(tmp_path), "1"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kills, *met = done.stdout.split()
    assert set(met) == steps  # all primitives were met: the injection really is in the way of the code under test
    assert int(kills) > least
