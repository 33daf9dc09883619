"""Two machines that train, a head node, and what happens to them: the drill's side of every failure."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from cpsr.benchmarks.drill.job import MACHINES, Job
from cpsr.benchmarks.drill.peers import Peer
from cpsr.benchmarks.drill.records import Records
from cpsr.benchmarks.drill.schedule import Failure, Kind
from cpsr.benchmarks.harness.processes import status_bytes
from cpsr.demo.machines import MEMORY, Machines

__all__ = ["Cluster"]

LOST_MACHINE = 1  # the launchers meet at machine 0
GRACE_SECONDS = 60.0  # from SIGTERM to SIGKILL
AGAIN_SECONDS = 1.0  # until a launcher that has ended is started again
LEFT_OUT = ("PET_", "TORCHELASTIC", "CPSR_")
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    # Without it restarted ranks find gloo addresses of the dead group, and no way but torchft's comes back.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
# torch's launcher imports the plugins of all installed packages: those of one peer cost every other one 3 s a start.
NO_PLUGINS = """
from importlib import metadata
every = metadata.entry_points
metadata.entry_points = lambda **of: () if of.get("group") == "torchrun.handlers" else every(**of)
"""


class Cluster:
    """The machines of one run, as a context. A launcher that ends before the job does is started again.

    Args:
        peer: whose launchers run.
        job: that they train.
    """

    def __init__(self, peer: Peer, job: Job) -> None:
        self._peer, self._job = peer, job
        self._launchers: dict[int, subprocess.Popen[str]] = {}
        self._ended_at: dict[int, float] = {}
        self._done: set[int] = set()

    def __enter__(self) -> Self:
        self.machines = Machines(MACHINES + 1, self._job.directory)
        self.machines.__enter__()
        (self._job.directory / "no-plugins").mkdir()
        (self._job.directory / "no-plugins" / "sitecustomize.py").write_text(NO_PLUGINS, encoding="utf-8")
        if self._peer.server is not None:
            place = self._peer.place(MACHINES, self.machines.names, self._job)
            self._start(MACHINES, self._peer.server(place), self._peer.environment(place))
        for machine in range(MACHINES):
            self._launch(machine)
        return self

    def __exit__(self, *_: object) -> None:
        self.machines.close()

    @property
    def complete(self) -> bool:
        """Whether every launcher has ended with success."""
        return len(self._done) == MACHINES

    def tend(self) -> None:
        """Start launchers again that have ended without success."""
        for machine in set(range(MACHINES)) - self._done:
            ended = self._launchers[machine].poll()
            if ended == 0:
                self._done.add(machine)
            elif ended is not None:
                since = self._ended_at.setdefault(machine, time.monotonic())
                if time.monotonic() - since > AGAIN_SECONDS:
                    del self._ended_at[machine]
                    self._launch(machine)

    def fail(self, failure: Failure, records: Records) -> float | None:
        """Let something fail; when it did. None if it cannot: what is to be killed may not be running."""
        processes = [process for rank in range(self._job.ranks) if (process := self._process(records, rank))]
        if len(processes) < self._job.ranks:
            return None
        failed = time.time()
        match failure.kind:
            case Kind.RANK_KILLED:
                processes[failure.rank].kill()
            case Kind.ALL_KILLED:
                for process in processes:
                    process.kill()
            case Kind.HUNG:
                processes[failure.rank].suspend()
            case Kind.MEMORY_LOST:
                failed = self._power_cycle(LOST_MACHINE)
            case Kind.SIGTERM:
                self._preempt()
        return failed

    def restart_by_hand(self) -> None:
        """What an operator does with a job that stands still: kill all of it, and start it again."""
        for machine in range(MACHINES):
            self.machines.kill(machine)
            self._launchers[machine].wait()

    def host_memory_bytes(self) -> int:
        """Memory of all processes on the machines that train that is no file's, and all of shared memory."""
        total = 0
        for machine in range(MACHINES):
            pid = self.machines.first_process(machine)
            for process in _inside(pid):
                with suppress(OSError, StopIteration):  # it has ended
                    total += status_bytes("RssAnon", process.pid)
            shared = os.statvfs(f"/proc/{pid}/root{MEMORY}")
            total += (shared.f_blocks - shared.f_bfree) * shared.f_frsize
        return total

    def _launch(self, machine: int) -> None:
        place = self._peer.place(machine, self.machines.names, self._job)
        self._launchers[machine] = self._start(machine, self._peer.launch(place), self._peer.environment(place))

    def _start(self, machine: int, command: list[str], more: dict[str, str]) -> "subprocess.Popen[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        if not self._peer.plugins:
            folder = str(self._job.directory / "no-plugins")
            more = {"PYTHONPATH": os.pathsep.join(filter(None, [folder, kept.get("PYTHONPATH")])), **more}
        with (self._job.directory / f"machine-{machine}.log").open("a") as output:
            return self.machines.start(machine, command, output, kept | VARIABLES | more)

    def _power_cycle(self, machine: int) -> float:
        """Kill a machine, and start it again empty; when it was dead, which takes longer than some steps."""
        self.machines.kill(machine)
        killed = time.time()
        self._launchers[machine].wait()
        self.machines.forget(machine)
        self._launch(machine)
        return killed

    def _preempt(self) -> None:
        """SIGTERM to all launchers; when they have left, or after the grace, the machines are empty and start again."""
        for launcher in self._launchers.values():
            for process in psutil.Process(launcher.pid).children():  # of nsenter, which waits for the launcher
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for launcher in self._launchers.values():
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline - time.monotonic()))
        for machine in range(MACHINES):
            self.machines.kill(machine)
            self._launchers[machine].wait()
            self.machines.forget(machine)
        for machine in range(MACHINES):
            self._launch(machine)

    def _process(self, records: Records, rank: int) -> psutil.Process | None:
        """The process of a rank, as it is numbered here."""
        found = records.process(rank)
        if found is None:
            return None
        pid, name = found
        for process in _inside(self.machines.first_process(self.machines.names.index(name))):
            with suppress(OSError, psutil.NoSuchProcess):  # it has ended
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
                inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
                if int(inner) == pid and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None


def _inside(first: int) -> list[psutil.Process]:
    """All processes of a machine."""
    space = Path(f"/proc/{first}/ns/pid").readlink()
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/ns/pid").readlink() == space:
                found.append(process)
        except OSError:  # it has ended
            continue
    return found
