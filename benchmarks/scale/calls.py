"""What a file server would be asked: system calls on files, counted with strace in a process of their own."""

import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from cpsr.benchmarks.faults.tracing import CHANGING, READING, Tracer, read_calls, why_no_strace
from cpsr.benchmarks.scale.simulated import LIFE
from cpsr.errors import CPSRError
from cpsr.ranks.heartbeat import HeartbeatFiles

__all__ = ["DELAYS", "NAMES", "calls_of", "delayed_seconds", "holding_locks"]

NAMES = (*CHANGING, *READING, "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "fcntl")
DELAY_MICROSECONDS = 500  # of each call, as on a network file system
DELAYS = (f"{','.join(f'?{name}' for name in NAMES)}:delay_enter={DELAY_MICROSECONDS}",)  # for strace
_FORKED = multiprocessing.get_context("fork")  # what is counted has its objects already


def calls_of(work: Callable[[], object], below: Path, log: Path) -> int | None:
    """How many calls on files below a directory some work makes; None without strace.

    Args:
        work: runs in a fork of this process: it changes the files, and nothing in this process.
        below: whose files.
        log: of the calls; removed again.
    """
    if why_no_strace() is not None:
        return None
    _traced(work, log)
    found = len(read_calls(log, below))
    log.unlink()
    return found


def delayed_seconds(work: Callable[[], object], log: Path) -> float | None:
    """How long some work takes where each call on files takes longer; as `calls_of`."""
    if why_no_strace() is not None:
        return None
    seconds = _traced(work, log, DELAYS)
    log.unlink()
    return seconds


def _traced(work: Callable[[], object], log: Path, injections: Sequence[str] = ()) -> float:
    here, there = _FORKED.Pipe()
    process = _FORKED.Process(target=_work, args=(work, there), daemon=True)
    process.start()
    there.close()
    tracer = Tracer(process.pid or 0, log, injections, names=NAMES)
    here.send(None)
    try:
        seconds: float = here.recv()
    except EOFError as error:
        raise CPSRError("what is traced ended with an error") from error
    process.join()
    tracer.end()
    return seconds


def _work(work: Callable[[], object], parent: Connection) -> None:
    parent.recv()
    started = time.perf_counter()
    work()
    parent.send(time.perf_counter() - started)
    os._exit(0)


@contextmanager
def holding_locks(run_dir: Path, machines: Collection[int]) -> Iterator[None]:
    """A process that holds the locks of all machines, as each of their processes does while it lives."""
    here, there = _FORKED.Pipe()
    process = _FORKED.Process(target=_hold, args=(run_dir, machines, there), daemon=True)
    process.start()
    here.recv()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _hold(run_dir: Path, machines: Collection[int], ready: Connection) -> None:
    for machine in machines:
        HeartbeatFiles(run_dir, LIFE).hold(machine)
    ready.send(None)
    ready.recv()  # until it is killed
