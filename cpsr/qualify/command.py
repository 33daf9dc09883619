"""`cpsr qualify`: starts the ranks and follows them, or is one of them where a launcher has started it."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cpsr.demo.device import CUDA, describe_device, device_text, find_device, rank_environment
from cpsr.errors import ConfigError
from cpsr.launch.process import launched
from cpsr.qualify.checks import trials_of
from cpsr.qualify.ranks import Rank, leave, read_records, release_memory
from cpsr.ranks.link import EXPECTS_ERRORS, REFUSED_STATUS, SHUTDOWN, report
from cpsr.tables import print_table

__all__ = ["finish", "follow", "result_of", "run_qualify", "write_so_far"]

PACKAGES = ("cpsr", "torch", "deepspeed")
RANKS = 2  # on the CPU, and where there are fewer GPUs: they share one
FAILED = 1
JSON_NAME, LOG_NAME = "qualify.json", "ranks.log"  # in the work folder
RESTARTS = 1000  # failures without a new iteration: each check that breaks the group is one
POLL_SECONDS = 0.2
LEAVE_SECONDS = 10  # which ranks have after SIGTERM
WORDS = {"passed": "passed", "failed": "[bold red]FAILED[/]"}


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
        ConfigError: there is no such device, or no check has such a name; or no launcher restarts these ranks.
    """
    device, folder = find_device(device), workdir.absolute()
    if "RANK" in os.environ:
        _as_rank(device, only, json_path, folder)
    console = Console()
    job = ["-m", "cpsr", "qualify", f"--device={device}", f"--only={only}", f"--workdir={folder}"]
    follow(console, folder, device, _ranks(device) if ranks is None else ranks, job)
    return finish(console, folder, device, json_path)


def _ranks(device: str) -> int:
    if device != CUDA:
        return RANKS
    import torch

    return max(RANKS, torch.cuda.device_count())


def _as_rank(device: str, only: str, json_path: Path | None, folder: Path) -> NoReturn:
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        raise ConfigError("ranks kill themselves here, and nothing restarts them: use `cpsr run --max-restarts=1000`")
    os.environ.update(rank_environment(device))
    rank = Rank(folder, device)
    rank.run(trials_of(device, only, rank.ranks, rank.stages_can_send), lambda: write_so_far(folder, device))
    if rank.group.broadcast(finish(Console(), folder, device, json_path) if rank.rank == 0 else None) == 0:
        leave(0)
    launcher = report()
    if launcher is None:
        leave(FAILED)
    launcher.refuse(f"Checks failed; see {folder / JSON_NAME}")  # or `cpsr run` would restart the ranks
    leave(REFUSED_STATUS)


def follow(console: Console, folder: Path, device: str, ranks: int, job: Sequence[str]) -> None:
    """Run the checks to their end, or until they are interrupted; shows a progress bar on a terminal.

    Args:
        console: for the progress.
        folder: work folder.
        device: `cpu` or `cuda`.
        ranks: of the job.
        job: what each rank is, as arguments of `cpsr run`.
    """
    command = [f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}", "--monitor-interval=0.1", *job]
    # After a check that fails, hangs or kills, the ranks start again with the next one.
    environment = {**rank_environment(device), SHUTDOWN: str(LEAVE_SECONDS), EXPECTS_ERRORS: "1"}
    folder.mkdir(parents=True, exist_ok=True)
    for path in [folder / LOG_NAME, *folder.glob("rank-*.jsonl")]:  # of an earlier call
        path.unlink(missing_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
            launched(command, folder / LOG_NAME, environment) as launcher,
        ):
            checks = progress.add_task("", total=None)
            while launcher.poll() is None:
                found = read_records(folder)
                total = next((len(line["trials"]) for line in found if line["event"] == "planned"), None)
                began = [line["trial"] for line in found if line["event"] == "began"]
                ended = {line["trial"] for line in found if line["event"] == "ended"}
                newest = began[-1] if began else "starting the ranks"
                progress.update(checks, total=total, completed=len(ended), description=newest)
                time.sleep(POLL_SECONDS)
    finally:
        release_memory(folder)


