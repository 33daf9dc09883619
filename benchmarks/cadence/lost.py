"""Jobs whose processes are all killed at a random moment, and what their restart has lost."""

import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.cadence.killed import HASHES
from cpsr.benchmarks.harness.ranks import RANKS, log_tail, run_ranks, start_job
from cpsr.checkpoint.progress import read_progress
from cpsr.errors import CPSRError

__all__ = ["CHECKPOINT_ITERATIONS", "Loss", "kill_and_restart"]

CHECKPOINT_ITERATIONS = 40
EARLIEST, LATEST = 45, 115  # of the kill, in iterations
ENDLESS_ITERATIONS = 4000
START_SECONDS = 300.0
JITTER_SECONDS = 0.03  # more than a step, so that kills fall everywhere in it


@dataclass(frozen=True)
class Loss:
    """One kill of all processes.

    Attributes:
        interval_iterations: between snapshots to host memory; None: there were none.
        failure_iteration: the last step that every rank had published.
        restored_iteration: where the restart went on.
        tier: where its state came from.
        exact: whether weights and moments of rank 0 are those that the killed life had there.
    """

    interval_iterations: int | None
    failure_iteration: int
    restored_iteration: int
    tier: str
    exact: bool

    @property
    def lost_iterations(self) -> int:
        """Iterations to be trained again."""
        return self.failure_iteration - self.restored_iteration

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"lost_iterations": self.lost_iterations}


def kill_and_restart(directory: Path, interval_iterations: int | None, seed: int) -> Loss:
    """Kill both ranks of a job with SIGKILL at once, and start it again.

    Args:
        directory: empty.
        interval_iterations: between snapshots to host memory; None: none.
        seed: of the moment.

    Raises:
        CPSRError: a life failed by itself, or did not start in time.
    """
    moment = random.Random(seed)  # noqa: S311 - a moment, not a secret
    run = directory / "run"
    options: dict[str, Any] = {"run": str(run), "checkpoint_iterations": CHECKPOINT_ITERATIONS}
    lives = [directory / "killed", directory / "restarted"]
    for life in lives:
        life.mkdir()
    processes = start_job(
        "cadence.killed", lives[0], interval_iterations=interval_iterations, iterations=ENDLESS_ITERATIONS, **options
    )
    try:
        _wait_for(run, moment.randint(EARLIEST, LATEST), processes, lives[0])
        time.sleep(moment.uniform(0.0, JITTER_SECONDS))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    (began,) = run_ranks("cadence.killed", lives[1], interval_iterations=interval_iterations, iterations=0, **options)
    known = dict(json.loads(line) for line in (lives[0] / HASHES).read_text().split("\n")[:-1])
    at = began["restored"]
    return Loss(
        interval_iterations, began["failure"] or at, at, "+".join(began["tiers"]), known.get(at) == began["hash"]
    )


def _wait_for(run: Path, iteration: int, processes: Any, life: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        progress = read_progress(run, RANKS) if run.exists() else None
        if progress is not None and not progress.missing and progress.iteration >= iteration:
            return
        if any(process.exitcode is not None for process in processes) or time.monotonic() > deadline:
            raise CPSRError(f"the job did not reach iteration {iteration}\n{log_tail(life)}")
        time.sleep(0.001)
