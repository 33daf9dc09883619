"""Ranks that train nothing under `EmergencyDump` and `Liveness`, as processes that get real signals.

`Ranks` starts them; each of them records what it does, one JSON object per line.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cpsr.config import RanksConfig
from cpsr.ranks.board import Board
from cpsr.ranks.emergency_dump import EmergencyDump
from cpsr.ranks.heartbeat import HeartbeatFiles
from cpsr.ranks.liveness import GivenUp, Liveness

WAIT_SECONDS = 120.0  # for what comes within two; the machine may be busy


@dataclass(frozen=True)
class Options:
    """What the ranks do.

    Attributes:
        directory: of the run.
        size: number of ranks.
        machines: over which they are spread.
        life: of the run.
        gloo: every step has a collective.
        liveness: configuration.
        step_seconds: pause in every step.
        update_until: every update waits until this kind of event is reported.
        dump_seconds: how long a dump takes.
        faults: rank -> what happens to it in the step after `fault_iteration`; see `fault`.
        fault_iteration: after this many steps, which all ranks make together.
        iterations: end of the run.
    """

    directory: str
    size: int = 2
    machines: int = 1
    life: int = 0
    gloo: bool = False
    liveness: dict[str, Any] = field(default_factory=dict)
    step_seconds: float = 0.02
    update_until: str = ""
    dump_seconds: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)
    fault_iteration: int = 5
    iterations: int = 10**9


class Ranks:
    """One life of the ranks, seen from a test."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._options = Options(directory=str(directory), **options)
        self._directory = directory
        directory.mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.ranks.dumping_ranks", json.dumps(asdict(self._options))]
        self._launcher = subprocess.Popen(command, env=env)

    def notes(self, rank: int, kind: str | None = None) -> list[dict[str, Any]]:
        """What a rank recorded."""
        path = note_path(self._options, rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if kind in (None, note["kind"])]

    def wait_for(self, rank: int, kind: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th note of a kind, once it is there."""
        until(lambda: len(self.notes(rank, kind)) >= count, lambda: f"{kind} of rank {rank}: {self.notes(rank)[-5:]}")
        return self.notes(rank, kind)[count - 1]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.wait_for(rank, "began")["pid"], number)

    def status(self, rank: int) -> int:
        """A rank's exit status, once it has ended; below 0 for a signal."""
        path = status_path(self._options, rank)
        until(path.exists, lambda: f"rank {rank} has not ended: {self.notes(rank)[-5:]}")
        return int(path.read_text())

    def running(self, rank: int) -> bool:
        """Whether a rank has not ended."""
        return not status_path(self._options, rank).exists()

    def close(self) -> None:
        """End what is left."""
        for rank in range(self._options.size):
            if self.running(rank) and self.notes(rank, "began"):
                self.signal(rank, signal.SIGKILL)
        self._launcher.wait(WAIT_SECONDS)


@contextmanager
def ranks(directory: Path, **options: Any) -> Iterator[Ranks]:
    """A life whose processes end with the block."""
    started = Ranks(directory, **options)
    try:
        yield started
    finally:
        started.close()


def until(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def note_path(options: Options, rank: int) -> Path:
    return Path(options.directory) / f"notes-{options.life}.{rank}"


def status_path(options: Options, rank: int) -> Path:
    return Path(options.directory) / f"status-{options.life}.{rank}"


# The processes


def launch(options: Options) -> None:
    """Fork the ranks, so that what they need is imported once, and note how each ends."""
    if options.gloo:
        import torch.distributed as dist  # noqa: F401
    heartbeats = HeartbeatFiles(Path(options.directory), options.life)
    heartbeats.claim()
    heartbeats.remove_earlier()
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=Rank(options, board).run) for board in boards(options.size, options.machines)]
    for process in processes:
        process.start()

    def note(rank: int) -> None:
        processes[rank].join()
        path = status_path(options, rank)
        temporary = path.with_name(f"{path.name}.tmp")  # of this rank alone: two may end at the same moment
        temporary.write_text(str(processes[rank].exitcode))
        temporary.replace(path)

    threads = [threading.Thread(target=note, args=(rank,)) for rank in range(options.size)]
    for thread in threads:
        thread.start()


