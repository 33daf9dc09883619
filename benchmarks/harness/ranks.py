"""The ranks of small jobs: processes forked from a server that has imported what takes seconds and run nothing.

On CUDA they are new processes instead: a GPU that the server has asked for cannot be used after a fork.
"""

import hashlib
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from cpsr.demo import device as device_ranks
from cpsr.demo.device import CPU, CUDA
from cpsr.errors import CPSRError

__all__ = [
    "RANKS",
    "become_rank",
    "end_ranks",
    "join_ranks",
    "log_tail",
    "run_ranks",
    "start_job",
    "start_ranks",
    "state_digest",
]

if TYPE_CHECKING:
    from cpsr.engines.adapter import EngineAdapter

RANKS = 2
TIMEOUT_SECONDS = 900.0
POLL_SECONDS = 0.05
END_SECONDS = 60.0  # after SIGTERM: a job closes its run
LOG_LINES = 15  # of a job that failed, in the message: its directory is removed
_PROCESSES = multiprocessing.get_context("forkserver")
_NEW_PROCESSES = multiprocessing.get_context("spawn")
_PRELOADED = "cpsr.benchmarks.harness.preloaded"


def run_ranks(
    module: str,
    directory: Path,
    ranks: int = RANKS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    device: str = CPU,
    **options: Any,
) -> list[Any]:
    """One run of a job in `directory`, which exists and is empty.

    Args:
        module: of the benchmarks, the job: on every rank its `main(run_dir, **options)` is called.
        directory: for the job's run directory, logs and results.
        ranks: processes that it has.
        timeout_seconds: after which it is given up.
        device: `cpu` or `cuda`; DeepSpeed trains there.
        options: plain data.

    Returns:
        What `main` returned, plain data, by rank; ranks that returned None are left out.

    Raises:
        CPSRError: the job failed or hung; the message ends with its last lines.
    """
    processes = start_job(module, directory, ranks, device, **options)
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(process.exitcode is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.exitcode]
            if failed:
                status = processes[failed[0]].exitcode
                raise CPSRError(f"rank {failed[0]} of the job ended with status {status}\n{log_tail(directory)}")
            if time.monotonic() > deadline:
                raise CPSRError(f"the job did not end within {timeout_seconds:g} s\n{log_tail(directory)}")
            time.sleep(POLL_SECONDS)
    finally:
        end_ranks(processes)
    if any(process.exitcode for process in processes):
        raise CPSRError(f"the job failed\n{log_tail(directory)}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("found.*.json"))]


def start_job(
    module: str, directory: Path, ranks: int = RANKS, device: str = CPU, **options: Any
) -> Sequence[BaseProcess]:
    """As `run_ranks`, without waiting for the job's end."""
    return start_ranks(_run_job, (f"cpsr.benchmarks.{module}", directory, options), ranks, device)


def end_ranks(processes: Sequence[BaseProcess]) -> None:
    """Ask those that still run to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(END_SECONDS)
        process.kill()
        process.join()


def log_tail(directory: Path) -> str:
    """The last lines of every rank of a job in `directory`."""
    lines = []
    for path in sorted(directory.glob("rank.*.log")):
        lines += [f"{path.stem}:", *path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]]
    return "\n".join(lines)


def join_ranks(run_dir: Path) -> None:
    """Join the other ranks of a job over gloo, or over NCCL where each has a GPU; called in the job."""
    # Through a file: a port that was free a moment ago may be taken by now.
    device_ranks.join_ranks(f"file://{run_dir.parent / 'ranks'}")


def state_digest(adapter: "EngineAdapter") -> str:
    """Hash of every bit of a rank's training state."""
    digest = hashlib.sha256()
    for _, tensor in sorted(adapter.shard().all_tensors()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def start_ranks(main: Callable[..., None], options: Any, ranks: int, device: str = CPU) -> Sequence[BaseProcess]:
    """Start a process for each rank, which calls `main(options, rank, ranks)` and in that first `become_rank`."""
    context: Any = _NEW_PROCESSES if device == CUDA else _PROCESSES
    processes = [context.Process(target=main, args=(options, rank, ranks), daemon=True) for rank in range(ranks)]
    with mock.patch.dict(os.environ, device_ranks.rank_environment(device)):  # of the server, or of each process
        if device != CUDA:
            _PROCESSES.set_forkserver_preload([_PRELOADED])
            multiprocessing.forkserver.ensure_running()
        for process in processes:
            process.start()
    return processes


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
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if memory is not None:
        memory.mkdir(parents=True, exist_ok=True)
        os.environ.update(CPSR_NODE=memory.name, CPSR_SHARED_MEMORY=str(memory))
        # It asks where the shared memory is when it is imported, which the server has done already.
        for name in [name for name in sys.modules if name.partition(".")[0] == "cpsr"]:
            del sys.modules[name]


def _run_job(job: tuple[str, Path, dict[str, Any]], rank: int, ranks: int) -> None:
    module, directory, options = job
    become_rank(directory / f"rank.{rank}.log", rank, ranks)
    multiprocessing.current_process().daemon = False  # or it may start no processes
    found = importlib.import_module(module).main(directory / "run", **options)
    if found is not None:
        (directory / f"found.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    import torch  # here, since a rank may first say where its memory is

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit
