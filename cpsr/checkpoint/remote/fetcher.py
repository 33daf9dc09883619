"""A restart from a target: adopts the run's identity on a new disk, and fetches a newer checkpoint."""

import hashlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from cpsr.checkpoint.catalogue import CheckpointInfo, set_aside_list
from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.files import make_directory, write_bytes
from cpsr.checkpoint.manifest import step_iteration
from cpsr.checkpoint.remote.catalogue import IDENTITY, Catalogue, Copy, CopyDamagedError, read_copy, scan
from cpsr.checkpoint.remote.place import Place
from cpsr.checkpoint.remote.transfer import discard_fetch, fetch_ranks, prepare_fetch, put_in_place, set_aside
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError, TargetError
from cpsr.ranks.group import Group

__all__ = ["Fetcher", "Report", "given_up_in"]

logger = logging.getLogger(__name__)

# For some ten small requests, a second at most: a restart that has a checkpoint waits no longer.
ANSWER_SECONDS = 10.0
_GIVEN_UP = re.compile(r"abandoned-(step-\d+)-\d+")


class Report(NamedTuple):
    """An event for the log and the journal, with the arguments of `RankJournal.event`."""

    kind: str
    message: str
    iteration: int | None
    level: int = logging.INFO


class Fetcher:
    """Brings checkpoints from a target into a run directory. Its public methods are collectives of all ranks.

    Args:
        place: the target.
        run_dir: the run's directory, on storage that every rank shares.
        report: takes an event on rank 0.
    """

    def __init__(self, place: Place, run_dir: Path, report: Callable[[Report], None]) -> None:
        self._place = place
        self._run_dir = run_dir
        self._report = report
        self._damaged: dict[str, str] = {}  # folders that were fetched in vain -> what is wrong
        self._fetched: set[str] = set()

    def adopt_run(self, group: Group) -> None:
        """In a new run directory, adopt the identity of the run whose copies lie at the target.

        Raises:
            RunMismatchError: copies of several runs lie there.
            RecoveryError: the target cannot be read now, so that it is unknown whether there is a run to continue; or
                something is committed there, but nothing that can be used.
        """
        _agree(group, lambda: self._adopt() if group.rank == 0 else None)

    def fetch(self, store: CheckpointStore, group: Group, damaged: Collection[int]) -> int | None:
        """Fetch the newest whole copy that is newer than everything usable in the run directory.

        Args:
            store: the run's checkpoints; nobody is writing.
            group: the ranks.
            damaged: iterations of unusable checkpoints in the run directory.

        Returns:
            Iteration of the checkpoint that now is in the run directory, None where nothing was fetched.

        Raises:
            RunMismatchError: the target is another run's, or of another world size; nothing was changed.
            RecoveryError: the target cannot be read now (or while fetching) and no older checkpoint is available; or
                something is committed there, but nothing can be used.
        """
        while True:
            chosen = _agree(group, lambda: self._choose(store, group, damaged) if group.rank == 0 else None)
            if chosen is None:
                return None
            folder, iteration = str(chosen["folder"]), int(chosen["iteration"])
            shown = f"checkpoint {iteration} ({chosen['bytes']} bytes)"
            logger.info("fetching %s from %s", shown, self._place.shown)
            problem = self._fetch_together(store, group, chosen)
            if problem is None:
                self._fetched.add(folder)
                if group.rank == 0:
                    self._mark_damaged()
                    message = f"{shown} was fetched from {self._place.shown} and verified"
                    self._report(Report("target fetched", message, iteration, logging.WARNING))
                return iteration
            self._damaged[folder] = problem
            if group.rank == 0:
                message = f"{problem}; trying the next older one"
                self._report(Report("target copy damaged", message, iteration, logging.ERROR))

    def _adopt(self) -> None:
        if (self._run_dir / IDENTITY).exists():
            return
        found = scan(self._place)
        if found.copies:
            newest = found.copies[-1]
            make_directory(self._run_dir, fsync=True)
            write_bytes(self._run_dir / IDENTITY, newest.identity, fsync=True)
            message = (
                f"the run directory {self._run_dir} is new: it continues the run {newest.manifest.run_id!r}, whose "
                f"newest copy at {self._place.shown} is of iteration {newest.manifest.iteration} (another target "
                "begins anew)"
            )
            self._report(Report("target adopted", message, newest.manifest.iteration, logging.WARNING))
        elif found.has_committed:
            raise RecoveryError(
                f"the run directory {self._run_dir} is new, and nothing that is committed at {self._place.shown} "
                f"can be used: {'; '.join(found.damaged.values()) or 'it was given up'}. Nothing was changed; repair "
                "it, or use another target to start anew"
            )

    def _choose(self, store: CheckpointStore, group: Group, damaged: Collection[int]) -> dict[str, Any] | None:
        """Rank 0's choice of a copy, None where the run directory has what is newest."""
        left = [info for info in scan_local(store.directory).checkpoints if info.full and info.iteration not in damaged]
        kept = max(left, key=lambda info: info.sequence, default=None)
        try:
            # Without a local checkpoint, wait as long as the file system does.
            found = _within(None if kept is None else ANSWER_SECONDS, lambda: scan(self._place, store.run_id))
        except TargetError as error:
            self._go_on_without(error, kept)
            return None
        given_up, newest = given_up_in(store.directory), -1 if kept is None else kept.sequence
        for copy in reversed(found.copies):
            after = max(newest, given_up.get(copy.manifest.iteration, -1))
            if copy.manifest.sequence > after and copy.folder not in self._damaged.keys() | self._fetched:
                return self._described(copy, group.size, any_size=store.reshard is not None)
        if kept is not None:
            self._mark_damaged()
            discard_fetch(self._run_dir)
        elif found.has_committed and not store.remains():
            wrong = "; ".join([*found.damaged.values(), *self._damaged.values()]) or "it was given up"
            raise RecoveryError(
                f"nothing that is committed at {self._place.shown} can be used ({wrong}), and the run directory holds "
                "no checkpoint. Nothing was changed; repair one of the two, or use another run_dir and target to "
                "start anew"
            )
        return None

    def _described(self, copy: Copy, ranks: int, *, any_size: bool) -> dict[str, Any]:
        manifest = copy.manifest
        if manifest.world_size != ranks and not any_size:
            raise RunMismatchError(
                f"{self._place.name(copy.folder)} was saved by {manifest.world_size} ranks, this job has {ranks}: "
                f"start it with {manifest.world_size} ranks. Nothing was changed"
            )
        digest = hashlib.sha256(copy.manifest_bytes).hexdigest()
        chosen = {"folder": copy.folder, "iteration": manifest.iteration, "manifest": digest}
        return chosen | {"bytes": manifest.state_bytes()}

    def _go_on_without(self, error: TargetError, kept: CheckpointInfo | None) -> None:
        if kept is None:
            raise RecoveryError(
                f"the run directory {self._run_dir} holds no checkpoint to restart at, and the target cannot be read: "
                f"{error}. Nothing was changed: start again when it answers, or take checkpoint.target out of the "
                "configuration to go on without it"
            ) from error
        message = f"{error}. It may have a newer checkpoint than {kept.iteration}, from which the run goes on"
        self._report(Report("target not reachable", message, kept.iteration, logging.WARNING))

    def _fetch_together(self, store: CheckpointStore, group: Group, chosen: dict[str, Any]) -> str | None:
        """Every rank fetches its share of the parts; returns what is wrong with the copy.

        Raises:
            RecoveryError: the target cannot be read any more, or a disk refused; every rank raises it.
        """
        iteration, copies = int(chosen["iteration"]), list[Copy]()

        def prepare() -> None:
            copies.append(read_copy(self._place, chosen["folder"]))
            if hashlib.sha256(copies[0].manifest_bytes).hexdigest() != chosen["manifest"]:
                raise CopyDamagedError(f"{self._place.name(chosen['folder'])} is not the copy that rank 0 has found")
            if group.rank == 0:
                prepare_fetch(self._run_dir, copies[0])

        def fetch() -> None:
            # Its own part, of as many ranks as there are; of others every size-th.
            parts = range(group.rank, copies[0].manifest.world_size, group.size)
            fetch_ranks(self._place, copies[0], parts, self._run_dir)

        def commit() -> None:
            if group.rank == 0:
                put_in_place(copies[0], self._run_dir, store, f"a whole copy was fetched from {self._place.shown}")

        for part in (prepare, fetch, commit):
            problem = self._together(group, part, iteration)
            if problem is not None:
                return problem
        return None

    def _together(self, group: Group, part: Callable[[], Any], iteration: int) -> str | None:
        """Run one part on every rank; returns what is wrong with the copy on any of them."""
        damage = refused = None
        try:
            part()
        except CopyDamagedError as error:
            damage = f"rank {group.rank}: {error}"
        except (TargetError, CheckpointError, OSError) as error:
            refused = f"rank {group.rank}: {error}"
        gathered = group.gather((damage, refused))
        if refusals := [refused for _, refused in gathered if refused is not None]:
            raise RecoveryError(
                f"checkpoint {iteration} at {self._place.shown} is newer than what the run directory holds, and could "
                f"not be fetched: {'; '.join(refusals)}. What was fetched whole is kept: start again; to go on "
                "without it, take checkpoint.target out of the configuration"
            )
        return "; ".join(damage for damage, _ in gathered if damage is not None) or None

    def _mark_damaged(self) -> None:
        """Set damaged copies aside, once another state was fetched."""
        for folder, problem in self._damaged.items():
            try:
                set_aside(self._place, folder, problem)
            except TargetError as error:
                logger.warning("%s cannot be set aside: %s", self._place.name(folder), error)
                continue
            message = f"the copy {self._place.name(folder)} was set aside: {problem}"
            self._report(Report("target set aside", message, step_iteration(folder), logging.DEBUG))
        self._fetched |= self._damaged.keys()
        self._damaged = {}


def _agree(group: Group, question: Callable[[], Any]) -> Any:
    """Rank 0's result, or its exception, on every rank."""
    answer: dict[str, Any] = {}
    try:
        answer = {"answer": question()}
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


def _within(seconds: float | None, question: Callable[[], Catalogue]) -> Catalogue:
    """The answer of a target, from a thread that is abandoned after the timeout."""
    answer: Future[Catalogue] = Future()

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


def given_up_in(checkpoints: Path) -> dict[int, int]:
    """Iterations abandoned by a roll-back -> newest commit at that time; any commit, where none was recorded."""
    found: dict[int, int] = {}
    for aside in set_aside_list(checkpoints) if checkpoints.is_dir() else []:
        match = _GIVEN_UP.fullmatch(aside.directory.name)
        iteration = step_iteration(match[1]) if match else None
        if iteration is not None:
            after = sys.maxsize if aside.after_sequence is None else aside.after_sequence
            found[iteration] = max(found.get(iteration, -1), after)
    return found
