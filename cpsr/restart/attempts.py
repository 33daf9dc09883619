"""Counts attempts from one checkpoint over the lives of a run, so that it does not fail for ever."""

import json
import logging
from pathlib import Path
from typing import Any

from cpsr.checkpoint.files import write_bytes
from cpsr.ranks.group import Group

__all__ = ["Attempts"]

logger = logging.getLogger(__name__)


class Attempts:
    """Attempts of one kind; only those from the newest checkpoint are counted.

    Args:
        path: the file that holds the count.
        group: the ranks.
    """

    def __init__(self, path: Path, group: Group) -> None:
        self._path = path
        self._group = group

    def of(self, checkpoint_iteration: int) -> tuple[int, str]:
        """The number of attempts from this checkpoint, and the error recorded at the last one; a collective."""
        record = self._group.broadcast(self._read() if self._group.rank == 0 else None)
        same = record.get("checkpoint_iteration") == checkpoint_iteration
        return (int(record.get("tries", 1)), str(record.get("error", ""))) if same else (0, "")

    def record(self, checkpoint_iteration: int, error: str) -> None:
        """Count one more attempt, on the rank that detects it.

        Raises:
            OSError: the file system refused.
        """
        before = self._read()
        same = before.get("checkpoint_iteration") == checkpoint_iteration
        attempt = {
            "checkpoint_iteration": checkpoint_iteration,
            "rank": self._group.rank,
            "error": error,
            "tries": int(before.get("tries", 1)) + 1 if same else 1,
        }
        write_bytes(self._path, json.dumps(attempt).encode("ascii"), fsync=False)

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning("%s cannot be read and is ignored: %s", self._path.name, error)
            return {}
        return record if isinstance(record, dict) else {}
