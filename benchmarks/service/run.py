"""`cpsr bench service`: how fast `GET /plan` is over a long run's journal, and what memory the service takes."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import in_own_process, status_bytes
from cpsr.benchmarks.harness.ranks import end_ranks, log_tail, start_job
from cpsr.benchmarks.service.long_journal import fill, thin_out
from cpsr.errors import CPSRError
from cpsr.journal import JournalReader
from cpsr.journal.writer import FULL_STEPS

__all__ = ["main", "poll"]

AIM_SECONDS, AIM_BYTES = 0.020, 150e6
MILLISECONDS, MEGABYTE = 1e3, 1e6
PERIOD_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
START_SECONDS = 300.0  # reading ten million steps once, beside others, included
END_SECONDS = 60.0
LOOK_SECONDS = 0.2
WARM_UP_SECONDS = 5.0  # the first answers of a process import and connect


def main(
    json_path: Path | None = None,
    steps: int = 10_000_000,
    checkpoints: int = 100_000,
    clients: int = 50,
    seconds: float = 60.0,
    workdir: Path | None = None,
) -> None:
    """Measure, print the table, and write the JSON file.

    Raises:
        CPSRError: the job or the service ended, or no request was answered.
    """
    with measuring("service", json_path, workdir) as call:
        building = call.progress.add_task("rows of the journal", total=steps)
        run_dir = call.directory / "run"
        fill(run_dir, steps, checkpoints, lambda rows: call.progress.update(building, completed=rows))
        rows = thin_out(run_dir / "journal.db", FULL_STEPS)
        result = {"step_rows": rows, "journal_bytes": (run_dir / "journal.db").stat().st_size}
        result |= _measured(run_dir, clients, seconds)
        table = {
            "step rows": f"{rows:,}",
            "journal, MB": f"{result['journal_bytes'] / MEGABYTE:.0f}",
            "answers (refused)": f"{result['requests']} ({result['refused']})",
            "p50, ms": f"{MILLISECONDS * result['p50_seconds']:.1f}",
            "p99, ms": f"{MILLISECONDS * result['p99_seconds']:.1f}",
            "longest, ms": f"{MILLISECONDS * result['longest_seconds']:.0f}",
            "memory of the service, MB": f"{result['service_bytes'] / MEGABYTE:.0f}",
            "iterations trained meanwhile": str(result["trained_iterations"]),
        }
        call.table(f"GET /plan, {clients} clients, beside training", ("", "old steps thinned out"), table.items())
        quick = not result["refused"] and result["p99_seconds"] < AIM_SECONDS
        aims = {
            f"99 of 100 answers within {MILLISECONDS * AIM_SECONDS:.0f} ms": quick,
            f"below {AIM_BYTES / MEGABYTE:.0f} MB": result["service_bytes"] < AIM_BYTES,
        }
        call.judge(aims)
        asked = {"steps": steps, "checkpoints": checkpoints, "clients": clients, "seconds": seconds}
        call.leave(asked | {"result": result, "aims": aims})


def poll(url: str, clients: int, seconds: float) -> tuple[list[float], int]:
    """Let clients ask once a second each, evenly spread over the second; connections are kept.

    Returns:
        Seconds of each request that was answered with 200, from when it was meant to be sent; and how many others
        there were.
    """
    return asyncio.run(_poll(url, clients, seconds))


async def _poll(url: str, clients: int, seconds: float) -> tuple[list[float], int]:
    taken: list[float] = []
    requests = round(clients * seconds / PERIOD_SECONDS)

    async def ask(at: float) -> None:
        await asyncio.sleep(at - time.perf_counter())
        try:
            answer = await connections.get(url)
        except httpx.HTTPError:
            return
        if answer.status_code == httpx.codes.OK:
            taken.append(time.perf_counter() - at)

    # One pool for all: each AsyncClient reads the certificates of the machine once more, which takes seconds for 50.
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=unlimited, timeout=TIMEOUT_SECONDS) as connections:
        start = time.perf_counter() + PERIOD_SECONDS
        async with asyncio.TaskGroup() as asking:
            # All at once: a request that is not answered yet does not keep the next one back.
            for number in range(requests):
                asking.create_task(ask(start + number / clients * PERIOD_SECONDS))
    return taken, requests - len(taken)


@contextmanager
def _serving(run_dir: Path) -> Iterator[tuple[str, int]]:
    """`cpsr serve` over a run; its address and its process.

    Raises:
        CPSRError: it ended instead.
    """
    command = [sys.executable, "-m", "cpsr", "serve", "--run-dir", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " on http" not in line:
                raise CPSRError(f"the service did not start, its first line is {line!r}; its log is above")
            yield line.split(" on ")[1].strip(), process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _training(run_dir: Path) -> Iterator[None]:
    """The training job, which has recorded its first steps; `run_dir` is called `run`, as of every job.

    Raises:
        CPSRError: it ended, or recorded nothing in time; the message ends with its last lines.
    """
    directory, before = run_dir.parent, _steps(run_dir)
    processes = start_job("service.job", directory, 1)
    try:
        deadline = time.monotonic() + START_SECONDS
        while _steps(run_dir) == before:
            if processes[0].exitcode is not None or time.monotonic() > deadline:
                raise CPSRError(f"the training job recorded no step\n{log_tail(directory)}")
            time.sleep(LOOK_SECONDS)
        yield
        if processes[0].exitcode is not None:
            raise CPSRError(f"the training job ended meanwhile\n{log_tail(directory)}")
    finally:
        end_ranks(processes)


def _steps(run_dir: Path) -> tuple[int, int]:
    """Life and iteration that were recorded last."""
    with JournalReader(run_dir / "journal.db") as reader:
        step = reader.recent_steps(1)[0]
        return step.life, step.iteration


def _measured(run_dir: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Ask the service over the journal in `run_dir`, beside training."""
    with _training(run_dir), _serving(run_dir) as (url, pid):
        in_own_process(poll, url, clients, WARM_UP_SECONDS)
        _, began = _steps(run_dir)
        answers, refused = in_own_process(poll, url, clients, seconds)
        trained, service_bytes = _steps(run_dir)[1] - began, status_bytes("VmHWM", pid)
    if not answers:
        raise CPSRError(f"none of {refused} requests to {url} was answered with 200")
    p50, p99 = numpy.quantile(answers, [0.5, 0.99]).tolist()
    return {
        "requests": len(answers),
        "refused": refused,
        "p50_seconds": p50,
        "p99_seconds": p99,
        "longest_seconds": max(answers),
        "service_bytes": service_bytes,
        "trained_iterations": trained,
    }
