"""What a file server would be asked: system calls on files, counted with strace in a process of their own."""

import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from cpsr.benchmarks.faults.tracing import CHANGING, READING, Tracer, read_calls, why_no_strace
from cpsr.benchmarks.scale.simulated import LIFE
from cpsr.errors import CPSRError
from cpsr.ranks.heartbeat import HeartbeatFiles

__all__ = ["NAMES", "calls_of", "holding_locks"]

NAMES = (*CHANGING, *READING, "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "fcntl")
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
    here, there = _FORKED.Pipe()
    process = _FORKED.Process(target=_work, args=(work, there), daemon=True)
    process.start()
    tracer = Tracer(process.pid or 0, log, names=NAMES)
    here.send(None)
    process.join()
    tracer.end()
    if process.exitcode:
        raise CPSRError(f"what is counted ended with status {process.exitcode}")
    found = len(read_calls(log, below))
    log.unlink()
    return found


def _work(work: Callable[[], object], begin: Connection) -> None:
    begin.recv()
    work()
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
