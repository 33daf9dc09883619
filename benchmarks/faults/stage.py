"""One fault after another: each meets a fresh copy of a run, in a fork that is traced, and is judged by a restart.

Torch is imported once for all forks, and a fork that is killed takes nothing with it.
"""

import json
import mmap
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.oracle import Verdict, restart
from cpsr.benchmarks.faults.tracing import CHANGING, READING, Call, Tracer, read_calls
from cpsr.checkpoint import files
from cpsr.errors import CPSRError

__all__ = ["POLL_SECONDS", "Gate", "Stage", "fork", "wait_for"]

BESIDE_FAILED = "the process beside the one that met the fault failed, too"
NOTES_BYTES = 1 << 16
HEADER_BYTES = 16  # the length of the notes in the first 8, then the three flags
ARRIVED, RELEASED, OVER = 8, 9, 10
POLL_SECONDS = 0.002
FAILED = 97  # exit status of a fork whose work raised


class Gate:
    """Where a fork waits until it is being traced, and where it leaves notes.

    Both through shared memory: a pipe or a file would need the very calls that are counted and made to fail.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NOTES_BYTES)

    def wait(self) -> None:
        """In the fork: go on once it is released."""
        self._memory[ARRIVED] = 1
        while not self._memory[RELEASED]:
            time.sleep(POLL_SECONDS)

    def await_arrival(self, timeout_seconds: float = 60.0) -> None:
        """In the parent: wait until the fork is there, so that nothing that it did before is traced.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._memory[ARRIVED]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a process that is to meet a fault was not ready within {timeout_seconds:g} s")
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """In the parent: let the fork go on."""
        self._memory[RELEASED] = 1

    def end(self) -> None:
        """In the parent: signal to a process that works beside the fork that the fork has ended."""
        self._memory[OVER] = 1

    def await_end(self) -> None:
        """In the process beside: wait until the fork has ended."""
        while not self._memory[OVER]:
            time.sleep(POLL_SECONDS)

    def note(self, **values: Any) -> None:
        """In the fork: add plain values to what was noted before."""
        data = json.dumps(self.notes() | values).encode()
        if len(data) + HEADER_BYTES > NOTES_BYTES:
            raise ValueError(f"notes of {len(data)} bytes do not fit into {NOTES_BYTES}")
        self._memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
        self._memory[:8] = len(data).to_bytes(8, "little")  # last: a kill in between leaves the notes before

    def notes(self) -> dict[str, Any]:
        """What was noted so far."""
        size = int.from_bytes(self._memory[:8], "little")
        found: dict[str, Any] = json.loads(self._memory[HEADER_BYTES : HEADER_BYTES + size]) if size else {}
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def fork(work: Callable[[], object]) -> int:
    """Start the work in a fork; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it is, the fork must not run on in its parent's place
            traceback.print_exc()
        finally:
            os._exit(FAILED)
    return child


def wait_for(child: int, timeout_seconds: float = 60.0) -> int:
    """The wait status of a fork; one that takes longer is killed, and raises TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"a process under a fault did not end within {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)


def _on_one_thread(work: Callable[[Path, Gate], object], run_dir: Path, gate: Gate) -> None:
    """Do the work in a fork that never spreads calls on files over threads.

    strace counts the calls of each thread. On a slow machine the n-th call of a thread would be another one than in the
    run that was recorded, and the fault would meet a later save.
    """
    files.THREADS = 1
    work(run_dir, gate)


class Stage:
    """Where the runs lie, and the processes that work in them.

    Args:
        directory: emptied first, and again by `clear`.
        prepare: makes the run as it is before every fault.

    Attributes:
        run_dir: the copy that the next fault meets.

    Raises:
        CPSRError: the run cannot be made.
    """

    def __init__(self, directory: Path, prepare: Callable[[Path], object]) -> None:
        self.run_dir = directory / "run"
        self._directory = directory
        self.clear()
        directory.mkdir(parents=True)
        if wait_for(fork(lambda: prepare(directory / "base"))) != 0:
            raise CPSRError(f"the run that is to meet faults cannot be made in {directory}")

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def renew(self) -> None:
        """Put a fresh copy of the run in place."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.copytree(self._directory / "base", self.run_dir)

    def traced(
        self,
        work: Callable[[Path, Gate], object],
        injections: Sequence[str] = (),
        *,
        reading: bool = False,
        beside: Callable[[Path, Gate], object] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Wait status of the work on the fresh run, and what it noted.

        Args:
            work: opens what it needs and waits at the gate; what it does after that is traced.
            injections: see `Tracer`.
            reading: record calls that read, too.
            beside: works at the same time in a process that is not traced, and ends after the one that is.
        """
        self.renew()
        gate = Gate()
        companion = None if beside is None else fork(lambda: beside(self.run_dir, gate))
        child = fork(lambda: _on_one_thread(work, self.run_dir, gate))
        try:
            gate.await_arrival()
            names = (*CHANGING, *READING) if reading else CHANGING
            tracer = Tracer(child, self._directory / "log", injections, names)
            gate.release()
            status = wait_for(child)
            gate.end()
            tracer.end()
            notes = gate.notes()
            if companion is not None and os.waitstatus_to_exitcode(wait_for(companion)) == FAILED:
                notes["beside"] = BESIDE_FAILED
        finally:
            gate.close()
        return status, notes

    def calls(self) -> list[Call]:
        """What the last traced work called below the run directory."""
        return read_calls(self._directory / "log", self.run_dir)

    def injected(self) -> bool:
        """Whether something was injected into the last traced work: strace marks each such call."""
        log = (self._directory / "log").read_text(errors="replace")
        return "(INJECTED)" in log or "(DELAYED)" in log

    def judged(self, newest: Collection[int], kept: Collection[int], *, damaged: bool = False) -> Verdict:
        """What a restart in a process of its own finds; see `oracle.restart`."""
        gate = Gate()
        started = time.perf_counter()
        try:
            status = wait_for(fork(lambda: gate.note(**vars(restart(self.run_dir, newest, kept, damaged=damaged)))))
            notes = gate.notes()
        finally:
            gate.close()
        if status != 0:
            seconds = time.perf_counter() - started
            return Verdict(False, False, seconds, f"the process that restarts ended with status {status}")
        return Verdict(**notes)
