"""Start the demo's job with `cpsr run`, watch it, and kill one of its ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.progress import read_progress
from cpsr.demo.device import CPU
from cpsr.demo.ranks import rank_environment
from cpsr.errors import CPSRError

__all__ = ["Kill", "iterations_reached", "train"]

RANKS = 2
RESTARTS = 1
POLL_SECONDS = 0.002  # a small part of a step, so that the rank dies in the step that was asked for
JOB_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Kill:
    """What was done to the job: `rank` got SIGKILL when its counter stood at `iteration`, at `time` (Unix seconds)."""

    rank: int
    iteration: int
    time: float


def train(
    run_dir: Path,
    iterations: int,
    failure_iteration: int,
    kill_rank: int | None,
    on_progress: Callable[[int], None],
    device: str = CPU,
) -> Kill | None:
    """Run the job to its end on `cpu` or `cuda`; kill `kill_rank` once it has finished `failure_iteration` steps.

    Raises:
        CPSRError: the job ended with an error; the message names its log.
    """
    log_path = run_dir / "job.log"
    with log_path.open("w") as log:
        environment = {**os.environ, **rank_environment(device)}
        command = _command(run_dir, iterations, failure_iteration)
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            killed = _watch(job, run_dir, failure_iteration, kill_rank, on_progress)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
                job.wait()
    if job.returncode != 0:
        raise CPSRError(f"the demo's job ended with status {job.returncode}; its output is in {log_path}")
    if kill_rank is not None and killed is None:
        raise CPSRError(f"the demo's job finished before rank {kill_rank} could be killed; its output is in {log_path}")
    return killed


def _watch(
    job: "subprocess.Popen[bytes]",
    run_dir: Path,
    failure_iteration: int,
    kill_rank: int | None,
    on_progress: Callable[[int], None],
) -> Kill | None:
    deadline = time.monotonic() + JOB_TIMEOUT_SECONDS
    killed: Kill | None = None
    while job.poll() is None:
        progress = read_progress(run_dir, RANKS)
        iteration = 0 if progress is None else progress.iteration
        if kill_rank is not None and killed is None and iteration >= failure_iteration:
            os.kill(int((run_dir / f"pid-{kill_rank}").read_text()), signal.SIGKILL)
            killed = Kill(kill_rank, iteration, time.time())
        on_progress(iteration)
        if time.monotonic() > deadline:
            raise CPSRError(f"the demo's job is still running after {JOB_TIMEOUT_SECONDS} s; see {run_dir / 'job.log'}")
        time.sleep(POLL_SECONDS)
    on_progress(iterations_reached(run_dir))
    return killed


def iterations_reached(run_dir: Path) -> int:
    """Iterations that every rank has finished."""
    progress = read_progress(run_dir, RANKS)
    return 0 if progress is None else progress.iteration


def _command(run_dir: Path, iterations: int, failure_iteration: int) -> list[str]:
    launcher = [sys.executable, "-m", "cpsr", "run", f"--nproc-per-node={RANKS}", f"--max-restarts={RESTARTS}"]
    job = ["-m", "cpsr.demo.worker", f"--run-dir={run_dir}", f"--iterations={iterations}"]
    return [*launcher, *job, f"--failure-iteration={failure_iteration}"]
