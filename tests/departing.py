"""Ranks that train nothing under `Departure` and `Liveness`, as processes that get real signals.

`Ranks` starts them; every one of them notes what it does, one JSON object a line.
"""

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

from cpsr.config import LivenessConfig
from cpsr.departure import Departure
from cpsr.liveness import Liveness

WAIT_SECONDS = 30.0  # for what comes within two; the machine may be busy


@dataclass(frozen=True)
class Options:
    """What the ranks do.

    Attributes:
        directory: of the run.
        size: number of ranks.
        life: of the run.
        gloo: every step has a collective.
        liveness: configuration.
        step_seconds: pause in every step.
        update_seconds: pause in every update.
        dump_seconds: how long a dump takes.
        faults: rank -> what happens to it in the step after `fault_iteration`; see `fault`.
        fault_iteration: after this many steps, which all ranks make together.
        iterations: end of the run.
    """

    directory: str
    size: int = 2
    life: int = 0
    gloo: bool = False
    liveness: dict[str, Any] = field(default_factory=dict)
    step_seconds: float = 0.02
    update_seconds: float = 0.0
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
        command = [sys.executable, "-m", "tests.departing", json.dumps(asdict(self._options))]
        self._launcher = subprocess.Popen(command, env=env)

    def notes(self, rank: int, kind: str | None = None) -> list[dict[str, Any]]:
        """What a rank noted."""
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
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=Rank(options, rank).run) for rank in range(options.size)]
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


class Rank:
    """One process: the loop that `CPSRRecovery` and the user's make together, without their work."""

    def __init__(self, options: Options, rank: int) -> None:
        self.options, self.rank = options, rank
        self.stop = False

    def note(self, kind: str, **more: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.monotonic(), **more}) + "\n"
        with note_path(self.options, self.rank).open("a") as file:
            file.write(line)

    def tell(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        self.note(kind, message=message, iteration=iteration)

    def dump(self, iteration: int) -> None:
        time.sleep(self.options.dump_seconds)
        self.note("dump", iteration=iteration)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def run(self) -> None:
        options = self.options
        config = LivenessConfig(**options.liveness)
        liveness: Liveness
        departure = Departure(self.dump, self.tell, config.sigterm_grace_seconds, lambda: liveness.obstacle())
        liveness = Liveness(
            Path(options.directory), options.life, self.rank, options.size, config, departure.leave, self.tell
        )
        signal.signal(signal.SIGTERM, self.on_sigterm)
        departure.hear_sigterm()
        if options.gloo:
            import torch.distributed as dist

            meeting = f"file://{options.directory}/meeting-{options.life}"
            dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=options.size)
        liveness.start()
        departure.end_update(0)
        self.note("began", pid=os.getpid())
        try:
            self.train(departure, liveness)
        except RuntimeError as error:
            departure.dump(f"the loop was left by {type(error).__name__}")
            liveness.close(ended=False)
            departure.close()
            raise
        liveness.finish()
        self.note("ended")
        liveness.close(ended=True)
        departure.close()

    def train(self, departure: Departure, liveness: Liveness) -> None:
        options = self.options
        for iteration in range(1, options.iterations + 1):
            if iteration == options.fault_iteration + 1:
                self.fault(options.faults.get(str(self.rank), ""), liveness)
            time.sleep(options.step_seconds)
            liveness.sign()
            if options.gloo:
                import torch
                import torch.distributed as dist

                dist.all_reduce(torch.ones(1))
            departure.begin_update()
            self.note("update", iteration=iteration)
            time.sleep(options.update_seconds)
            liveness.step(iteration)
            departure.end_update(iteration)
            self.note("step", iteration=iteration)
            if self.stop:
                return

    def fault(self, what: str, liveness: Liveness) -> None:
        """`waits`: for ever, as in a data loader; `waits busy`: the same, on purpose; `ends`: leaves its loop."""
        if what:
            self.note(what)
        if what == "waits":
            threading.Event().wait()
        if what == "waits as others do":
            liveness.sign()
            threading.Event().wait()
        if what == "saves":
            with liveness.busy():
                time.sleep(3.0)
        if what == "ends":
            self.stop = True


if __name__ == "__main__":
    launch(Options(**json.loads(sys.argv[1])))
