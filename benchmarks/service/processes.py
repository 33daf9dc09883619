"""The service and the training job, each in a process of its own, and what the service's memory is."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.harness.ranks import end_ranks, log_tail, start_job
from cpsr.benchmarks.service.clients import Answers, poll
from cpsr.benchmarks.service.result import Result, summarise
from cpsr.errors import CPSRError
from cpsr.journal import JournalReader

__all__ = ["measure", "peak_resident_bytes"]

START_SECONDS = 300.0  # reading ten million steps once, beside others, included
END_SECONDS = 60.0
LOOK_SECONDS = 0.2
WARM_UP_SECONDS = 5.0  # the first answers of a process import and connect


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
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def training(run_dir: Path) -> Iterator[None]:
    """The training job, which has recorded its first steps; `run_dir` is called `run`, as of every job.

    Raises:
        CPSRError: it ended, or recorded nothing in time; the message ends with its last lines.
    """
    directory, before = run_dir.parent, _steps(run_dir)
    processes = start_job("service.job", directory, 1)
    try:
        deadline = time.monotonic() + START_SECONDS
        while _steps(run_dir) == before:
            if processes[0].exitcode is not None or time.monotonic() > deadline:
                raise CPSRError(f"the training job recorded no step\n{log_tail(directory)}")
            time.sleep(LOOK_SECONDS)
        yield
        if processes[0].exitcode is not None:
            raise CPSRError(f"the training job ended meanwhile\n{log_tail(directory)}")
    finally:
        end_ranks(processes)


def _newest_iteration(run_dir: Path) -> int:
    """The iteration that was recorded last."""
    with JournalReader(run_dir / "journal.db") as reader:
        return reader.recent_steps(1)[0].iteration


def peak_resident_bytes(pid: int) -> int:
    """The most memory that a process has had so far; where the system does not report it, what it has now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return int(psutil.Process(pid).memory_info().rss)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _processor_seconds(pid: int) -> float:
    """Processor time that a process has taken so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _steps(run_dir: Path) -> tuple[int, int]:
    """Changes with every step that is recorded, in any life."""
    with JournalReader(run_dir / "journal.db") as reader:
        step = reader.recent_steps(1)[0]
        return step.life, step.iteration


def measure(name: str, run_dir: Path, step_rows: int, clients: int, seconds: float) -> tuple[Answers, Result]:
    """Ask the service over the journal in `run_dir`, beside training.

    Raises:
        CPSRError: the job or the service ended, or no request was answered.
    """
    journal_bytes = (run_dir / "journal.db").stat().st_size
    with training(run_dir), serving(run_dir) as (url, pid):
        in_own_process(poll, url, clients, WARM_UP_SECONDS)
        began, used = _newest_iteration(run_dir), _processor_seconds(pid)
        answers = in_own_process(poll, url, clients, seconds)
        trained, used = _newest_iteration(run_dir) - began, _processor_seconds(pid) - used
        service_bytes = peak_resident_bytes(pid)
    if not answers.seconds:
        raise CPSRError(f"none of {answers.refused} requests to {url} was answered with 200")
    return answers, summarise(
        name,
        answers,
        step_rows=step_rows,
        journal_bytes=journal_bytes,
        processor_seconds=used,
        service_bytes=service_bytes,
        trained_iterations=trained,
    )
