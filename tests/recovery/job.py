"""Launches the job of `worker.py`, rank by rank, and reads what it left."""

import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from cpsr.checkpoint.manifest import COMMIT, step_name

RANKS = 2
INTERVAL = 4
ITERATIONS = 30
# What a life's result says of how it began, emptied: `{**result, **OF_THE_START}` is what it ended with.
OF_THE_START: dict[str, Any] = {"batches": [], "started": {}, "state_at_start": ""}
LAUNCH_SECONDS = 120.0
SURVIVOR_SECONDS = 15.0  # as torchrun does, the others are ended soon after one has died

# Every rank is a process of its own, forked from a server that has imported what takes seconds and run nothing; not
# `cpsr`, which the ranks are to find where the tests do.
_PROCESSES = multiprocessing.get_context("forkserver")
# The last two are imported by the first optimizer and by deepspeed.initialize otherwise: 2 s of each rank.
_PROCESSES.set_forkserver_preload(["deepspeed", "torch._dynamo", "deepspeed.runtime.zero.muon.original_muon"])
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


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
        """
        self.lives += 1
        config: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "mode": mode,
            # What a killed life left in memory would hide what its disk holds: tests of that ask for it.
            "checkpoint": {
                "interval_iterations": INTERVAL,
                "exit_grace_seconds": 2.0,
                "fsync": False,
                "shared_memory": False,
            },
            "predictor": {"window_iterations": 100},
        }
        for name, value in (settings or {}).items():
            config[name] = {**config.get(name, {}), **value} if isinstance(value, Mapping) else value
        record = None if committed is None else self.run_dir / "checkpoints" / step_name(committed) / COMMIT
        result = self.directory / f"life-{self.lives}"
        options = {"iterations": ITERATIONS, "fault": fault, "committed": record} | options
        return self._wait(self._start({"config": config, "result": result} | options, ranks), result, seconds)

    def _start(self, options: dict[str, Any], ranks: int) -> list[ForkServerProcess]:
        processes = [
            _PROCESSES.Process(target=_rank, args=(options, rank, ranks), daemon=True) for rank in range(ranks)
        ]
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            multiprocessing.forkserver.ensure_running()
        for process in processes:
            process.start()
        return processes

    def _wait(self, processes: list[ForkServerProcess], result: Path, seconds: float) -> Ended:
        deadline = time.monotonic() + seconds
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + SURVIVOR_SECONDS)
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        files = [result.with_suffix(f".{rank}.json") for rank in range(len(processes))]
        results = [json.loads(file.read_text()) if file.exists() else None for file in files]
        output = [result.with_suffix(f".{rank}.log").read_text() for rank in range(len(processes))]
        return Ended([process.exitcode for process in processes], results, output)


def _rank(options: dict[str, Any], rank: int, ranks: int) -> None:
    """What a rank's process runs: all it says goes to a file."""
    with options["result"].with_suffix(f".{rank}.log").open("w") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    if "nodes" in options:
        node = options.pop("nodes")[rank]
        memory = options["result"].parent / "memory" / node
        memory.mkdir(parents=True, exist_ok=True)
        os.environ.update(CPSR_NODE=node, CPSR_SHARED_MEMORY=str(memory))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    # Imports DeepSpeed, which the tests' own process does without.
    worker = importlib.import_module(options.pop("worker", "tests.recovery.worker"))
    worker.main(worker.Options(**options), rank, ranks)
