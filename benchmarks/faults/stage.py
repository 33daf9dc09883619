"""One fault after another: each meets a fresh copy of a run, in a fork that is traced, and is judged by a restart."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.forked import FAILED, Gate, fork, wait_for
from cpsr.benchmarks.faults.job import copy_run
from cpsr.benchmarks.faults.oracle import Verdict, restart
from cpsr.benchmarks.faults.tracing import Call, Tracer, read_calls
from cpsr.errors import CPSRError

__all__ = ["Stage"]

BESIDE_FAILED = "the process beside the one that met the fault failed, too"


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
        copy_run(self._directory / "base", self.run_dir)

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
        child = fork(lambda: work(self.run_dir, gate))
        try:
            gate.await_arrival()
            tracer = Tracer(child, self._directory / "log", injections, reading=reading)
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

    def injected(self, besides: str | None = None) -> bool:
        """Whether something was injected into the last traced work, besides into calls of a name.

        strace marks each such call.
        """
        lines = (self._directory / "log").read_text(errors="replace").splitlines()
        marked = [line for line in lines if "(INJECTED)" in line or "(DELAYED)" in line]
        return any(besides is None or f" {besides}" not in line for line in marked)

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
