"""The runs of a service: one run directory, or a directory with several."""

import os
from pathlib import Path

from cpsr.service.problems import Problem

__all__ = ["Runs"]

RUN_FILES = ("run.json", "journal.db")  # either of them shows that a directory is a run's
NAMES_LISTED = 5
NAME_BYTES = 255  # longer ones are no entry of any directory, and asking for them is an error


class Runs:
    """Finds run directories by name, only inside its own directory.

    A directory that is a run itself, or does not hold any, is the only one: it need not exist yet.

    Args:
        root: a run directory, or one that holds several.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        """Of all runs, in order; at least one."""
        runs = [] if _is_run(self.root) else self._children()
        return runs or [self._own_name]

    def find(self, name: str | None) -> Path:
        """The directory of a run.

        Args:
            name: None where there is only one.

        Raises:
            Problem: there is no run of this name (404), or several and none is named (409).
        """
        if name is not None and not _is_run(self.root):
            path = self.root / name
            # Only a name of one entry of this directory, which is no link, so that it cannot lead anywhere else.
            if _is_entry(name) and len(os.fsencode(name)) <= NAME_BYTES and not path.is_symlink() and _is_run(path):
                return path
        names = self.names()
        if name is None and len(names) > 1:
            listed = ", ".join(names[:NAMES_LISTED])
            raise Problem(409, "run_needed", f"there are {len(names)} runs: {listed}", "name one of them with ?run=")
        if names == [self._own_name] and name in (None, self._own_name):
            return self.root
        if name is None:
            return self.root / names[0]
        raise Problem(404, "no_such_run", f"there is no run {name[:100]!r} here", "GET /runs lists those there are")

    @property
    def _own_name(self) -> str:
        return self.root.absolute().name or "run"

    def _children(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []  # reported with the journal, which cannot be read either
        return sorted(name for name in folders if _is_run(self.root / name))


def _is_entry(name: str) -> bool:
    return "\0" not in name and "/" not in name and os.sep not in name and name not in ("", os.curdir, os.pardir)


def _is_run(directory: Path) -> bool:
    try:
        return any((directory / name).exists() for name in RUN_FILES)
    except OSError:
        return False
