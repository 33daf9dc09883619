"""`cpsr qualify`: starts the ranks and follows them, or is one of them where a launcher has started it."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cpsr.demo.device import CUDA, describe_device, find_device, rank_environment
from cpsr.errors import ConfigError
from cpsr.qualify.result import clear, print_result, read_records, release_memory, result_of
from cpsr.ranks.exits import exiting_at_sigterm
from cpsr.ranks.link import EXPECTS_ERRORS, REFUSED_STATUS, report

__all__ = ["finish", "follow", "run_qualify", "write_so_far"]

PACKAGES = ("cpsr", "torch", "deepspeed")
RANKS = 2  # on the CPU, and where there are fewer GPUs: they share one
FAILED = 1
JSON_NAME = "qualify.json"  # in the work folder
LAUNCHERS_LOG = "the output of your launcher"
WORKER = "cpsr.qualify.worker"
RESTARTS = 1000  # failures without a new iteration: each check that breaks the group is one
POLL_SECONDS = 0.2
# Longer than the deadline of any check: only a launcher that hangs itself records nothing for so long.
SILENCE_SECONDS = 900.0
LEAVE_SECONDS = 20.0  # after SIGTERM


def run_qualify(device: str, ranks: int | None, only: str, json_path: Path | None, workdir: Path) -> int:
    """Run the checks, print the table, and write the JSON.

    Args:
        device: `auto`, `cpu` or `cuda`.
        ranks: of the job; by default 2, or one for each GPU if there are more.
        only: text that the names of the checks contain, as `zero1 bf16` or `: dump`.
        json_path: where the result goes beside `qualify.json` in the work folder.
        workdir: work folder, on a disk that all ranks see; what an earlier call left in it is replaced.

    Returns:
        The exit status: 0 if everything passed. Of a rank that fails it is one after which `cpsr run` does not restart.

    Raises:
        ConfigError: there is no such device, or no check has such a name.
    """
    device, folder = find_device(device), workdir.absolute()
    if "RANK" in os.environ:
        _as_rank(device, only, json_path, folder)
    log = folder / "ranks.log"
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    follow(console, folder, log, device, _ranks(device) if ranks is None else ranks, only)
    return finish(console, folder, device, str(log), json_path)


def _as_rank(device: str, only: str, json_path: Path | None, folder: Path) -> NoReturn:
    os.environ.update(rank_environment(device))
    from cpsr.qualify.checks import trials_of
    from cpsr.qualify.worker import Rank, leave

    folder.mkdir(parents=True, exist_ok=True)
    rank = Rank(folder, device)
    rank.run(partial(trials_of, device, only), partial(write_so_far, folder, device, LAUNCHERS_LOG))
    status = finish(Console(), folder, device, LAUNCHERS_LOG, json_path) if rank.rank == 0 else 0
    launcher = report()
    if rank.agree_on(status) == 0:
        leave(0)
    if launcher is None:
        leave(FAILED)
    launcher.refuse(f"Checks failed; see {folder / JSON_NAME}")  # or `cpsr run` would restart the ranks
    leave(REFUSED_STATUS)


def finish(console: Console, folder: Path, device: str, log: str, json_path: Path | None) -> int:
    """Put the records together, write the JSON and print the table; returns the exit status.

    Raises:
        ConfigError: the ranks have recorded no check.
    """
    result = write_so_far(folder, device, log)
    if not result["checks"]:
        raise ConfigError(f"no check ran: none has a name that --only asks for, or the ranks did not start; see {log}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(_text(result), encoding="utf-8")
    print_result(console, result, folder / JSON_NAME if json_path is None else json_path)
    return 0 if result["passed"] else FAILED


def write_so_far(folder: Path, device: str, log: str) -> dict[str, Any]:
    """Put the records together as they are now, and write the JSON in the work folder if they name a check.

    A launcher that gives up leaves no rank to do it at the end. What has not ended by then counts as failed.
    """
    result = result_of(read_records(folder), _machine(device), _versions(), log)
    if result["checks"]:
        written = folder / f"{JSON_NAME}.{os.getpid()}"  # several ranks may write
        written.write_text(_text(result), encoding="utf-8")
        written.replace(folder / JSON_NAME)  # the rank may be killed meanwhile: the file is always whole
    return result


def _text(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


def _ranks(device: str) -> int:
    if device != CUDA:
        return RANKS
    import torch

    return max(RANKS, torch.cuda.device_count())


def _machine(device: str) -> Mapping[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": describe_device(device),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


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
    with log.open("wb") as file, exiting_at_sigterm():
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
                planned = next((line["trials"] for line in lines if line["event"] == "planned"), None)
                total = None if planned is None else sum(not one["reason"] for one in planned)
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
