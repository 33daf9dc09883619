"""The service and the training job, each in a process of its own, and what the service's memory is."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cpsr.errors import CPSRError
from cpsr.journal import JournalReader

__all__ = ["newest_iteration", "peak_resident_bytes", "processor_seconds", "serving", "training"]

START_SECONDS = 300.0  # reading ten million steps once, beside others, included
END_SECONDS = 60.0
LOOK_SECONDS = 0.2
LOG_LINES = 15


@contextmanager
def serving(run_dir: Path) -> Iterator[tuple[str, int]]:
    """`cpsr serve` over a run; its address and its process.

    Raises:
        CPSRError: it ended instead.
    """
    command = [sys.executable, "-m", "cpsr", "serve", "--run-dir", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " on http" not in line:
                raise CPSRError(f"the service did not start, its first line is {line!r}; its log is above")
            yield line.split(" on ")[1].strip(), process.pid
        finally:
            _end(process)


@contextmanager
def training(run_dir: Path, full_steps: int | None) -> Iterator[None]:
    """The training job, which has recorded its first steps.

    Raises:
        CPSRError: it ended, or recorded nothing in time; the message ends with its last lines.
    """
    before, log_path = _steps(run_dir), run_dir / "job.log"
    command = [sys.executable, "-m", "cpsr.benchmarks.service.job", "--run-dir", str(run_dir)]
    command += [] if full_steps is None else ["--full-steps", str(full_steps)]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + START_SECONDS
            while _steps(run_dir) == before:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CPSRError(f"the training job recorded no step\n{_tail(log_path)}")
                time.sleep(LOOK_SECONDS)
            yield
            if process.poll() is not None:
                raise CPSRError(f"the training job ended meanwhile\n{_tail(log_path)}")
        finally:
            _end(process)


def newest_iteration(run_dir: Path) -> int:
    """The iteration that was recorded last."""
    with JournalReader(run_dir / "journal.db") as reader:
        return reader.recent_steps(1)[0].iteration


def peak_resident_bytes(pid: int) -> int:
    """The most memory that a process has had so far; where the system does not tell, what it has now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return int(psutil.Process(pid).memory_info().rss)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _steps(run_dir: Path) -> tuple[int, int]:
    """Changes with every step that is recorded, in any life."""
    with JournalReader(run_dir / "journal.db") as reader:
        step = reader.recent_steps(1)[0]
        return step.life, step.iteration


def _end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
