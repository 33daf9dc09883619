"""One job of a rehearsal: where it is cut short, `cpsr run` with the user's arguments, and what its ranks recorded."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from cpsr.checkpoint.file_lock import FileInUseError
from cpsr.checkpoint.memory_owners import free_run
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import RunMismatchError
from cpsr.launch.process import launched
from cpsr.life.rehearsed_life import REHEARSED, Cut, RehearsedJob
from cpsr.ranks.exits import SIGTERM_STATUS
from cpsr.state.witness import Witness, read_witnesses

__all__ = ["STEPS_MIN", "PlannedCut", "Ran", "ends_of_passes", "interval_of", "plan_cuts", "run"]

TAIL_LINES = 12
STEPS_MIN = 6
INTERVALS = 6  # between checkpoints in one job


@dataclass(frozen=True)
class PlannedCut:
    """One cut, and the checkpoint before it.

    Attributes:
        cut: see there.
        interval_iterations: between checkpoints.
        name: for people.
    """

    cut: Cut
    interval_iterations: int
    name: str


def interval_of(steps: int) -> int:
    """Iterations between checkpoints of a job of so many steps."""
    return max(1, min(5, steps // INTERVALS))


def plan_cuts(steps: int, ranks: int, ends: Sequence[int]) -> list[PlannedCut]:
    """One SIGKILL of a rank, one of all ranks, and one SIGTERM, each in a job of its own.

    Args:
        steps: of each job.
        ranks: of each job.
        ends: the last step of each pass over the data that ends within these.
    """
    every = interval_of(steps)
    later = max(1, every - 2)  # steps after a checkpoint, so that a restart repeats some
    last = ranks - 1
    at = 2 * every + later
    while ends and at + 1 < steps and {at - 1, at} & set(ends):  # inside a pass, where its length allows
        at += 1
    of_all, every_of_all, where = 3 * every + later, every, ""
    if (end := next((end for end in ends if 2 <= end <= steps - 3), None)) is not None:
        # The checkpoint of the pass's last step is complete when the next step is.
        of_all, where = end + 1, ", the first of a new pass"
        every_of_all = next((count for count in range(min(end, 5), 1, -1) if end % count == 0), end)
    return [
        PlannedCut(Cut("SIGKILL", at, last), every, f"SIGKILL of rank {last} after step {at}"),
        PlannedCut(Cut("SIGKILL", of_all), every_of_all, f"SIGKILL of all ranks after step {of_all}{where}"),
        PlannedCut(Cut("SIGTERM", 4 * every + 1, last), every, f"SIGTERM after step {4 * every + 1}"),
    ]


def ends_of_passes(witnesses: Sequence[Witness]) -> list[int]:
    """The last step of each complete pass over the data.

    Args:
        witnesses: of one rank, in the order of the steps.
    """
    found = []
    for before, now in pairwise(witnesses):
        if now.epoch > before.epoch:
            found.append(now.iteration if now.batch == 0 else before.iteration)
    return found


@dataclass(frozen=True)
class Ran:
    """A job that has ended, with the restarts after its cut.

    Attributes:
        asked: as its ranks were told.
        status: exit status of its last launcher; None: it hung, and was ended.
        seconds: it took.
    """

    asked: RehearsedJob
    status: int | None
    seconds: float

    @property
    def folder(self) -> Path:
        """Its records, with the run directory."""
        return Path(self.asked.folder)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @cached_property
    def ends(self) -> list[dict[str, int]]:
        """How the last life ended, by rank; empty where none ended in order."""
        paths = sorted(self.folder.glob("end-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 where no run was opened."""
        return self.ends[0]["ranks"] if self.ends else 0

    @property
    def iteration(self) -> int:
        """The last step."""
        return min((end["iteration"] for end in self.ends), default=0)

    @property
    def succeeded(self) -> bool:
        """Whether it came to its last step, or to the end of the script."""
        return self.status == 0 or (self.status == SIGTERM_STATUS and self.iteration >= self.asked.last_iteration)

    @property
    def was_cut(self) -> bool:
        """Whether a rank was cut short."""
        return any(self.folder.glob("cut-*"))

    def witnesses(self, rank: int) -> dict[int, Witness]:
        """The last execution of each step."""
        return {one.iteration: one for one in read_witnesses(self.run_dir, rank)}

    def variables(self, rank: int) -> dict[int, dict[str, str]]:
        """Step -> name of a variable -> hash, of the last execution of each step."""
        found: dict[int, dict[str, str]] = {}
        for path in sorted(self.folder.glob(f"loop-{rank}-*.jsonl"), key=_life_of):
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a kill may leave half a line
                    record = json.loads(line)
                    found[record["iteration"]] = record["values"]
        return found

    @cached_property
    def restarted_after(self) -> int | None:
        """The step that the last life went on from; None if there was one life."""
        paths = sorted(self.folder.glob("loop-0-*.jsonl"), key=_life_of)
        lines = paths[-1].read_text(encoding="utf-8").splitlines() if len(paths) > 1 else []
        return int(json.loads(lines[0])["iteration"]) - 1 if lines else None

    @property
    def last_lines(self) -> list[str]:
        """The end of what the job printed."""
        lines = (self.folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    @property
    def failure(self) -> str:
        """What became of it, as a predicate, with what `cpsr run` said about a job that it does not start again."""
        if self.status is None:
            return f"hung, and was ended after {self.seconds:.0f} s"
        said = [line for line in self.last_lines if line.startswith("[cpsr run]")]
        return f"failed (exit status {self.status})" + (f": {said[-1]}" if said else "")

    def free(self) -> None:
        """Free the host memory that the run may have left."""
        with suppress(RunMismatchError, FileInUseError, OSError):
            free_run(run_id(self.run_dir))


def run(arguments: Sequence[str], asked: RehearsedJob, limit_seconds: float | None) -> Ran:
    """Run a job to its last step, and start it again after it has left with SIGTERM.

    Args:
        arguments: of `cpsr run`.
        asked: the job; its folder is made here.
        limit_seconds: after which it counts as hanging; None: never.
    """
    folder = Path(asked.folder)
    folder.mkdir(parents=True)
    environment = {REHEARSED: asked.to_variable()}
    began = time.monotonic()
    status: int | None = None
    try:
        for _ in range(2):
            left = None if limit_seconds is None else max(0.0, began + limit_seconds - time.monotonic())
            status = _launch(folder, environment, arguments, left)
            ran = Ran(asked, status, time.monotonic() - began)
            if status != SIGTERM_STATUS or not ran.was_cut or ran.succeeded:
                break
    finally:
        ran = Ran(asked, status, time.monotonic() - began)
        ran.free()
    return ran


def _launch(
    folder: Path, environment: Mapping[str, str], arguments: Sequence[str], limit_seconds: float | None
) -> int | None:
    """The exit status of a launcher; None where it took longer."""
    for path in folder.glob("end-*.json"):  # of a life that left: this one is to end better
        path.unlink()
    with launched(arguments, folder / "output", environment) as process, suppress(subprocess.TimeoutExpired):
        return process.wait(limit_seconds)
    return None


def _life_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
