"""Lives of a job that end early, and the examples as processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # for what takes seconds


class Stopped(Exception):  # noqa: N818 - a failure of the machine, not an error of the code
    """What ends a life in the middle of the loop."""


def killed_and_back(name: str, folder: Path) -> None:
    """Run an example without a failure (`whole`), and in two lives (`killed`), which end with the same words."""
    whole = _ended(_run(name, folder / "whole"), 0)
    _ended(_run(name, folder / "killed", "--kill-at", "17"), -signal.SIGKILL)
    back = _ended(_run(name, folder / "killed"), 0)
    assert "Training continues at iteration" in back
    assert back.splitlines()[-1] == whole.splitlines()[-1]


def _ended(process: subprocess.CompletedProcess[str], status: int) -> str:
    """What it has printed."""
    assert process.returncode == status, process.stdout[-3000:]
    return process.stdout


def _run(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, "--folder", folder, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
