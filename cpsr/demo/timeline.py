"""From the kill to the first new step: what a starting process notes, and the parts of the way that follow from it."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the job notes its start before it imports anything of weight
    from cpsr.journal import RecoveryRow

__all__ = ["Notes", "Part", "read_notes", "restart_parts"]

PROCESS_START_FIELD = 19  # of /proc/<pid>/stat behind the name: when the process started, in ticks since the boot


class Notes:
    """When one process of the job reached what.

    In this order: `started`, `frameworks` and `cpsr` imported, `job` set up, run `opened`, restored state `evaluated`,
    first step taken (`stepped`).
    """

    def __init__(self) -> None:
        self.unix_seconds = {"started": _process_started_unix_seconds()}

    def add(self, name: str) -> None:
        """Note that this is reached now."""
        self.unix_seconds[name] = time.time()

    def write(self, run_dir: Path, rank: int) -> None:
        """Leave them for the report."""
        (run_dir / f"resumed-{rank}.json").write_text(json.dumps(self.unix_seconds))


def read_notes(run_dir: Path) -> dict[str, float]:
    """When the last rank had reached what, in Unix seconds; of the ranks that took a step after a predicted restart."""
    noted = [json.loads(path.read_text()) for path in run_dir.glob("resumed-*.json")]
    return {name: max(notes[name] for notes in noted) for name in noted[0]}


def _process_started_unix_seconds() -> float:
    """When this process was started, to a hundredth of a second; now, if the system does not provide it."""
    stat = Path("/proc/self/stat")
    if not stat.exists():  # not Linux
        return time.time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[PROCESS_START_FIELD])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True)
class Part:
    """One part of the way.

    Attributes:
        name: for people.
        seconds: how long it took.
        ours: whether it is CPSR's work, and not the launcher's, the framework's or the job's.
    """

    name: str
    seconds: float
    ours: bool = False


def restart_parts(kill: float, left: float | None, reached: Mapping[str, float], recovery: "RecoveryRow") -> list[Part]:
    """The way from the kill to the first finished step of the new processes, in parts that follow each other.

    Args:
        kill: when the signal was sent, in Unix seconds, as all that follow.
        left: when the failed life ended; None where rank 0, which keeps the journal, was killed.
        reached: when the last new process had reached what (`read_notes`).
        recovery: how the new life began.
    """
    if left is None:
        parts = [Part("noticed, processes started anew", reached["started"] - kill)]
    else:
        # What its framework takes to notice is a small part: it is counted as ours, since closing is.
        parts = [Part("the other rank notices, closes the run", left - kill, ours=True)]
        parts += [Part("it exits, processes are started anew", reached["started"] - left)]
    ways = {"load": recovery.load_seconds, "predict": recovery.predict_seconds, "inject": recovery.inject_seconds}
    restoring = sum(seconds or 0.0 for seconds in ways.values())
    return [
        *parts,
        Part("imports of torch and DeepSpeed", reached["frameworks"] - reached["started"]),
        Part("imports of CPSR", reached["cpsr"] - reached["frameworks"], ours=True),
        Part("process group, engine, data", reached["job"] - reached["cpsr"]),
        Part("opening the run", reached["opened"] - reached["job"] - restoring, ours=True),
        *(Part(name, seconds or 0.0, ours=True) for name, seconds in ways.items()),
        Part("the demo's own evaluation", reached["evaluated"] - reached["opened"]),
        Part("first step", reached["stepped"] - reached["evaluated"]),
    ]