def finish(console: Console, folder: Path, device: str, json_path: Path | None) -> int:
    """Put the records together, write the JSON and print the table; returns the exit status.

    Raises:
        ConfigError: the ranks have recorded no check.
    """
    result = write_so_far(folder, device)
    if not result["checks"]:
        log = folder / LOG_NAME
        raise ConfigError(f"no check ran: none has a name that --only asks for, or the ranks did not start; see {log}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_result(console, result, folder)
    return 0 if result["passed"] else FAILED


def write_so_far(folder: Path, device: str) -> dict[str, Any]:
    """Put the records together as they are now, and write the JSON in the work folder if they name a check.

    A launcher that gives up leaves no rank to do it at the end. What has not ended by then counts as failed.
    """
    packages = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "device": describe_device(device)}
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "versions": packages}
    result |= result_of(read_records(folder))
    if result["checks"]:
        written = folder / f"{JSON_NAME}.{os.getpid()}"  # several ranks may write
        written.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        written.replace(folder / JSON_NAME)  # the rank may be killed meanwhile: the file is always whole
    return result


def result_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the ranks' records, which are in the order of time, together as plain data.

    Returns:
        `checks` has every place of the table: `cell`, `check`, `status` (`passed` or `failed`), and `reason` why it
        failed.
    """
    planned: Mapping[str, Any] = next((line for line in lines if line["event"] == "planned"), {})
    checks = [
        {"cell": cell, "check": check, "status": "failed" if reason else "passed", "reason": reason}
        for cell, check in planned.get("trials", ())
        for reason in [_why_failed(f"{cell}: {check}", lines, planned["ranks"])]
    ]
    times = [line["unix_seconds"] for line in lines] or [0.0]
    return {
        "passed": bool(checks) and all(one["status"] == "passed" for one in checks),
        "ranks": planned.get("ranks", 0),
        "backend": planned.get("backend", ""),
        "seconds": times[-1] - times[0],
        "checks": checks,
    }


def _why_failed(trial: str, lines: Sequence[Mapping[str, Any]], ranks: int) -> str:
    """Empty for a check that every rank has ended without an error."""
    mine = [line for line in lines if line.get("trial") == trial]
    ended = [line for line in mine if line["event"] == "ended"]
    error = next((str(line["error"]) for line in ended if line["error"]), "")
    if error or len({line["rank"] for line in ended}) == ranks:
        return error
    return "the job ended in this check" if mine else "the job ended before this check"


def print_result(console: Console, result: Mapping[str, Any], folder: Path) -> None:
    """Print the table, and one line for each check that failed."""
    checks: Sequence[Mapping[str, Any]] = result["checks"]
    columns = list(dict.fromkeys(one["check"] for one in checks))
    rows: dict[str, dict[str, str]] = {}
    for one in checks:
        rows.setdefault(one["cell"], dict.fromkeys(columns, "-"))[one["check"]] = WORDS[one["status"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    device = device_text(result["machine"]["device"])
    caption = f"{device}; {result['ranks']} ranks over {result['backend']}; {versions}; {result['seconds']:.0f} s"
    table = Table("combination", *columns, title="cpsr qualify", caption=caption)
    for cell, words in rows.items():
        table.add_row(cell, *words.values())
    print_table(console, table)
    failed = [one for one in checks if one["status"] == "failed"]
    where = f"{folder / JSON_NAME} and {folder / LOG_NAME}, or the output of your launcher"
    lines = [f"FAILED {one['cell']}, {one['check']}: {one['reason'].strip().splitlines()[-1]}" for one in failed]
    lines += [f"Send us {where}"] if failed else []
    for line in (*lines, f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {folder / JSON_NAME}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
