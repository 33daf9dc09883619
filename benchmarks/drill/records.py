"""What the ranks of a run have written down, and what follows from it for each failure."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Line", "Records", "Recovery", "recovery"]


@dataclass(frozen=True)
class Line:
    """One line of a rank's record.

    Attributes:
        unix_seconds: when it was written.
        rank: by which rank.
        pid: by which of its processes, numbered on its machine.
        what: `process`, `step`, `note` or `end`.
        words: what follows: name of the machine; step, loss and share; text; digest.
    """

    unix_seconds: float
    rank: int
    pid: int
    what: str
    words: list[object]

    @property
    def step(self) -> int:
        """The step that was complete."""
        return int(str(self.words[0]))


class Records:
    """The records of a run, read again as they grow.

    Args:
        directory: of the job.

    Attributes:
        lines: of all ranks; those of a rank in the order of time.
        first_step_seconds: Unix time of the first step; infinite before it.
        last_step_seconds: of the newest one; 0 before the first.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "records"
        self._read: dict[Path, int] = defaultdict(int)
        self.lines: list[Line] = []
        self.first_step_seconds = math.inf
        self.last_step_seconds = 0.0

    def refresh(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob("rank-*")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    seconds, pid, what, *words = json.loads(line)
                    self.lines.append(Line(seconds, int(path.name.partition("-")[2]), pid, what, words))
                    if what == "step":
                        self.first_step_seconds = min(self.first_step_seconds, seconds)
                        self.last_step_seconds = max(self.last_step_seconds, seconds)

    def process(self, rank: int) -> tuple[int, str] | None:
        """Number and machine of a rank's newest process."""
        found = [line for line in self.lines if line.rank == rank and line.what == "process"]
        return (found[-1].pid, str(found[-1].words[1])) if found else None

    @property
    def steps(self) -> list[Line]:
        """Steps, in the order of time."""
        return sorted((line for line in self.lines if line.what == "step"), key=lambda line: line.unix_seconds)

    @property
    def weights(self) -> list[str]:
        """The digest of each rank's last weights, by rank."""
        ends = {line.rank: str(line.words[0]) for line in self.lines if line.what == "end"}
        return [ends[rank] for rank in sorted(ends)]


@dataclass(frozen=True)
class Recovery:
    """How the job came back from a failure.

    Attributes:
        step_seconds: from the failure to the end of the first step that began after it.
        lost_iterations: steps that were complete before the failure and had to be trained again.
    """

    step_seconds: float
    lost_iterations: int


def recovery(records: Records, failed_unix_seconds: float, *, all_leave: bool) -> Recovery | None:
    """How the job came back from a failure; None if it has not yet.

    Args:
        records: of the run.
        failed_unix_seconds: when it happened.
        all_leave: whether no process of before goes on, as after SIGTERM, where some train until they leave.
    """
    lines = sorted(records.lines, key=lambda line: line.unix_seconds)
    old = {(line.rank, line.pid) for line in lines if line.unix_seconds <= failed_unix_seconds}
    done, began = 0, set()
    for line in lines:
        process = line.rank, line.pid
        if line.unix_seconds <= failed_unix_seconds or (all_leave and process in old):
            done = max(done, line.step) if line.what == "step" else done
        elif line.what == "step" and process in began:
            return Recovery(line.unix_seconds - failed_unix_seconds, max(0, done - line.step + 1))
        else:
            began.add(process)  # its next step begins after this line, and so after the failure
    return None
