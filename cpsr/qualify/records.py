"""What checks leave in a work folder: JSON lines of each rank, folders of runs, and their shared memory.

Every line is complete once written, whatever happens to the process; the folder is on a disk that all ranks see.
"""

import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY

__all__ = ["Records", "clear", "folder_name", "read_records", "release_memory"]


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


def folder_name(trial: str) -> str:
    """The name of a check as that of its folder."""
    return trial.replace(": ", "--").replace(" ", "-")


def clear(folder: Path) -> None:
    """Remove what an earlier call left in its work folder, and its shared memory."""
    release_memory(folder)
    for path in folder.glob("rank-*.jsonl"):
        path.unlink()
    for path in folder.glob("*--*"):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def release_memory(folder: Path, spared: Collection[str] = ()) -> int:
    """Free this machine's shared memory of the checks in a work folder; returns the bytes.

    Args:
        folder: the work folder.
        spared: names of folders in it whose memory stays.
    """
    freed = 0
    for identity in folder.glob(f"*/run/{IDENTITY}"):
        if identity.parts[-3] not in spared:
            freed += remove_memory_states(json.loads(identity.read_text(encoding="utf-8"))["run_id"])
    return freed
