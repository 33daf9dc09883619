"""What a starting process of the job notes: when it reached what."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "EVALUATED",
    "FRAMEWORKS",
    "JOB",
    "OPENED",
    "PRODUCT",
    "STARTED",
    "STEPPED",
    "Notes",
    "process_started_unix_seconds",
    "read_notes",
]

PROCESS_START_FIELD = 19  # of /proc/<pid>/stat behind the name: when the process started, in ticks since the boot

# In the order in which they are reached.
STARTED = "started"
FRAMEWORKS = "frameworks imported"
PRODUCT = "CPSR imported"
JOB = "job set up"
OPENED = "run opened"
EVALUATED = "restored state evaluated"
STEPPED = "first step done"


@dataclass
class Notes:
    """When one process reached what.

    Attributes:
        unix_seconds: by name.
    """

    unix_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Note that this is reached now."""
        self.unix_seconds[name] = time.time()

    def write(self, run_dir: Path, rank: int) -> None:
        """Leave them for the report."""
        _path(run_dir, rank).write_text(json.dumps(self.unix_seconds))


def read_notes(run_dir: Path, ranks: int) -> dict[str, float]:
    """When the last rank had reached what, in Unix seconds.

    Raises:
        FileNotFoundError: a rank wrote none: it took no step after a predicted restart.
    """
    noted = [json.loads(_path(run_dir, rank).read_text()) for rank in range(ranks)]
    return {name: max(notes[name] for notes in noted) for name in noted[0]}


def process_started_unix_seconds() -> float:
    """When this process was started, to a hundredth of a second; now, if the system does not provide it."""
    stat = Path("/proc/self/stat")
    if not stat.exists():  # not Linux
        return time.time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[PROCESS_START_FIELD])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"resumed-{rank}.json"
