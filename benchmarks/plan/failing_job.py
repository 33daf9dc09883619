"""The demo's job with the planner choosing, killed at given amounts of work and restarted until it is through."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from cpsr.checkpoint.progress import read_progress
from cpsr.demo.device import CPU, rank_environment
from cpsr.demo.main import POLL_SECONDS, RANKS
from cpsr.errors import CPSRError

__all__ = ["FailingJob", "Failure", "JobRecord", "Kill", "LifeStart", "follow"]

RECORD = "record.json"
LEAVE_SECONDS = 60.0  # after SIGTERM: a last checkpoint, and the end of the processes
JOB_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Failure:
    """Kill `rank` when the job has trained `work` iterations, repeated ones counted again."""

    rank: int
    work: int


@dataclass(frozen=True)
class FailingJob:
    """One job.

    Attributes:
        seed: of the weights, the data, and the failures.
        mode: as configured.
        stop_iteration: where the job is asked to leave.
        schedule_iterations: length of the training that its learning rate is meant for.
        validate_from_iteration: losses are taken often from here on.
        failures: ascending in work.
        settings: sections of the configuration beside `run_dir` and `mode`.
    """

    seed: int
    mode: Literal["exact", "auto"]
    stop_iteration: int
    schedule_iterations: int
    validate_from_iteration: int
    failures: tuple[Failure, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """What was done: SIGKILL to `rank` after `work` iterations, and how long until the next one was finished."""

    rank: int
    work: int
    iteration: int
    restart_seconds: float


@dataclass(frozen=True)
class LifeStart:
    """Where a life began: iterations trained before it by all lives, and the iteration that it was restored to."""

    work: int
    iteration: int


@dataclass(frozen=True)
class JobRecord:
    """A job that is through.

    Attributes:
        kills: one a failure.
        lives: one more than kills.
        work: iterations trained, repeated ones counted again.
        iteration: where the job stands.
    """

    kills: tuple[Kill, ...]
    lives: tuple[LifeStart, ...]
    work: int
    iteration: int

    @property
    def repeated(self) -> int:
        """Iterations that were trained more than once."""
        return self.work - self.iteration


def follow(job: FailingJob, run_dir: Path, on_progress: Callable[[int], None]) -> JobRecord:
    """Run the job, or read what is kept of it; `run_dir` is emptied where it holds another or half a job.

    Args:
        job: what to run.
        run_dir: of the job.
        on_progress: called with the job's iteration.

    Raises:
        CPSRError: the job ended by itself, or hangs; the message names its log.
    """
    path = run_dir / RECORD
    described = json.loads(json.dumps(asdict(job)))
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["job"] == described:
            return _record(kept)
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    config = {"run_dir": str(run_dir), "mode": job.mode, **job.settings}
    (run_dir / "cpsr.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    record = _run(job, run_dir, on_progress)
    path.write_text(json.dumps({"job": described, **asdict(record)}, indent=1), encoding="utf-8")
    return record


def _record(kept: dict[str, Any]) -> JobRecord:
    kills = tuple(Kill(**kill) for kill in kept["kills"])
    return JobRecord(kills, tuple(LifeStart(**life) for life in kept["lives"]), kept["work"], kept["iteration"])


def _run(job: FailingJob, run_dir: Path, on_progress: Callable[[int], None]) -> JobRecord:
    log_path = run_dir / "job.log"
    with log_path.open("w", encoding="utf-8") as log:
        # As `cpsr run` does: new ranks must not find the dead group's store.
        variables = {**os.environ, **rank_environment(CPU), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = subprocess.Popen(_command(job, run_dir), stdout=log, stderr=log, env=variables)
        try:
            course = _Course(run_dir, job.failures)
            deadline = time.monotonic() + JOB_TIMEOUT_SECONDS
            while course.iteration < job.stop_iteration or course.restarting:
                course.look()
                on_progress(course.iteration)
                if process.poll() is not None:
                    raise CPSRError(f"the job ended by itself, with status {process.returncode}; see {log_path}")
                if time.monotonic() > deadline:
                    raise CPSRError(
                        f"the job was ended after {JOB_TIMEOUT_SECONDS:g} s, since it hangs; see {log_path}"
                    )
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(LEAVE_SECONDS)
    course.advance()
    if len(course.kills) < len(job.failures):
        raise CPSRError(f"the job was through before it had failed {len(job.failures)} times; see {log_path}")
    return JobRecord(tuple(course.kills), tuple(course.lives), course.work, course.iteration)


class _Course:
    """Follows a job by its ranks' counters, and kills them when it is time."""

    def __init__(self, run_dir: Path, failures: Sequence[Failure]) -> None:
        self._run_dir = run_dir
        self._failures = failures
        self._pids: list[str] | None = None  # of the life that was killed last
        self._killed: tuple[Failure, int, int, float] | None = None
        self.restarting = True
        self.kills: list[Kill] = []
        self.lives: list[LifeStart] = []
        self.work = 0
        self.iteration = 0

    def advance(self) -> None:
        """Take in how far the slowest rank is; going back adds no work."""
        progress = read_progress(self._run_dir, RANKS)
        if progress is not None:
            self.work += max(0, progress.iteration - self.iteration)
            self.iteration = progress.iteration

    def look(self) -> None:
        """See how far the job is, whether it is up again, and whether a failure is due."""
        self.advance()
        if self.restarting:
            self._see_start()
        elif self._killed is not None:
            self._see_first_step()
        elif len(self.kills) < len(self._failures) and self.work >= self._failures[len(self.kills)].work:
            self._kill(self._failures[len(self.kills)])

    def _kill(self, failure: Failure) -> None:
        self._pids = self._written_pids()
        os.kill(int(self._pids[failure.rank]), signal.SIGKILL)
        self._killed = failure, self.work, self.iteration, time.time()
        self.restarting = True

    def _see_start(self) -> None:
        """Each rank leaves its process id once it has restored its state."""
        pids = self._written_pids()
        if all(pids) and (self._pids is None or all(new != old for new, old in zip(pids, self._pids, strict=True))):
            self.lives.append(LifeStart(self.work, self.iteration))
            self.restarting = False

    def _see_first_step(self) -> None:
        assert self._killed is not None
        if self.iteration > self.lives[-1].iteration:
            failure, work, iteration, at = self._killed
            self.kills.append(Kill(failure.rank, work, iteration, time.time() - at))
            self._killed = None

    def _written_pids(self) -> list[str]:
        paths = [self._run_dir / f"pid-{rank}" for rank in range(RANKS)]
        return [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths]


def _command(job: FailingJob, run_dir: Path) -> list[str]:
    agent = [sys.executable, "-m", "cpsr.benchmarks.plan.agent", str(len(job.failures))]
    trained = [f"--run-dir={run_dir}", f"--iterations={job.schedule_iterations}", f"--seed={job.seed}"]
    return [*agent, *trained, f"--failure-iteration={job.validate_from_iteration}"]
