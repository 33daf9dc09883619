"""Launches the job of `worker.py`, rank by rank, and reads what it left."""

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.checkpoint.manifest import step_name
from tests.rank_processes import become_rank, start_ranks

RANKS = 2
INTERVAL = 4
ITERATIONS = 30
# What a life's result says of how it began, emptied: `{**result, **OF_THE_START}` is what it ended with.
OF_THE_START: dict[str, Any] = {"batches": [], "started": {}, "state_at_start": ""}
LAUNCH_SECONDS = 400.0  # for what takes seconds; the machine may be busy
SURVIVOR_SECONDS = 15.0  # as torchrun does, the others are ended soon after one has died


@dataclass
class Ended:
    """How one life of the job ended, by rank."""

    statuses: list[int | None]
    results: list[dict[str, Any] | None]
    output: list[str] = field(default_factory=list)

    def result(self, rank: int = 0) -> dict[str, Any]:
        found = self.results[rank]
        assert found is not None, self.output[rank][-3000:]
        return found

    def require_rest_of(self, whole: "Ended", begun_at: int, micro_batches: int = 1) -> None:
        """It began there and went on, bit for bit, as the run that nothing happened to; all ranks ended well."""
        assert set(self.statuses) == {0}, self.output[0][-3000:]
        for rank in range(len(self.statuses)):
            mine, expected = self.result(rank), whole.result(rank)
            assert mine["started"]["iteration"] == begun_at
            assert mine["batches"] == expected["batches"][begun_at * micro_batches :]
            assert {**mine, **OF_THE_START} == {**expected, **OF_THE_START}


@dataclass(frozen=True)
class LifeOptions:
    """What every job that the tests launch is given; each job has more.

    Attributes:
        config: CPSR's configuration.
        result: where the result goes, `.<rank>.json` appended.
        iterations: end of the run.
        fault: what happens to a rank, in words of the job's own.
        committed: a commit record that must exist before a rank kills itself, so that every run restores the same.
    """

    config: dict[str, Any]
    result: Path
    iterations: int
    fault: str = ""
    committed: Path | None = None

    @property
    def meeting(self) -> str:
        """The file through which the ranks find each other."""
        return f"file://{self.result.with_suffix('.ranks')}"

    def leave(self, rank: int, found: Any) -> None:
        """Leave what a rank has to say at its end."""
        self.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))


class Job:
    """A run directory and the lives of its job."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.run_dir = directory / "run"
        self.lives = 0

    def launch(
        self,
        mode: str = "exact",
        fault: str = "",
        *,
        ranks: int = RANKS,
        committed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        seconds: float = LAUNCH_SECONDS,
        survivor_seconds: float = SURVIVOR_SECONDS,
        **options: Any,
    ) -> Ended:
        """Run one life to its end, however it ends.

        Args:
            mode: CPSR's.
            fault: see `worker.Options`, as for `options`.
            ranks: processes.
            committed: a rank that kills itself waits for this checkpoint.
            settings: more of CPSR's configuration; sections are merged.
            seconds: how long the life may take.
            survivor_seconds: how long the others may take to end once one has ended with an error.
        """
        self.lives += 1
        config: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "mode": mode,
            # What a killed life left in memory would hide what its disk holds: tests of that ask for it.
            "checkpoint": {
                "interval_iterations": INTERVAL,
                "shared_memory": False,
            },
        }
        for name, value in (settings or {}).items():
            config[name] = {**config.get(name, {}), **value} if isinstance(value, Mapping) else value
        record = None if committed is None else commit_file(self.run_dir / "checkpoints" / step_name(committed))
        result = self.directory / f"life-{self.lives}"
        options = {"iterations": ITERATIONS, "fault": fault, "committed": record} | options
        processes = start_ranks(_rank, {"config": config, "result": result} | options, ranks)
        _wait(processes, seconds, survivor_seconds)
        files = [result.with_suffix(f".{rank}.json") for rank in range(ranks)]
        results = [json.loads(file.read_text()) if file.exists() else None for file in files]
        output = [result.with_suffix(f".{rank}.log").read_text() for rank in range(ranks)]
        return Ended([process.exitcode for process in processes], results, output)


def _wait(processes: Sequence[BaseProcess], seconds: float, survivor_seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + survivor_seconds)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()


def _rank(options: dict[str, Any], rank: int, ranks: int) -> None:
    """What a rank's process runs."""
    result: Path = options["result"]
    nodes = options.pop("nodes", None)
    memory = None if nodes is None else result.parent / "memory" / nodes[rank]
    os.setpgid(0, 0)  # as under a launcher
    multiprocessing.current_process().daemon = False  # or it may start no workers
    become_rank(result.with_suffix(f".{rank}.log"), rank, ranks, memory)
    # Imports DeepSpeed, which the tests' own process does without.
    worker = importlib.import_module(options.pop("worker", "tests.recovery.worker"))
    worker.main(worker.Options(**options), rank, ranks)
