"""`checkpoint.target` in one life of a run: fetches at the start, copies in a thread of rank 0 during training."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.files import make_directory, write_bytes
from cpsr.checkpoint.manifest import FileRecord, Manifest, step_iteration
from cpsr.checkpoint.remote.copies import (
    Copies,
    fetch_parts,
    prepare_fetch,
    put_in_place,
    scan,
    upload,
)
from cpsr.checkpoint.remote.place import CopyDamagedError, Place, open_place
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import yield_to_training
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError, CPSRError, RecoveryError, RunMismatchError, TargetError
from cpsr.ranks.group import Group

__all__ = ["CheckpointTarget", "Report"]

logger = logging.getLogger(__name__)

# For some ten small requests, a second at most: a restart that has a checkpoint waits no longer.
ANSWER_SECONDS = 10.0
STOP_SECONDS = 0.5  # at the end of a life, for a copy that is under way and no longer waited for
THREAD_NAME = "cpsr-target"


class Report(NamedTuple):
    """An event for the log and the journal, with the arguments of `RankJournal.event`."""

    kind: str
    message: str
    iteration: int | None
    level: int


class CheckpointTarget:
    """One rank's side of the target; without a configured target every method does nothing.

    The thread copies one checkpoint at a time, and never raises. Of those committed meanwhile the newest is next, so a
    slow target gets fewer copies. After a failure the next checkpoint is the next attempt.

    Args:
        config: the target, and how many copies it keeps.
        run_dir: the run's directory, on storage that every rank shares.
        group: the ranks. `adopt_run` and `fetch` are collectives; rank 0 alone copies, because it sees all ranks'
            files in the run directory.

    Attributes:
        on_report: called when there is a further event; on any thread.

    Raises:
        ConfigError: the URL is not usable, or leads into the run directory itself.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, group: Group) -> None:
        self._keep = config.target_keep_checkpoints
        self._patience_seconds = config.save_timeout_seconds
        self._run_dir = run_dir
        self._group = group
        self._place = None if config.target is None else open_place(config.target, run_dir)
        self._reports: deque[Report] = deque()
        self.on_report: Callable[[], None] = lambda: None
        self._tried: dict[str, str] = {}  # folders that were fetched -> what is wrong with them, if anything
        self._newest: int | None = None  # of the commits that were announced
        self._failing: set[str] = set()  # kinds of failures since the last success
        self._begun: float | None = None  # when the copy that is under way began
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def reports(self) -> list[Report]:
        """Events since the last call, oldest first."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _report(self, kind: str, message: str, iteration: int | None, level: int = logging.WARNING) -> None:
        """Report an event of all ranks, on rank 0."""
        if self._group.rank == 0:
            self._reports.append(Report(kind, message, iteration, level))
            self.on_report()

    # At the start

    def adopt_run(self) -> None:
        """Before a new run directory is opened, adopt the identity of the run whose copies lie at the target.

        Raises:
            RunMismatchError: copies of several runs lie there.
            RecoveryError: the target cannot be read now, so that it is unknown whether there is a run to continue; or
                something is committed there, but nothing that can be used.
        """
        if (place := self._place) is not None:
            self._agree(lambda: self._adopt(place))

    def fetch(self, store: CheckpointStore, damaged: Collection[int]) -> int | None:
        """Fetch the newest whole copy that is newer than everything usable in the run directory.

        Args:
            store: the run's checkpoints; nobody is writing.
            damaged: iterations of unusable checkpoints in the run directory.

        Returns:
            Iteration of the checkpoint that now is in the run directory, None where nothing was fetched.

        Raises:
            RunMismatchError: the target is another run's; nothing was changed.
            RecoveryError: the target cannot be read now (or while fetching) and no older checkpoint is available; or
                something is committed there, but nothing can be used.
        """
        while (place := self._place) is not None:
            folder = self._agree(lambda: self._choose(place, store, damaged))
            if folder is None:
                return None
            if (iteration := self._fetch_together(place, store, str(folder))) is not None:
                return iteration
        return None

    def _adopt(self, place: Place) -> None:
        if (self._run_dir / IDENTITY).exists():
            return
        found, new = scan(place), f"the run directory {self._run_dir} is new"
        if found.usable:
            folder, newest = list(found.usable.items())[-1]
            make_directory(self._run_dir)
            write_bytes(self._run_dir / IDENTITY, place.read(folder, IDENTITY))
            message = (
                f"{new}: it continues the run {newest.run_id!r}, whose newest copy at {place.shown} is of "
                f"iteration {newest.iteration} (another target begins anew)"
            )
            self._report("target adopted", message, newest.iteration)
        elif found.damaged:
            raise RecoveryError(
                f"{new}, and nothing that is committed at {place.shown} can be used: "
                f"{'; '.join(found.damaged.values())}. Nothing was changed; repair it, or use another target to start "
                "anew"
            )
        else:
            message = (
                f"{new}, and {place.shown} holds no copy: a new run begins. If it should hold one, end the job, and "
                "look at the URL or at what should be mounted there"
            )
            self._report("target empty", message, None, logging.INFO)

    def _choose(self, place: Place, store: CheckpointStore, damaged: Collection[int]) -> str | None:
        """Rank 0's choice of a copy, by its folder; None where the run directory has what is newest."""
        left = [info for info in scan_local(store.directory).checkpoints if info.iteration not in damaged]
        kept = max(filter(_is_full, left), key=lambda info: info.listing.sequence, default=None)
        try:
            # Without a local checkpoint, wait as long as the file system does.
            found = _within(None if kept is None else ANSWER_SECONDS, lambda: scan(place, store.run_id))
        except TargetError as error:
            if kept is None:
                raise RecoveryError(
                    f"the run directory {self._run_dir} holds no checkpoint to restart at, and the target cannot be "
                    f"read: {error}. Nothing was changed: start again when it answers, or take checkpoint.target out "
                    "of the configuration to go on without it"
                ) from error
            message = f"{error}. It may have a newer checkpoint than {kept.iteration}, from which the run goes on"
            self._report("target not reachable", message, kept.iteration)
            return None
        if kept is not None and not found.folders:
            message = (
                f"{place.shown} holds no copy, although the run has checkpoint {kept.iteration}: copies begin anew. If "
                "it should hold some, end the job, and look at the URL or at what should be mounted there"
            )
            self._fail("target empty", message, kept.iteration)
        newest = -1 if kept is None else kept.listing.sequence
        for folder, manifest in reversed(self._wanted(found, store).items()):
            if manifest.sequence > newest and folder not in self._tried:
                if self._is_of_another_directory(place.name(folder), manifest, left):
                    self._tried[folder] = f"{place.name(folder)} has other slabs than the run directory"
                    continue
                prepare_fetch(store, manifest.iteration)
                return folder
        if kept is not None:
            prepare_fetch(store, None)
        elif (found.usable or found.damaged) and not store.remains():
            wrong = "; ".join(filter(None, [*found.damaged.values(), *self._tried.values()]))
            raise RecoveryError(
                f"nothing that is committed at {place.shown} can be used ({wrong}), and the run directory holds "
                "no checkpoint. Nothing was changed; repair one of the two, or use another run_dir and target to "
                "start anew"
            )
        return None

    def _is_of_another_directory(self, name: str, copy: Manifest, left: Collection[SavedCheckpoint]) -> bool:
        """Whether a whole checkpoint here lists other bytes under the name of one of the copy's slabs; reports that."""
        listed = copy.files
        for info in left:
            files = dict[str, FileRecord]()
            if not listed.keys().isdisjoint(info.listing.sizes):
                with suppress(CheckpointError):  # it was deleted meanwhile
                    files = info.manifest.files
            for slab, record in files.items():
                if listed.get(slab, record) != record:
                    message = (
                        f"{name} is not fetched: its {slab} is another than that of checkpoint {info.iteration} here. "
                        "Another job goes on with this run in a run directory of its own: end one of the two"
                    )
                    self._report("target ahead", message, copy.iteration, logging.ERROR)
                    return True
        return False

    def _fetch_together(self, place: Place, store: CheckpointStore, folder: str) -> int | None:
        """Every rank fetches its share of the parts, rank 0 commits; returns the iteration, None of a damaged copy.

        Raises:
            RecoveryError: the target cannot be read any more, or a disk refused; every rank raises it.
        """
        group = self._group

        def fetch() -> str:
            try:
                fetch_parts(place, folder, store, group.rank, group.size)
            except CopyDamagedError as error:
                return f"rank {group.rank}: {error}"
            except (TargetError, CheckpointError, OSError) as error:
                raise RecoveryError(f"rank {group.rank}: {error}") from error
            return ""

        try:
            self._tried[folder] = wrong = "; ".join(filter(None, _together(group, fetch)))
            if wrong:
                self._report(
                    "target copy damaged",
                    f"{wrong}; trying the next older one",
                    step_iteration(folder.partition(".")[0]),
                    logging.ERROR,
                )
                return None
            iteration: int = self._agree(lambda: put_in_place(place, folder, store))
        except RecoveryError as error:
            raise RecoveryError(
                f"{place.name(folder)} is newer than what the run directory holds, and could not be fetched: {error}. "
                "What was fetched whole is kept: start again; to go on without it, take checkpoint.target out of the "
                "configuration"
            ) from error
        message = f"checkpoint {iteration} was fetched from {place.shown} and verified"
        self._report("target fetched", message, iteration)
        return iteration

    def _wanted(self, found: Copies, store: CheckpointStore) -> dict[str, Manifest]:
        """Usable copies, without those found damaged and those of states that the run has given up."""
        # By a roll-back, or the user's own load: iteration -> newest commit at that time.
        asides = scan_local(store.directory).asides
        given_up = {one.iteration: one.after_sequence for one in asides if one.kind == "abandoned"}
        holding = {folder: one for folder, one in found.usable.items() if not one.weights_only}
        return {
            folder: manifest
            for folder, manifest in holding.items()
            if not self._tried.get(folder) and given_up.get(manifest.iteration, -1) < manifest.sequence
        }

    def _agree(self, question: Callable[[], Any]) -> Any:
        """Rank 0's result, or its exception, on every rank."""
        return _together(self._group, lambda: question() if self._group.rank == 0 else None)[0]

    # During training

    def start(self, store: CheckpointStore) -> None:
        """Begin to copy the committed checkpoints of the run (rank 0; no effect elsewhere)."""
        if self._place is not None and self._group.rank == 0:
            self._thread = threading.Thread(target=self._run, args=(self._place, store), name=THREAD_NAME, daemon=True)
            self._thread.start()

    def notify(self, iteration: int | None) -> None:
        """Announce the newest committed checkpoint; returns at once."""
        if iteration is None or iteration == self._newest:
            return
        self._newest = iteration
        self._wake.set()
        if (begun := self._begun) is not None and time.monotonic() - begun > self._patience_seconds:
            message = (
                f"the copy that began {time.monotonic() - begun:.0f} s ago has not ended: the target hangs, or is too "
                "slow. Training goes on; checkpoints are in the run directory alone until it answers"
            )
            self._fail("target hangs", message, iteration)

    def close(self, timeout_seconds: float) -> None:
        """Copy the newest checkpoint if it is not at the target yet, and end.

        Args:
            timeout_seconds: how long that may take; 0 begins no copy any more.
        """
        if self._thread is None:
            return
        if timeout_seconds <= 0:
            self._newest = None
        self._closing = True
        self._wake.set()
        self._thread.join(max(timeout_seconds, STOP_SECONDS))
        if self._thread.is_alive():
            message = "the target did not take the last copy in time; what is not committed there does not count"
            self._fail("target copy stopped", message, None)

    def _run(self, place: Place, store: CheckpointStore) -> None:
        yield_to_training()
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last, newest = self._closing, self._newest  # read after clearing, or an end in between would be missed
            self._begun = time.monotonic()
            try:
                if newest is not None:
                    self._copy_newest(place, store)
            except Exception as error:
                if not isinstance(error, CPSRError | OSError):
                    logger.exception("copying to %s failed", place.shown)
                message = (
                    f"checkpoint {newest} was not copied to {place.shown}: {error or type(error).__name__}. The run "
                    "directory is not affected, training goes on, and the next checkpoint is tried again"
                )
                self._fail("target copy failed", message, newest)
            store.copied_iteration = self._begun = None

    def _copy_newest(self, place: Place, store: CheckpointStore) -> None:
        whole = [info for info in scan_local(store.directory).checkpoints if info.full]
        info = max(whole, key=lambda info: info.listing.sequence, default=None)
        if info is None:
            return
        store.copied_iteration = info.iteration
        found = scan(place, store.run_id)
        copies = self._wanted(found, store)
        folder, newest = list(copies.items())[-1] if copies else ("", None)
        if newest is None or newest.sequence < info.listing.sequence:
            for unfinished in found.unfinished:  # otherwise a full target would stay full
                place.drop(unfinished)
            started = time.perf_counter()
            copied_bytes = upload(place, info.directory, copies).total_bytes
            seconds = time.perf_counter() - started
            message = (
                f"checkpoint {info.iteration} ({copied_bytes} bytes) was copied to {place.shown} in {seconds:.2f} s"
            )
            level = logging.INFO if "target copy failed" in self._failing else logging.DEBUG
            self._report("target copied", message, info.iteration, level)
            self._failing.clear()
        elif newest != info.manifest:
            message = (
                f"{place.name(folder)} is not of this run directory, and not older than its checkpoint "
                f"{info.iteration}: another job of the run copies there, or run_dir was set back. Nothing is copied "
                "until the run has committed as many checkpoints"
            )
            self._fail("target ahead", message, info.iteration)
            return
        try:
            self._tidy(place, store)
        except TargetError as error:
            message = f"checkpoint {info.iteration} was copied; older copies could not be removed: {error}"
            self._fail("target not tidied", message, info.iteration)

    def _tidy(self, place: Place, store: CheckpointStore) -> None:
        """Remove all but the newest copies, once the newest checkpoint is there."""
        found = scan(place, store.run_id)
        kept = list(self._wanted(found, store))[-self._keep :]
        for folder in found.folders if kept else ():
            if folder not in kept:
                place.drop(folder)
                logger.debug("%s was removed: later copies are there", place.name(folder))

    def _fail(self, kind: str, message: str, iteration: int | None) -> None:
        """Report a failure; of several in a row the first alone is logged, and all are in the journal."""
        level = logging.DEBUG if kind in self._failing else logging.WARNING
        self._failing.add(kind)
        self._report(kind, message, iteration, level)


def _is_full(info: SavedCheckpoint) -> bool:
    return info.full


def _together(group: Group, action: Callable[[], Any]) -> list[Any]:
    """What an action returns on each rank; an exception of any of them is raised on every one."""
    try:
        told = ["", action()]
    except RunMismatchError as error:
        told = ["mismatch", str(error)]
    except (RecoveryError, TargetError, CheckpointError, OSError) as error:
        told = ["refused", str(error)]
    found = group.gather(told)
    for kind, raised in (("mismatch", RunMismatchError), ("refused", RecoveryError)):
        if refusals := [text for one, text in found if one == kind]:
            raise raised("; ".join(refusals))
    return [result for _, result in found]


def _within(seconds: float | None, question: Callable[[], Copies]) -> Copies:
    """The answer of a target, from a thread that is abandoned after the timeout."""
    answer: Future[Copies] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            answer.set_exception(error)

    threading.Thread(target=ask, name="cpsr-target-scan", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TargetError(f"the target did not answer within {seconds:g} s") from error
