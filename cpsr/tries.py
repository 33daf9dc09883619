"""How often something was tried from one checkpoint, over the lives of a run, so that it does not fail for ever."""

import json
import logging
from pathlib import Path
from typing import Any

from cpsr.checkpoint.files import write_bytes
from cpsr.group import Group

__all__ = ["Tries"]

logger = logging.getLogger(__name__)


class Tries:
    """Tries of one kind; only those from the newest checkpoint that was tried are known.

    Args:
        path: the file in which they are counted.
        group: the ranks.
    """

    def __init__(self, path: Path, group: Group) -> None:
        self._path = path
        self._group = group

    def of(self, checkpoint_iteration: int) -> tuple[int, str]:
        """How often it was tried from this checkpoint, and what was noted the last time; a collective."""
        noted = self._group.broadcast(self._read() if self._group.rank == 0 else None)
        same = noted.get("checkpoint_iteration") == checkpoint_iteration
        return (int(noted.get("tries", 1)), str(noted.get("error", ""))) if same else (0, "")

    def note(self, checkpoint_iteration: int, error: str) -> None:
        """One more, on whichever rank it is known.

        Raises:
            OSError: the file system refused.
        """
        before = self._read()
        same = before.get("checkpoint_iteration") == checkpoint_iteration
        noted = {
            "checkpoint_iteration": checkpoint_iteration,
            "rank": self._group.rank,
            "error": error,
            "tries": int(before.get("tries", 1)) + 1 if same else 1,
        }
        write_bytes(self._path, json.dumps(noted).encode("ascii"), fsync=False)

    def _read(self) -> dict[str, Any]:
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning("%s cannot be read and is ignored: %s", self._path.name, error)
            return {}
        return noted if isinstance(noted, dict) else {}
