"""`checkpoint.target` in one life of a run: fetched from when it begins, copied to while it trains."""

import logging
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.group import Group
from cpsr.target.copier import Copier
from cpsr.target.place import open_place
from cpsr.target.restart import Fetcher

__all__ = ["CheckpointTarget", "Said"]


class Said(NamedTuple):
    """Something for the log and the journal, as `Recorder.event` takes it."""

    kind: str
    message: str
    iteration: int | None
    level: int


class CheckpointTarget:
    """One rank's side of the target; without a configured one every method does nothing.

    Args:
        config: names the target, how often it gets a copy, and how many stay there.
        run_dir: the run's directory, on storage that every rank shares.
        group: the ranks. `adopt_run` and `fetch` are collectives; rank 0 alone copies, because all ranks' files lie
            in the run directory that it sees.

    Raises:
        ConfigError: the URL is not usable, or leads into the run directory itself.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, group: Group) -> None:
        self._config = config
        self._run_dir = run_dir
        self._group = group
        self._said: deque[Said] = deque()
        self._copier: Copier | None = None
        self._place = None if config.target is None else open_place(config.target, run_dir)
        self._fetcher = None if self._place is None else Fetcher(self._place, run_dir, self._say)

    def adopt_run(self) -> None:
        """Before the run directory is opened: where it is new, it continues the run whose copies are at the target.

        Raises:
            CPSRError: see `Fetcher.adopt_run`.
        """
        if self._fetcher is not None:
            self._fetcher.adopt_run(self._group)

    def fetch(self, store: CheckpointStore, damaged: Collection[int]) -> int | None:
        """Before the newest checkpoint is loaded, and again after one could not be: fetch what is newer.

        Args:
            store: the run's checkpoints; nobody is writing.
            damaged: iterations that were found not to be usable.

        Returns:
            Iteration of the checkpoint that is in the run directory now, None where nothing was fetched.

        Raises:
            CPSRError: see `Fetcher.fetch`.
        """
        return None if self._fetcher is None else self._fetcher.fetch(store, self._group, damaged)

    def start(self, store: CheckpointStore) -> None:
        """Begin to follow the committed checkpoints of the run (rank 0; nothing elsewhere)."""
        if self._place is not None and self._group.rank == 0:
            self._copier = Copier(self._place, self._config, store, self._run_dir, self._say)

    def notify(self, iteration: int | None) -> None:
        """This checkpoint is the newest committed one; returns at once, at every step."""
        if self._copier is not None and iteration is not None:
            self._copier.notify(iteration)

    def said(self) -> list[Said]:
        """What is to be logged and recorded since the last call, oldest first."""
        drained: list[Said] = []
        while self._said:
            drained.append(self._said.popleft())
        return drained

    def close(self, timeout_seconds: float) -> None:
        """Copy the newest checkpoint if it is not at the target yet, and end.

        Args:
            timeout_seconds: how long that may take; 0 copies nothing more.
        """
        if self._copier is not None:
            self._copier.close(timeout_seconds)

    def _say(self, kind: str, message: str, iteration: int | None, level: int = logging.INFO) -> None:
        self._said.append(Said(kind, message, iteration, level))
