"""`checkpoint.target` in one life of a run: fetches at the start, copies during training.

A fetched copy arrives in `<run_dir>/fetching/step-...`, where it is no checkpoint. One rename puts it in place when
every file was read back from the disk. A later fetch reuses the whole files of an interrupted one.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.files import make_directory, write_bytes
from cpsr.checkpoint.manifest import Manifest, step_iteration
from cpsr.checkpoint.remote.copies import (
    FETCHING,
    IDENTITY,
    Copies,
    Copy,
    fetch_rank,
    prepare_fetch,
    put_in_place,
    scan,
    set_aside,
)
from cpsr.checkpoint.remote.place import CopyDamagedError, Place, open_place
from cpsr.checkpoint.remote.uploader import Copier, Report, given_up_in
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError, TargetError
from cpsr.ranks.group import Group

__all__ = ["CheckpointTarget"]

logger = logging.getLogger(__name__)

# For some ten small requests, a second at most: a restart that has a checkpoint waits no longer.
ANSWER_SECONDS = 10.0


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
        self._keep = config.target_keep_checkpoints
        self._run_dir = run_dir
        self._group = group
        self._place = None if config.target is None else open_place(config.target, run_dir)
        self._reports: deque[Report] = deque()
        self._copier: Copier | None = None
        self._damaged: dict[str, str] = {}  # folders that were fetched in vain -> what is wrong
        self._fetched: set[str] = set()

    def adopt_run(self) -> None:
        """Before a new run directory is opened, adopt the identity of the run whose copies lie at the target.

        Raises:
            RunMismatchError: copies of several runs lie there.
            RecoveryError: the target cannot be read now, so that it is unknown whether there is a run to continue; or
                something is committed there, but nothing that can be used.
        """
        if (place := self._place) is not None:
            _agree(self._group, lambda: self._adopt(place))

    def fetch(self, store: CheckpointStore, damaged: Collection[int]) -> int | None:
        """Fetch the newest whole copy that is newer than everything usable in the run directory.

        Args:
            store: the run's checkpoints; nobody is writing.
            damaged: iterations of unusable checkpoints in the run directory.

        Returns:
            Iteration of the checkpoint that now is in the run directory, None where nothing was fetched.

        Raises:
            RunMismatchError: the target is another run's, or of another world size; nothing was changed.
            RecoveryError: the target cannot be read now (or while fetching) and no older checkpoint is available; or
                something is committed there, but nothing can be used.
        """
        if (place := self._place) is None:
            return None
        while True:
            chosen = _agree(self._group, lambda: self._choose(place, store, damaged))
            if chosen is None:
                return None
            data = str(chosen[1]).encode()
            copy = Copy(str(chosen[0]), Manifest.parse(data), data, b"")
            iteration = copy.manifest.iteration
            shown = f"checkpoint {iteration} ({sum(copy.manifest.files().values())} bytes)"
            logger.info("fetching %s from %s", shown, place.shown)
            problem = self._fetch_together(place, store, copy)
            if problem is None:
                self._fetched.add(copy.folder)
                if self._group.rank == 0:
                    self._mark_damaged(place)
                    message = f"{shown} was fetched from {place.shown} and verified"
                    self._reports.append(Report("target fetched", message, iteration, logging.WARNING))
                return iteration
            self._damaged[copy.folder] = problem
            if self._group.rank == 0:
                message = f"{problem}; trying the next older one"
                self._reports.append(Report("target copy damaged", message, iteration, logging.ERROR))

    def start(self, store: CheckpointStore) -> None:
        """Begin to copy the committed checkpoints of the run (rank 0; no effect elsewhere)."""
        if self._place is not None and self._group.rank == 0:
            self._copier = Copier(self._place, self._keep, store, self._reports.append)

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

    def _adopt(self, place: Place) -> None:
        if (self._run_dir / IDENTITY).exists():
            return
        found = scan(place)
        if found.usable:
            newest = found.usable[-1]
            make_directory(self._run_dir)
            write_bytes(self._run_dir / IDENTITY, newest.identity)
            message = (
                f"the run directory {self._run_dir} is new: it continues the run {newest.manifest.run_id!r}, whose "
                f"newest copy at {place.shown} is of iteration {newest.manifest.iteration} (another target "
                "begins anew)"
            )
            self._reports.append(Report("target adopted", message, newest.manifest.iteration, logging.WARNING))
        elif found.has_committed:
            raise RecoveryError(
                f"the run directory {self._run_dir} is new, and nothing that is committed at {place.shown} "
                f"can be used: {'; '.join(found.damaged.values()) or 'it was given up'}. Nothing was changed; repair "
                "it, or use another target to start anew"
            )
        else:
            message = (
                f"the run directory {self._run_dir} is new, and {place.shown} holds no copy: a new run begins. If it "
                "should hold one, end the job, and look at the URL or at what should be mounted there"
            )
            self._reports.append(Report("target empty", message, None, logging.INFO))

    def _choose(self, place: Place, store: CheckpointStore, damaged: Collection[int]) -> tuple[str, str] | None:
        """Rank 0's choice: folder and manifest of a copy; None where the run directory has what is newest."""
        left = [info for info in scan_local(store.directory).checkpoints if info.full and info.iteration not in damaged]
        kept = max(left, key=lambda info: info.sequence, default=None)
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
            self._reports.append(Report("target not reachable", message, kept.iteration, logging.WARNING))
            return None
        given_up, newest = given_up_in(store.directory), -1 if kept is None else kept.sequence
        for copy in reversed(found.usable):
            manifest = copy.manifest
            after = max(newest, given_up.get(manifest.iteration, -1))
            if manifest.sequence > after and copy.folder not in self._damaged.keys() | self._fetched:
                if manifest.world_size != self._group.size and store.reshard is None:
                    raise RunMismatchError(
                        f"{place.name(copy.folder)} was saved by {manifest.world_size} ranks, this job has "
                        f"{self._group.size}: start it with {manifest.world_size} ranks. Nothing was changed"
                    )
                prepare_fetch(self._run_dir, copy)
                return copy.folder, copy.manifest_bytes.decode()
        if kept is not None:
            self._mark_damaged(place)
            shutil.rmtree(self._run_dir / FETCHING, ignore_errors=True)
        elif found.has_committed and not store.remains():
            wrong = "; ".join([*found.damaged.values(), *self._damaged.values()]) or "it was given up"
            raise RecoveryError(
                f"nothing that is committed at {place.shown} can be used ({wrong}), and the run directory holds "
                "no checkpoint. Nothing was changed; repair one of the two, or use another run_dir and target to "
                "start anew"
            )
        return None

    def _fetch_together(self, place: Place, store: CheckpointStore, copy: Copy) -> str | None:
        """Every rank fetches its share of the parts, rank 0 commits; returns what is wrong with the copy on any rank.

        Raises:
            RecoveryError: the target cannot be read any more, or a disk refused; every rank raises it.
        """
        group = self._group

        def fetch() -> None:
            # Its own part, of as many ranks as there are; of others every size-th.
            for rank in range(group.rank, copy.manifest.world_size, group.size):
                fetch_rank(place, copy, rank, self._run_dir)

        def commit() -> None:
            if group.rank == 0:
                put_in_place(copy, self._run_dir, store, f"a whole copy was fetched from {place.shown}")

        for part in (fetch, commit):
            damage = refused = None
            try:
                part()
            except CopyDamagedError as error:
                damage = f"rank {group.rank}: {error}"
            except (TargetError, CheckpointError, OSError) as error:
                refused = f"rank {group.rank}: {error}"
            gathered = group.gather((damage, refused))
            if refusals := [one for _, one in gathered if one is not None]:
                raise RecoveryError(
                    f"checkpoint {copy.manifest.iteration} at {place.shown} is newer than what the run directory "
                    f"holds, and could not be fetched: {'; '.join(refusals)}. What was fetched whole is kept: start "
                    "again; to go on without it, take checkpoint.target out of the configuration"
                )
            if damages := [one for one, _ in gathered if one is not None]:
                return "; ".join(damages)
        return None

    def _mark_damaged(self, place: Place) -> None:
        """Set damaged copies aside, once another state was fetched."""
        for folder, problem in self._damaged.items():
            try:
                set_aside(place, folder, problem)
            except TargetError as error:
                logger.warning("%s cannot be set aside: %s", place.name(folder), error)
                continue
            message = f"the copy {place.name(folder)} was set aside: {problem}"
            self._reports.append(Report("target set aside", message, step_iteration(folder), logging.DEBUG))
        self._fetched |= self._damaged.keys()
        self._damaged = {}


def _agree(group: Group, question: Callable[[], Any]) -> Any:
    """Rank 0's result, or its exception, on every rank."""
    answer: dict[str, Any] = {}
    try:
        answer = {"answer": question() if group.rank == 0 else None}
    except RunMismatchError as error:
        answer = {"mismatch": str(error)}
    except (RecoveryError, TargetError, CheckpointError, OSError) as error:
        answer = {"refused": str(error)}
    agreed = group.broadcast(answer)
    if "mismatch" in agreed:
        raise RunMismatchError(agreed["mismatch"])
    if "refused" in agreed:
        raise RecoveryError(agreed["refused"])
    return agreed["answer"]


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
