"""`checkpoint.target` in one life of a run: fetches at the start, copies during training."""

import logging
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from cpsr.checkpoint.remote.copier import Copier
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.restart import Fetcher
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.ranks.group import Group

__all__ = ["CheckpointTarget", "Report"]


class Report(NamedTuple):
    """An event for the log and the journal, with the arguments of `RankJournal.event`."""

    kind: str
    message: str
    iteration: int | None
    level: int


class CheckpointTarget:
    """One rank's side of the target; without a configured target every method does nothing.

    Args:
        config: the target, how often it gets a copy, and how many copies it keeps.
        run_dir: the run's directory, on storage that every rank shares.
        group: the ranks. `adopt_run` and `fetch` are collectives; rank 0 alone copies, because it sees all ranks'
            files in the run directory.

    Raises:
        ConfigError: the URL is not usable, or leads into the run directory itself.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, group: Group) -> None:
        self._config = config
        self._run_dir = run_dir
        self._group = group
        self._reports: deque[Report] = deque()
        self._copier: Copier | None = None
        self._place = None if config.target is None else open_place(config.target, run_dir)
        self._fetcher = None if self._place is None else Fetcher(self._place, run_dir, self._report)

    def adopt_run(self) -> None:
        """Before the run directory is opened: a new one adopts the run whose copies are at the target.

        Raises:
            CPSRError: see `Fetcher.adopt_run`.
        """
        if self._fetcher is not None:
            self._fetcher.adopt_run(self._group)

    def fetch(self, store: CheckpointStore, damaged: Collection[int]) -> int | None:
        """Fetch a newer checkpoint, before the newest one is loaded and after one could not be.

        Args:
            store: the run's checkpoints; nobody is writing.
            damaged: iterations of unusable checkpoints.

        Returns:
            Iteration of the checkpoint that is in the run directory now, None where nothing was fetched.

        Raises:
            CPSRError: see `Fetcher.fetch`.
        """
        return None if self._fetcher is None else self._fetcher.fetch(store, self._group, damaged)

    def start(self, store: CheckpointStore) -> None:
        """Begin to copy the committed checkpoints of the run (rank 0; no effect elsewhere)."""
        if self._place is not None and self._group.rank == 0:
            self._copier = Copier(self._place, self._config, store, self._run_dir, self._report)

    def notify(self, iteration: int | None) -> None:
        """Announce the newest committed checkpoint, at every step; returns at once."""
        if self._copier is not None and iteration is not None:
            self._copier.notify(iteration)

    def reports(self) -> list[Report]:
        """Events since the last call, oldest first."""
        drained: list[Report] = []
        while self._reports:
            drained.append(self._reports.popleft())
        return drained

    def close(self, timeout_seconds: float) -> None:
        """Copy the newest checkpoint if it is not at the target yet, and end.

        Args:
            timeout_seconds: how long that may take; 0 copies nothing more.
        """
        if self._copier is not None:
            self._copier.close(timeout_seconds)

    def _report(self, kind: str, message: str, iteration: int | None, level: int = logging.INFO) -> None:
        self._reports.append(Report(kind, message, iteration, level))
