"""The ranks of `cpsr qualify` under `cpsr run`: started, followed by what they record, and ended without remains."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cpsr.demo.device import rank_environment
from cpsr.qualify.records import read_records
from cpsr.qualify.remains import clear, release_memory
from cpsr.ranks.link import EXPECTS_ERRORS

__all__ = ["WORKER", "follow"]

WORKER = "cpsr.qualify.worker"
RESTARTS = 1000  # failures without a new iteration: each check that breaks the group is one
POLL_SECONDS = 0.2
# Longer than the deadline of any check: only a launcher that hangs itself records nothing for so long.
SILENCE_SECONDS = 900.0
LEAVE_SECONDS = 20.0  # after SIGTERM


def follow(console: Console, folder: Path, log: Path, device: str, ranks: int, only: str, worker: str = WORKER) -> None:
    """Run the checks to their end, or until they are interrupted; shows a progress bar on a terminal.

    Args:
        console: for the progress bar.
        folder: work folder, which exists.
        log: takes the ranks' output.
        device: `cpu` or `cuda`.
        ranks: of the job.
        only: text that names of checks contain.
        worker: module that is a rank.
    """
    command = [sys.executable, "-m", "cpsr", "run", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}"]
    command += ["--monitor-interval=0.1", "-m", worker, str(folder), f"--device={device}", f"--only={only}"]
    # After a check that fails, hangs or kills, the ranks start again with the next one.
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(LEAVE_SECONDS / 2)), EXPECTS_ERRORS: "1"}
    environment = {**os.environ, **rank_environment(device), **variables}
    clear(folder)
    with log.open("wb") as file, _interrupted_by_sigterm():
        job = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)  # noqa: S603
        try:
            _watch(console, job, folder)
        finally:
            _end(job)
            release_memory(folder)


def _watch(console: Console, job: "subprocess.Popen[bytes]", folder: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count, heard = 0, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting the ranks", total=None)
        while job.poll() is None and time.monotonic() - heard < SILENCE_SECONDS:
            lines = read_records(folder)
            if len(lines) > count:
                count, heard = len(lines), time.monotonic()
                total = next((len(line["trials"]) for line in lines if line["event"] == "planned"), None)
                ended = {line["trial"] for line in lines if line["event"] == "ended" and line["rank"] == 0}
                newest = next((line["trial"] for line in reversed(lines) if line["event"] == "began"), "")
                progress.update(task, total=total, completed=len(ended), description=newest)
            time.sleep(POLL_SECONDS)


def _end(job: "subprocess.Popen[bytes]") -> None:
    """Ask the launcher to leave with its ranks, and kill what is left of them."""
    processes = _family(job.pid)
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            processes += _family(job.pid)
            job.kill()
            job.wait()
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, LEAVE_SECONDS)


def _family(pid: int) -> list[psutil.Process]:
    """The processes that this one has started, and those that they have."""
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: the ranks must be ended in any case."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
