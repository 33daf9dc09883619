"""Processes for the ranks of small jobs, forked from a server that has imported what takes seconds and run nothing.

On CUDA they are new processes instead: a GPU that the server has asked for cannot be used after a fork.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests.device import ON_CUDA, compute_exactly

_PROCESSES = multiprocessing.get_context("forkserver")
_NEW_PROCESSES = multiprocessing.get_context("spawn")
_PRELOADED = "tests.preloaded"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # beside that of this process, which `tests.device` has set


def start_ranks(main: Callable[..., None], options: Any, ranks: int) -> Sequence[BaseProcess]:
    """Start a process for each rank, which calls `main(options, rank, ranks)` and in that first `become_rank`."""
    context: Any = _NEW_PROCESSES if ON_CUDA else _PROCESSES
    processes = [context.Process(target=main, args=(options, rank, ranks), daemon=True) for rank in range(ranks)]
    with mock.patch.dict(os.environ, _ENVIRONMENT):  # of the server, and so of all ranks; or of each rank
        if not ON_CUDA:
            _PROCESSES.set_forkserver_preload([_PRELOADED])
            multiprocessing.forkserver.ensure_running()
        for process in processes:
            process.start()
    return processes


def found_by(processes: Sequence[BaseProcess], folder: Path, limit_seconds: float, file: str = "{}.json") -> list[Any]:
    """What each rank has left as JSON in a file with its number, beside its log, once all have ended well."""
    for process in processes:
        process.join(limit_seconds)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(len(processes))]
    assert statuses == [0] * len(processes), logs
    return [json.loads((folder / file.format(rank)).read_text()) for rank in range(len(processes))]


def become_rank(log: Path, rank: int, ranks: int, memory: Path | None = None) -> None:
    """Make this process a rank, before it imports what it is to train.

    Args:
        log: where its output goes.
        rank: for its environment.
        ranks: likewise.
        memory: directory that is the shared memory of its machine, whose name is the machine's; None for this machine.
    """
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # LOCAL_RANK is DeepSpeed's number of the GPU, which all ranks share.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0" if ON_CUDA else str(rank), WORLD_SIZE=str(ranks))
    compute_exactly()
    if memory is not None:
        memory.mkdir(parents=True, exist_ok=True)
        os.environ.update(CPSR_NODE=memory.name, CPSR_SHARED_MEMORY=str(memory))
        # It asks where the shared memory is when it is imported, which the server has done already.
        for name in [name for name in sys.modules if name.partition(".")[0] == "cpsr"]:
            del sys.modules[name]


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.create_server(("localhost", 0)) as one:
        return int(one.getsockname()[1])
