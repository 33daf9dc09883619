"""The demo: the same job twice, once with a killed rank and once left alone, and what the failure cost."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpsr.checkpoint.progress import read_progress
from cpsr.demo.device import CPU, rank_environment
from cpsr.demo.report import Kill, failure_iteration, measure, table, write_plot
from cpsr.errors import ConfigError, CPSRError
from cpsr.launch.process import launched
from cpsr.tables import print_table

__all__ = ["run_demo"]

RANKS = 2
KILLED_RANK = 1
DEFAULT_ITERATIONS = 900
INTERVAL_ITERATIONS = 50
# The failure: past the middle of training, most of an interval after a checkpoint, so that recomputing would be dear.
FAILURE_FRACTION = 0.55
INTERVAL_FRACTION = 0.84
POLL_SECONDS = 0.002  # a small part of a step, so that the rank dies in the step that was asked for
JOB_TIMEOUT_SECONDS = 1800


def run_demo(run_dir: Path, iterations: int = DEFAULT_ITERATIONS, device: str = CPU) -> None:
    """Train, kill, recover, compare, and print and write what it cost.

    Args:
        run_dir: holds the runs `killed` and `fault-free` (replaced), `loss.png` and `result.json`.
        iterations: length of each run, in optimizer steps.
        device: `cpu`, or `cuda`, where the ranks share a GPU if there are fewer than two.

    Raises:
        CPSRError: a job failed; the message names its log.
        ConfigError: the run is too short for a failure after several checkpoints and a measurement behind it.
    """
    shortest = 8 * INTERVAL_ITERATIONS
    if iterations < shortest:
        raise ConfigError(f"the demo needs at least {shortest} iterations, not {iterations}")
    console = Console()
    columns = (TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    intervals = int(iterations * FAILURE_FRACTION) // INTERVAL_ITERATIONS
    planned = int((intervals - 1 + INTERVAL_FRACTION) * INTERVAL_ITERATIONS)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"run with rank {KILLED_RANK} killed at {planned}", total=iterations)
        killed = _Job(run_dir / "killed", iterations, planned, lambda at: progress.update(task, completed=at))
        kill = killed.train(device, kill_rank=KILLED_RANK)
        assert kill is not None
        other = progress.add_task("the same run, left alone", total=iterations)
        failed_at = failure_iteration(killed.run_dir)
        alone = _Job(run_dir / "fault-free", iterations, failed_at, lambda at: progress.update(other, completed=at))
        alone.train(device)
    result = measure(alone.run_dir, killed.run_dir, kill, device)
    (run_dir / "result.json").write_text(json.dumps(result.to_json(), indent=2))
    write_plot(result, run_dir / "loss.png")
    print_table(console, table(result))
    console.print(f"plot: {run_dir / 'loss.png'}   everything: {run_dir / 'result.json'}")


class _Job:
    """One run of the demo's job under `cpsr run`.

    Args:
        run_dir: replaced.
        iterations: that it trains.
        failure_iteration: near which it evaluates more often, and where a rank is killed.
        on_progress: called with the iterations that all ranks have finished.
    """

    def __init__(
        self, run_dir: Path, iterations: int, failure_iteration: int, on_progress: Callable[[int], None]
    ) -> None:
        self.run_dir, self._failure_iteration, self._on_progress = run_dir, failure_iteration, on_progress
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        checkpoint = {"interval_iterations": INTERVAL_ITERATIONS}
        config = {"run_dir": str(run_dir), "mode": "predict", "checkpoint": checkpoint}
        (run_dir / "cpsr.yaml").write_text(yaml.safe_dump(config))
        launcher = [f"--nproc-per-node={RANKS}", "--max-restarts=1"]
        job = ["-m", "cpsr.demo.job", f"--run-dir={run_dir}", f"--iterations={iterations}"]
        self._arguments = [*launcher, *job, f"--failure-iteration={failure_iteration}"]

    def train(self, device: str, kill_rank: int | None = None) -> Kill | None:
        """Run it to its end on `cpu` or `cuda`; kill a rank once all have finished `failure_iteration` steps.

        Raises:
            CPSRError: the job ended with an error; the message names its log.
        """
        log = self.run_dir / "job.log"
        with launched(self._arguments, log, rank_environment(device)) as job:
            killed = self._watch(job, kill_rank)
        if job.returncode != 0:
            raise CPSRError(f"the demo's job ended with status {job.returncode}; its output is in {log}")
        if kill_rank is not None and killed is None:
            raise CPSRError(f"the demo's job finished before rank {kill_rank} could be killed; see {log}")
        return killed

    def _watch(self, job: "subprocess.Popen[bytes]", kill_rank: int | None) -> Kill | None:
        deadline, killed = time.monotonic() + JOB_TIMEOUT_SECONDS, None
        while job.poll() is None:
            iteration = self._iteration()
            if kill_rank is not None and killed is None and iteration >= self._failure_iteration:
                os.kill(int((self.run_dir / f"pid-{kill_rank}").read_text()), signal.SIGKILL)
                killed = Kill(kill_rank, iteration, time.time())
            self._on_progress(iteration)
            if time.monotonic() > deadline:
                raise CPSRError(f"the demo's job still runs after {JOB_TIMEOUT_SECONDS} s; see {self.run_dir}/job.log")
            time.sleep(POLL_SECONDS)
        self._on_progress(self._iteration())
        return killed

    def _iteration(self) -> int:
        progress = read_progress(self.run_dir, RANKS)
        return 0 if progress is None else progress.iteration
