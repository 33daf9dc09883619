"""The thread that copies committed checkpoints to a target; it reports every failure, and never raises one."""

import logging
import threading
from pathlib import Path

from cpsr.checkpoint.background import yield_to_training
from cpsr.checkpoint.catalogue import CheckpointInfo
from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.manifest import COMMIT, step_iteration
from cpsr.checkpoint.remote.catalogue import Catalogue, scan
from cpsr.checkpoint.remote.identity import Identity, read_identity
from cpsr.checkpoint.remote.place import Place
from cpsr.checkpoint.remote.restart import Report, given_up_in
from cpsr.checkpoint.remote.upload import CopyStoppedError, retain, set_aside, upload
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError, RunMismatchError, TargetError

__all__ = ["Copier"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-target"
# It checks for a stop between two pieces; a request that hangs is abandoned with its thread.
STOP_SECONDS = 0.5


class Copier:
    """Follows the committed checkpoints of a run and copies the newest one whenever one is due (rank 0).

    One copy is under way at a time. Of the checkpoints committed meanwhile the newest is copied next, so a slow target
    gets fewer copies, and no queue grows. After a failure the next checkpoint is the next attempt.

    Args:
        place: the target.
        config: how often, and how many copies stay.
        store: the run's checkpoints.
        run_dir: the run's directory.
        report: takes an event: kind, message, iteration, level; from the thread, too.
    """

    def __init__(
        self, place: Place, config: CheckpointConfig, store: CheckpointStore, run_dir: Path, report: Report
    ) -> None:
        self._place = place
        self._config = config
        self._store = store
        self._run_dir = run_dir
        self._report = report
        self._newest: int | None = None
        self._copying: int | None = None
        self._overtaken = self._untidy = False  # each is reported once
        self._failures = 0  # in a row
        self._known: set[str] = set()  # hashes of files that were read back from the target
        self._refused = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def notify(self, iteration: int) -> None:
        """Announce the newest committed checkpoint; returns at once."""
        if iteration == self._newest:
            return
        self._newest = iteration
        copying = self._copying
        if copying is not None and copying != iteration and not self._overtaken:
            self._overtaken = True
            self._report(
                "target slow",
                f"checkpoint {iteration} was committed while {copying} is still being copied to {self._place.shown}: "
                "of those that come meanwhile the newest is copied next, the others are not (reported once)",
                iteration,
                logging.WARNING,
            )
        self._wake.set()

    def close(self, timeout_seconds: float) -> None:
        """Copy the newest checkpoint if it is not there yet, and end.

        Args:
            timeout_seconds: how long that may take; 0 copies nothing more.
        """
        if timeout_seconds <= 0:
            self._stopped.set()
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        self._stopped.set()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "the copy to %s did not end in time and is left behind; it is not committed there", self._place.shown
            )

    def _run(self) -> None:
        yield_to_training()
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()  # checked after clearing, or an end in between would be missed
            if self._newest is not None and not self._refused and not self._stopped.is_set():
                self._try(last)

    def _try(self, last: bool) -> None:
        try:
            self._copy_newest(last)
        except CopyStoppedError as error:
            self._report("target copy stopped", f"{error}; nothing half copied counts", self._copying, logging.INFO)
        except RunMismatchError as error:
            self._refused = True
            self._report(
                "target refused", f"{error}. Nothing is copied any more in this life", self._copying, logging.ERROR
            )
        except (TargetError, CheckpointError, OSError, ValueError) as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("copying to %s failed", self._place.shown)
            self._fail(f"unexpected {type(error).__name__}: {error}")
        finally:
            self._copying = self._store.copied_iteration = None

    def _copy_newest(self, last: bool) -> None:
        info = _newest_whole(self._store.directory)
        if info is None:
            return
        identity = _identity(self._run_dir)
        found = self._set_aside_given_up(scan(self._place, identity.run_id))
        if not self._is_due(info, found, last):
            return
        self._copying = self._store.copied_iteration = info.iteration
        for folder, owner in found.unfinished.items():
            if owner in (None, identity.run_id):  # otherwise a full target would stay full
                self._place.remove(folder, first=COMMIT)
        copied = upload(self._place, info.directory, identity, self._stopped.is_set, found.copies, self._known)
        self._report_copied(info, copied.bytes, copied.seconds)
        self._retain(identity.run_id, info.iteration)

    def _retain(self, run_id: str, iteration: int) -> None:
        try:
            retain(self._place, run_id, self._config.target_keep_checkpoints, self._report_removal)
        except TargetError as error:
            message = (
                f"checkpoint {iteration} was copied, but older copies could not be removed: {error} (reported once)"
            )
            self._report("target not tidied", message, iteration, logging.DEBUG if self._untidy else logging.WARNING)
            self._untidy = True

    def _report_removal(self, folder: str) -> None:
        gone = step_iteration(folder)
        if gone is not None:
            message = f"the copy of checkpoint {gone} is being removed from {self._place.shown}: later ones are there"
            self._report("target removed", message, gone, logging.DEBUG)

    def _is_due(self, info: CheckpointInfo, found: Catalogue, last: bool) -> bool:
        if not found.copies:
            return True
        behind = info.sequence - found.copies[-1].manifest.sequence
        return behind >= (1 if last else self._config.target_every_checkpoints)

    def _set_aside_given_up(self, found: Catalogue) -> Catalogue:
        """Set aside copies of states that a roll-back, or the user's own load, went back behind."""
        given_up = given_up_in(self._store.directory)
        left = []
        for copy in found.copies:
            if given_up.get(copy.manifest.iteration, -1) >= copy.manifest.sequence:
                set_aside(self._place, copy.folder, "its state was given up by the run")
                message = f"the copy of checkpoint {copy.manifest.iteration} at {self._place.shown} was set aside"
                self._report("target set aside", message, copy.manifest.iteration, logging.DEBUG)
            else:
                left.append(copy)
        return Catalogue(left, found.set_aside, found.unfinished, found.damaged)

    def _report_copied(self, info: CheckpointInfo, bytes_: int, seconds: float) -> None:
        what = f"checkpoint {info.iteration} ({bytes_} bytes) was copied to {self._place.shown} in {seconds:.2f} s"
        if self._failures:
            what += f", after {self._failures} attempts that failed"
        self._report("target copied", what, info.iteration, logging.INFO if self._failures else logging.DEBUG)
        self._failures = 0

    def _fail(self, reason: str) -> None:
        """Log the first failure; further ones in a row go to the journal only."""
        self._failures += 1
        again = f" (attempt {self._failures} in a row)" if self._failures > 1 else ""
        self._report(
            "target copy failed",
            f"checkpoint {self._newest} was not copied to {self._place.shown}{again}: {reason}. The run directory is "
            "not affected, training goes on, and the next checkpoint is tried again; further failures in a row are "
            "in the journal only",
            self._newest,
            logging.DEBUG if self._failures > 1 else logging.WARNING,
        )


def _newest_whole(checkpoints: Path) -> CheckpointInfo | None:
    whole = [info for info in scan_local(checkpoints).checkpoints if info.full]
    return max(whole, key=lambda info: info.sequence, default=None)


def _identity(run_dir: Path) -> Identity:
    identity = read_identity(run_dir)
    if identity is None:
        raise ValueError(f"{run_dir} has no run.json: whose checkpoints they are cannot be said")
    return identity
