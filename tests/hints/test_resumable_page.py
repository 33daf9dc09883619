"""The program of docs/resumable.md, as it is printed, and with a kill."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "resumable.md"
PROGRAM = re.compile(r"```python\n# evaluate\.py\n(.*?)```", re.DOTALL)
PATIENCE_SECONDS = 120.0


def run(directory: Path, text: str) -> "subprocess.Popen[str]":
    directory.mkdir(exist_ok=True)
    (directory / "evaluate.py").write_text(text)
    return subprocess.Popen([sys.executable, "evaluate.py"], cwd=directory, stdout=subprocess.PIPE, text=True)


def output(process: "subprocess.Popen[str]") -> str:
    found, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return found


def test_the_program_prints_the_same_after_a_kill(tmp_path: Path) -> None:
    (text,) = PROGRAM.findall(PAGE.read_text(encoding="utf-8"))
    wanted = output(run(tmp_path / "as_printed", text))
    assert -10 < float(wanted) < 10
    # With a checkpoint at every hint, the kill comes in the middle of a call that would take long.
    eager = text.replace("allowance=0.05", "allowance=float('inf')")
    assert eager != text
    process = run(tmp_path / "killed", eager)
    deadline = time.monotonic() + PATIENCE_SECONDS
    checkpoints = tmp_path / "killed" / "runs" / "evaluate" / "checkpoints"
    while not any(path.name >= "step-0000000015" for path in checkpoints.glob("step-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    # The decorator's allowance is no part of the code: the rest may be quick.
    assert output(run(tmp_path / "killed", text)) == wanted
