"""`cpsr qualify`: starts the ranks and follows them, or is one of them where a launcher has started it."""

import json
import os
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console

from cpsr.demo.device import CUDA, describe_device, find_device, rank_environment
from cpsr.errors import ConfigError
from cpsr.qualify.job import follow
from cpsr.qualify.records import read_records
from cpsr.qualify.report import print_result
from cpsr.qualify.result import Qualification, qualification_of
from cpsr.ranks.link import REFUSED_STATUS, report

__all__ = ["finish", "run_qualify", "write_so_far"]

PACKAGES = ("cpsr", "torch", "deepspeed")
RANKS = 2  # on the CPU, and where there are fewer GPUs: they share one
FAILED = 1
JSON_NAME = "qualify.json"  # in the work folder
LAUNCHERS_LOG = "the output of your launcher"


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
    from cpsr.qualify.trials import trials_of
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
    if not result.checks:
        raise ConfigError(f"no check ran: none has a name that --only asks for, or the ranks did not start; see {log}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(_text(result), encoding="utf-8")
    print_result(console, result, folder / JSON_NAME if json_path is None else json_path)
    return 0 if result.passed else FAILED


def write_so_far(folder: Path, device: str, log: str) -> Qualification:
    """Put the records together as they are now, and write the JSON in the work folder if they name a check.

    A launcher that gives up leaves no rank to do it at the end. What has not ended by then counts as failed.
    """
    result = qualification_of(read_records(folder), _machine(device), _versions(), log)
    if result.checks:
        written = folder / f"{JSON_NAME}.{os.getpid()}"  # several ranks may write
        written.write_text(_text(result), encoding="utf-8")
        written.replace(folder / JSON_NAME)  # the rank may be killed meanwhile: the file is always whole
    return result


def _text(result: Qualification) -> str:
    return json.dumps(result.to_json(), indent=1) + "\n"


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
