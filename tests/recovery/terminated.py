"""Starts `terminated_worker.py` under a real launcher, and asks it to end as launchers do."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.rank_processes import become_rank, start_ranks
from tests.recovery import terminated_worker
from tests.recovery.terminated_worker import Options, there_path

RANKS = 2
WAIT_SECONDS = 240.0  # for what takes fifteen; the machine may be busy


class Launcher(Protocol):
    """Torchrun, or the only rank."""

    pid: int

    def status(self) -> int | None:
        """Its exit status, None while it runs."""


class Torchrun(subprocess.Popen[bytes]):
    """Two ranks, started as a user does."""

    def __init__(self, options: Options, restarts: int, log: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += [terminated_worker.__file__, json.dumps(asdict(options))]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with log.open("wb") as file:
            super().__init__(command, stdout=file, stderr=file, env=env, start_new_session=True)

    def status(self) -> int | None:
        return self.poll()


class OnlyRank:
    """One rank without a launcher, forked from a server that has imported what takes seconds."""

    def __init__(self, options: Options, log: Path) -> None:
        (self._process,) = start_ranks(_only_rank, {"options": asdict(options), "log": log}, 1)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def status(self) -> int | None:
        return self._process.exitcode


def _only_rank(options: dict[str, Any], rank: int, ranks: int) -> None:
    os.setsid()
    multiprocessing.current_process().daemon = False  # or it may start no workers
    multiprocessing.set_start_method("fork", force=True)  # as it is in a program that is started by itself
    become_rank(options["log"], rank, ranks)
    terminated_worker.main(Options(**options["options"]))


@dataclass
class Life:
    """One start of the job."""

    options: Options
    launcher: Launcher
    ranks: int
    log: Path

    def pids(self) -> list[int]:
        """Of the ranks, once all are at the moment."""
        paths = [there_path(self.options.directory, rank) for rank in range(self.ranks)]
        self.until(lambda: all(path.exists() and path.read_text() for path in paths), "a rank did not come there")
        return [int(path.read_text()) for path in paths]

    def processes(self) -> list[psutil.Process]:
        """The launcher and all that descends from it."""
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def wait(self) -> int:
        """The launcher's exit status."""
        self.until(lambda: self.launcher.status() is not None, "the job did not end")
        status = self.launcher.status()
        assert status is not None
        return status

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            ended = self.launcher.status() is not None and not is_so()
            assert not ended, f"{what}: {self.output()}"
            assert time.monotonic() < deadline, f"{what}: {self.output()}"
            time.sleep(0.02)

    def output(self) -> str:
        """What the job says."""
        return self.log.read_text(errors="replace")


@contextmanager
def started(options: Options, ranks: int, restarts: int = 0) -> Iterator[Life]:
    """A life of the job; whatever of it is left ends with the block."""
    directory = Path(options.directory)
    log = directory / f"log-{len(list(directory.glob('log-*')))}"
    launcher: Launcher = OnlyRank(options, log) if ranks == 1 else Torchrun(options, restarts, log)
    life = Life(options, launcher, ranks, log)
    try:
        yield life
    finally:
        for process in life.processes() if launcher.status() is None else []:
            process.kill()
        life.wait()


def send_to_groups(life: Life) -> None:
    """As torchrun does, and a shell: every rank is the head of its process group."""
    for pid in life.pids():
        os.killpg(pid, signal.SIGTERM)


def send_to_ranks(life: Life) -> None:
    """The ranks alone."""
    for pid in life.pids():
        os.kill(pid, signal.SIGTERM)


def send_to_all(life: Life) -> None:
    """As Slurm does: every process of the step."""
    for process in life.processes():
        process.send_signal(signal.SIGTERM)


def send_to_launcher(life: Life) -> None:
    """Torchrun passes it on to the groups of its ranks."""
    os.kill(life.launcher.pid, signal.SIGTERM)


SENDERS = {
    "groups": send_to_groups,
    "ranks": send_to_ranks,
    "every process": send_to_all,
    "launcher": send_to_launcher,
}


def losses(directory: Path, rank: int) -> dict[int, str]:
    """Iteration -> loss, bit for bit; of a repeated iteration the last."""
    lines = (directory / f"losses.{rank}").read_text().splitlines()
    return dict(json.loads(line) for line in lines)
