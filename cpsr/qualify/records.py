"""What ranks report of their checks: one file of JSON lines per rank in the work folder, appended and read by others.

Every line is complete once written, whatever happens to the process; the folder is on a disk that all ranks see.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Records", "read_records"]


class Records:
    """The file of one rank.

    Args:
        folder: the work folder.
        rank: that writes.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / f"rank-{rank:05d}.jsonl", rank

    def add(self, event: str, **fields: Any) -> None:
        """Append one line, with the time and this rank."""
        line = json.dumps({"event": event, "rank": self._rank, "unix_seconds": time.time()} | fields)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def began(self, trial: str) -> None:
        """This rank begins a check."""
        self.add("began", trial=trial)

    def ended(self, trial: str, error: str, seconds: float, figures: Mapping[str, Any]) -> None:
        """This rank has ended a check, with an error or without (empty)."""
        self.add("ended", trial=trial, error=error, seconds=seconds, figures=dict(figures))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All lines of all ranks, by time; a line that is being written is left out."""
    found = [line for path in sorted(folder.glob("rank-*.jsonl")) for line in _lines(path)]
    return sorted(found, key=lambda line: float(line["unix_seconds"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").split("\n")[:-1]:  # what follows the last newline is incomplete
        yield json.loads(text)
