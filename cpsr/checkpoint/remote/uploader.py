"""The thread of rank 0 that copies committed checkpoints to a target during training."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.catalogue import set_aside_list
from cpsr.checkpoint.manifest import COMMIT
from cpsr.checkpoint.remote.copies import Copy, remove_old, scan, set_aside, upload
from cpsr.checkpoint.remote.place import CopyStoppedError, Place
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import yield_to_training
from cpsr.errors import CheckpointError, RunMismatchError, TargetError

__all__ = ["Copier", "Report", "given_up_in"]

logger = logging.getLogger(__name__)

# The thread looks for a stop between two pieces; a request that hangs is abandoned with it.
STOP_SECONDS = 0.5
THREAD_NAME = "cpsr-target"


class Report(NamedTuple):
    """An event for the log and the journal, with the arguments of `RankJournal.event`."""

    kind: str
    message: str
    iteration: int | None
    level: int = logging.INFO


class Copier:
    """The thread that copies the newest committed checkpoint to a target; it reports failures, and never raises one.

    One copy is under way at a time. Of the checkpoints committed meanwhile the newest is copied next, so a slow target
    gets fewer copies, and no queue grows. After a failure the next checkpoint is the next attempt.

    Args:
        place: the target.
        keep: how many copies stay.
        store: the run's checkpoints.
        report: takes an event, from the thread, too.
    """

    def __init__(self, place: Place, keep: int, store: CheckpointStore, report: Callable[[Report], None]) -> None:
        self._place = place
        self._keep = keep
        self._store = store
        self._report = report
        self._newest: int | None = None
        self._copying: int | None = None
        self._untidy = self._refused = False  # each is reported once
        self._failures = 0  # in a row
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._stopped = threading.Event()
        place.stopped = self._stopped.is_set
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def notify(self, iteration: int) -> None:
        """Announce the newest committed checkpoint; returns at once."""
        if iteration == self._newest:
            return
        self._newest = iteration
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
        copies = self._without_given_up(found.usable)
        if copies and info.sequence <= copies[-1].manifest.sequence:
            return
        self._copying = self._store.copied_iteration = info.iteration
        for folder in found.unfinished:  # otherwise a full target would stay full
            self._place.remove(folder, first=COMMIT)
        copied_bytes, seconds = upload(self._place, info.directory, copies)
        what = (
            f"checkpoint {info.iteration} ({copied_bytes} bytes) was copied to {self._place.shown} in {seconds:.2f} s"
        )
        if self._failures:
            what += f", after {self._failures} attempts that failed"
        self._report(Report("target copied", what, info.iteration, logging.INFO if self._failures else logging.DEBUG))
        self._failures = 0
        try:
            remove_old(self._place, run_id, self._keep)
        except TargetError as error:
            message = f"checkpoint {info.iteration} was copied; older copies could not be removed: {error}"
            level = logging.DEBUG if self._untidy else logging.WARNING
            self._report(Report("target not tidied", f"{message} (reported once)", info.iteration, level))
            self._untidy = True

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


def given_up_in(checkpoints: Path) -> dict[int, int]:
    """Iterations abandoned by a roll-back -> newest commit at that time."""
    found: dict[int, int] = {}
    for aside in set_aside_list(checkpoints):
        if aside.kind == "abandoned":
            found[aside.iteration] = max(found.get(aside.iteration, -1), aside.after_sequence)
    return found