def boards(size: int, machines: int = 1) -> list[Board]:
    """Each rank's board, on so many machines of equally many ranks."""
    on_each = size // machines
    leaders = [rank - rank % on_each for rank in range(size)]
    shared = {leader: Board.create(size) for leader in leaders}
    return [Board(rank, leaders, shared[leader]) for rank, leader in enumerate(leaders)]


class Rank:
    """One process: the loop that `CPSRRecovery` and the user's make together, without their work."""

    def __init__(self, options: Options, board: Board) -> None:
        self.options, self.board, self.rank = options, board, board.rank
        self.stop = False
        self.dumping, self.reported = threading.Event(), threading.Event()

    def note(self, kind: str, **more: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.monotonic(), **more}) + "\n"
        with note_path(self.options, self.rank).open("a") as file:
            file.write(line)

    def report(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        self.note(kind, message=message, iteration=iteration)
        if kind == self.options.update_until:
            self.reported.set()

    def dump(self, iteration: int) -> None:
        self.dumping.set()
        time.sleep(self.options.dump_seconds)
        self.note("dump", iteration=iteration)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def run(self) -> None:
        options = self.options
        config = RanksConfig(**options.liveness)
        liveness: Liveness
        emergency = EmergencyDump(self.dump, self.report, config.sigterm_grace_seconds, lambda: liveness.obstacle())

        def leave(why: GivenUp) -> None:
            emergency.leave(why.reason)

        liveness = Liveness(Path(options.directory), options.life, self.board, config, leave, self.report)
        signal.signal(signal.SIGTERM, self.on_sigterm)
        emergency.watch_sigterm()
        if options.gloo:
            import torch.distributed as dist

            meeting = f"file://{options.directory}/meeting-{options.life}"
            dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=options.size)
        liveness.start()
        emergency.end_update(0)
        self.note("began", pid=os.getpid())
        try:
            self.train(emergency, liveness)
        except RuntimeError as error:
            liveness.settle()
            emergency.dump(f"the loop was left by {type(error).__name__}")
            liveness.close(ended=False)
            emergency.close()
            raise
        liveness.finish()
        self.note("ended")
        liveness.close(ended=True)
        emergency.close()

    def train(self, emergency: EmergencyDump, liveness: Liveness) -> None:
        options = self.options
        for iteration in range(1, options.iterations + 1):
            if iteration == options.fault_iteration + 1:
                self.fault(options.faults.get(str(self.rank), ""), liveness)
            time.sleep(options.step_seconds)
            liveness.signs += 1
            if options.gloo:
                import torch
                import torch.distributed as dist

                self.note("reduces", iteration=iteration)
                dist.all_reduce(torch.ones(1))
            emergency.begin_update()
            self.note("update", iteration=iteration)
            if options.update_until:
                self.reported.wait()
            liveness.step(iteration)
            emergency.end_update(iteration)
            self.note("step", iteration=iteration)
            if self.stop:
                emergency.leave_in_order()
                return

    def fault(self, what: str, liveness: Liveness) -> None:
        """What happens to this rank.

        `waits`: for ever, as in a data loader; `hangs`: for ever in C, as in a collective of NCCL; `forks`: has a child
        that outlives it, and waits; `waits for a dump`: until one begins; `ends`: leaves its loop.
        """
        if what:
            self.note(what)
        if what == "waits":
            threading.Event().wait()
        if what == "waits as others do":
            liveness.signs += 1
            threading.Event().wait()
        if what == "hangs":
            ctypes.CDLL(None).pause()
        if what == "forks":
            child = os.fork()
            if not child:
                time.sleep(WAIT_SECONDS)
                os._exit(0)
            self.note("forked", pid=child)
            threading.Event().wait()
        if what == "waits for a dump":
            self.dumping.wait()
        if what == "saves":
            with liveness.busy():
                time.sleep(3.0)
        if what == "ends":
            self.stop = True


if __name__ == "__main__":
    launch(Options(**json.loads(sys.argv[1])))
