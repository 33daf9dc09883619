"""A rank of a plain torch job that is killed while its data loader's workers live, and restarted at once, in turn.

One process imports, and forks every life: `python -m tests.recovery.killed_lives <run directory> <lives>`. Each life
leaves a line of JSON: the sources of its state, messages about shared memory, and the number of orphans. Orphans are
workers of the life before that are still alive. They end by themselves within seconds: they are stopped, so that none
does.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import cpsr.checkpoint.rank_part as part_module
from cpsr import CPSRRecovery
from cpsr.checkpoint import files
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.journal import JournalReader
from tests.recovery.test_faults import INTERVAL, Loop, config

WAIT_SECONDS = 60.0


def loader() -> "DataLoader[Any]":
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")


def killed_when_written(run_dir: Path, at: int, workers: Path) -> None:
    """Kill this process where the checkpoint of that iteration would be written, once memory holds it."""
    write = files.write_tensors

    def writing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent.name == f"step-{at:010d}":
            end = time.monotonic() + WAIT_SECONDS
            while at not in [state.iteration for state in memory_states(run_id(run_dir))] and time.monotonic() < end:
                time.sleep(0.005)
            pids: list[int] = []
            while not pids and time.monotonic() < end:  # between two passes there are none
                pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            workers.write_text(json.dumps(pids))
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *arguments, **options)

    setattr(part_module, "write_tensors", writing)  # noqa: B010 - mypy refuses to assign to a function


def orphans_of(workers: Path) -> list[int]:
    return json.loads(workers.read_text()) if workers.exists() else []


def kill_orphans(workers: Path) -> None:
    for pid in orphans_of(workers):
        with suppress(ProcessLookupError):  # it ended with the life
            os.kill(pid, signal.SIGKILL)
    workers.unlink(missing_ok=True)


def live(run_dir: Path, report: Path, workers: Path) -> None:
    orphans = orphans_of(workers)
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(run_dir, checkpoint={"shared_memory": True})) as recovery:
        started = recovery.iteration
        killed_when_written(run_dir, started + 2 * INTERVAL, workers)
        alive = [pid for pid in orphans if Path(f"/proc/{pid}").exists()]
        with JournalReader(run_dir / "journal.db") as reader:
            sources = [source.source for row in reader.recoveries()[-1:] for source in row.sources]
            messages = [event.message for event in reader.events() if event.kind == "no shared memory"]
        line = {"started": started, "sources": sources, "messages": messages, "orphans": len(alive)}
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")
        kill_orphans(workers)
        for x, y in recovery.resume(loader(), repeat=True):
            loop.step(loop.model(x, y))


def main(run_dir: Path, lives: int) -> None:
    workers = run_dir.parent / "workers"
    for _ in range(lives):
        pid = os.fork()
        if pid == 0:
            live(run_dir, run_dir.parent / "lives.jsonl", workers)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"a life ended with {status}")
    kill_orphans(workers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
