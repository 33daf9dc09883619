"""`checkpoint.target` in one life of a run: fetches at the start, copies during training."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from cpsr.checkpoint.background import yield_to_training
from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.files import read_bytes
from cpsr.checkpoint.manifest import COMMIT, step_iteration
from cpsr.checkpoint.remote.catalogue import IDENTITY, Copy, scan
from cpsr.checkpoint.remote.fetcher import Fetcher, Report, given_up_in
from cpsr.checkpoint.remote.place import Place, open_place
from cpsr.checkpoint.remote.transfer import CopyStoppedError, remove_old, set_aside, upload
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError, RunMismatchError, TargetError
from cpsr.ranks.group import Group

__all__ = ["CheckpointTarget", "Copier"]

logger = logging.getLogger(__name__)

# The thread looks for a stop between two pieces; a request that hangs is abandoned with it.
STOP_SECONDS = 0.5
THREAD_NAME = "cpsr-target"


class CheckpointTarget:
    """One rank's side of the target; without a configured target every method does nothing.

    Args:
        config: the target, and how many copies it keeps.
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
        self._fetcher = None if self._place is None else Fetcher(self._place, run_dir, self._reports.append)

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
            keep = self._config.target_keep_checkpoints
            self._copier = Copier(self._place, keep, store, self._run_dir, self._reports.append)

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


class Copier:
    """The thread that copies the newest committed checkpoint to a target; it reports failures, and never raises one.

    One copy is under way at a time. Of the checkpoints committed meanwhile the newest is copied next, so a slow target
    gets fewer copies, and no queue grows. After a failure the next checkpoint is the next attempt.

    Args:
        place: the target.
        keep: how many copies stay.
        store: the run's checkpoints.
        run_dir: the run's directory.
        report: takes an event, from the thread, too.
    """

    def __init__(
        self, place: Place, keep: int, store: CheckpointStore, run_dir: Path, report: Callable[[Report], None]
    ) -> None:
        self._place = place
        self._keep = keep
        self._store = store
        self._run_dir = run_dir
        self._report = report
        self._newest: int | None = None
        self._copying: int | None = None
        self._overtaken = self._untidy = self._refused = False  # each is reported once
        self._failures = 0  # in a row
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def notify(self, iteration: int) -> None:
        """Announce the newest committed checkpoint; returns at once."""
        if iteration == self._newest:
            return
        self._newest, copying = iteration, self._copying
        if copying not in (None, iteration) and not self._overtaken:
            self._overtaken = True
            message = (
                f"checkpoint {iteration} was committed while {copying} is still being copied to {self._place.shown}: "
                "of those that come meanwhile the newest is copied next, the others are not (reported once)"
            )
            self._report(Report("target slow", message, iteration, logging.WARNING))
        self._wake.set()

    def close(self, timeout_seconds: float) -> None:
        """Copy the newest checkpoint if it is not there yet, and end; 0 seconds copy nothing more."""
        if timeout_seconds <= 0:
            self._stopped.set()
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        self._stopped.set()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the copy to %s did not end in time; it is not committed there", self._place.shown)

    def _run(self) -> None:
        yield_to_training()
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()  # checked after clearing, or an end in between would be missed
            if self._newest is not None and not self._refused and not self._stopped.is_set():
                self._try()

    def _try(self) -> None:
        try:
            self._copy_newest()
        except CopyStoppedError as error:
            self._report(Report("target copy stopped", f"{error}; nothing half copied counts", self._copying))
        except RunMismatchError as error:
            self._refused = True
            message = f"{error}. Nothing is copied any more in this life"
            self._report(Report("target refused", message, self._copying, logging.ERROR))
        except (TargetError, CheckpointError, OSError, ValueError) as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("copying to %s failed", self._place.shown)
            self._fail(f"unexpected {type(error).__name__}: {error}")
        finally:
            self._copying = self._store.copied_iteration = None

    def _copy_newest(self) -> None:
        whole = [info for info in scan_local(self._store.directory).checkpoints if info.full]
        info = max(whole, key=lambda info: info.sequence, default=None)
        if info is None:
            return
        run_id = self._store.run_id
        found = scan(self._place, run_id)
        copies = self._without_given_up(found.copies)
        if copies and info.sequence <= copies[-1].manifest.sequence:
            return
        self._copying = self._store.copied_iteration = info.iteration
        for folder in found.unfinished:  # otherwise a full target would stay full
            self._place.remove(folder, first=COMMIT)
        identity = read_bytes(self._run_dir / IDENTITY)
        copied_bytes, seconds = upload(self._place, info.directory, identity, self._stopped.is_set, copies)
        what = (
            f"checkpoint {info.iteration} ({copied_bytes} bytes) was copied to {self._place.shown} in {seconds:.2f} s"
        )
        if self._failures:
            what += f", after {self._failures} attempts that failed"
        self._report(Report("target copied", what, info.iteration, logging.INFO if self._failures else logging.DEBUG))
        self._failures = 0
        try:
            remove_old(self._place, run_id, self._keep, self._report_removal)
        except TargetError as error:
            message = f"checkpoint {info.iteration} was copied; older copies could not be removed: {error}"
            level = logging.DEBUG if self._untidy else logging.WARNING
            self._report(Report("target not tidied", f"{message} (reported once)", info.iteration, level))
            self._untidy = True

    def _report_removal(self, folder: str) -> None:
        gone = step_iteration(folder)
        message = f"the copy of checkpoint {gone} is being removed from {self._place.shown}: later ones are there"
        self._report(Report("target removed", message, gone, logging.DEBUG))

    def _without_given_up(self, copies: list[Copy]) -> list[Copy]:
        """Set aside copies of states that a roll-back, or the user's own load, went back behind."""
        given_up = given_up_in(self._store.directory)
        left = []
        for copy in copies:
            if given_up.get(copy.manifest.iteration, -1) < copy.manifest.sequence:
                left.append(copy)
                continue
            set_aside(self._place, copy.folder, "its state was given up by the run")
            message = f"the copy of checkpoint {copy.manifest.iteration} at {self._place.shown} was set aside"
            self._report(Report("target set aside", message, copy.manifest.iteration, logging.DEBUG))
        return left

    def _fail(self, reason: str) -> None:
        """Report a failure; of those in a row the first alone is logged."""
        self._failures += 1
        again = f" (attempt {self._failures} in a row)" if self._failures > 1 else ""
        message = (
            f"checkpoint {self._newest} was not copied to {self._place.shown}{again}: {reason}. The run directory is "
            "not affected, training goes on, and the next checkpoint is tried again; further failures in a row are "
            "in the journal only"
        )
        level = logging.DEBUG if self._failures > 1 else logging.WARNING
        self._report(Report("target copy failed", message, self._newest, level))
