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


def example(name: str, folder: Path) -> str:
    """Run an example to its end; returns what it prints."""
    ended = _run(name, folder)
    assert ended.returncode == 0, ended.stdout[-3000:]
    return ended.stdout


def killed_example(name: str, folder: Path, kill_at: int) -> None:
    """Run an example that kills itself after a step."""
    ended = _run(name, folder, "--kill-at", str(kill_at))
    assert ended.returncode == -signal.SIGKILL, ended.stdout[-3000:]


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
