"""A restart from a target: adopts the run's identity on a new disk, and fetches a newer checkpoint."""

import hashlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import CheckpointInfo, set_aside_list
from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.manifest import step_iteration
from cpsr.checkpoint.remote.catalogue import Catalogue, Copy, CopyDamagedError, read_copy, scan
from cpsr.checkpoint.remote.download import discard_fetch, fetch_ranks, prepare_fetch, put_in_place
from cpsr.checkpoint.remote.identity import IDENTITY, write_identity
from cpsr.checkpoint.remote.place import Place
from cpsr.checkpoint.remote.upload import set_aside
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError, TargetError
from cpsr.ranks.group import Group

__all__ = ["Fetcher", "Report", "given_up_in"]

logger = logging.getLogger(__name__)

_GIVEN_UP = re.compile(r"abandoned-(step-\d+)-\d+")

# Time for some ten small requests, a second at most: a restart that has a checkpoint waits no longer.
ANSWER_SECONDS = 10.0

Report = Callable[[str, str, int | None, int], None]


class Fetcher:
    """Brings checkpoints from a target into a run directory. Its public methods are collectives of all ranks.

    Args:
        place: the target.
        run_dir: the run's directory, on storage that every rank shares.
        report: takes an event on rank 0: kind, message, iteration, level.
    """

    def __init__(self, place: Place, run_dir: Path, report: Report) -> None:
        self._place = place
        self._run_dir = run_dir
        self._report = report
        self._tried: set[str] = set()  # folders; none is fetched twice in one life
        self._damaged: dict[str, str] = {}

    def adopt_run(self, group: Group) -> None:
        """In a new run directory, adopt the identity of the run whose copies lie at the target.

        Raises:
            TargetError: the target cannot be read now, and the directory is new: it is unknown whether there is a run
                to continue.
            RunMismatchError: copies of several runs lie there.
            RecoveryError: something is committed there, but nothing that can be used.
        """
        self._agree(group, lambda: self._adopt() if group.rank == 0 else None)

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
            chosen = self._agree(group, lambda: self._choose(store, group, damaged))
            if chosen is None:
                return None
            self._tried.add(chosen["folder"])
            problem = self._fetch_together(store, group, chosen)
            if problem is None:
                if group.rank == 0:
                    self._mark_damaged()
                return int(chosen["iteration"])
            self._damaged[chosen["folder"]] = problem
            if group.rank == 0:
                message = f"{problem}; trying the next older one"
                self._report("target copy damaged", message, chosen["iteration"], logging.ERROR)

    def _adopt(self) -> None:
        if (self._run_dir / IDENTITY).exists():
            return
        found = scan(self._place)
        if not found.copies:
            if found.has_committed:
                raise RecoveryError(
                    f"the run directory {self._run_dir} is new, and nothing that is committed at {self._place.shown} "
                    f"can be used: {'; '.join(found.damaged.values()) or 'it was given up'}. Nothing was changed; "
                    "repair it, or use another target to start anew"
                )
            return
        newest = found.copies[-1]
        write_identity(self._run_dir, newest.identity)
        self._report(
            "target adopted",
            f"the run directory {self._run_dir} is new: it continues the run {newest.identity.run_id!r}, whose newest "
            f"copy at {self._place.shown} is of iteration {newest.manifest.iteration} (another target begins anew)",
            newest.manifest.iteration,
            logging.WARNING,
        )

    def _choose(self, store: CheckpointStore, group: Group, damaged: Collection[int]) -> dict[str, Any] | None:
        """Rank 0's choice of a copy, None where the run directory has what is newest."""
        if group.rank != 0:
            return None
        left = [info for info in scan_local(store.directory).checkpoints if info.full and info.iteration not in damaged]
        kept = max(left, key=lambda info: info.sequence, default=None)
        try:
            # Without a local checkpoint, wait as long as the file system does.
            found = _within(None if kept is None else ANSWER_SECONDS, lambda: scan(self._place, store.run_id))
        except TargetError as error:
            self._go_on_without(error, kept)
            return None
        copy = self._newest(found, store.directory, -1 if kept is None else kept.sequence)
        if copy is not None:
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

    def _newest(self, found: Catalogue, checkpoints: Path, sequence: int) -> Copy | None:
        """The newest copy after that commit, without states before a roll-back."""
        given_up = given_up_in(checkpoints)
        for copy in reversed(found.copies):
            after = given_up.get(copy.manifest.iteration, -1)
            if copy.manifest.sequence > max(sequence, after) and copy.folder not in self._tried:
                return copy
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
        self._report(
            "target not reachable",
            f"{error}. Whether it has a newer checkpoint than {kept.iteration} is not known; the run goes on from that "
            "one",
            kept.iteration,
            logging.WARNING,
        )

    def _fetch_together(self, store: CheckpointStore, group: Group, chosen: dict[str, Any]) -> str | None:
        """Every rank fetches its share of the parts; returns what is wrong with the copy.

        Raises:
            RecoveryError: the target cannot be read any more, or a disk refused; every rank raises it.
        """
        iteration = int(chosen["iteration"])
        if group.rank == 0:
            logger.info("fetching checkpoint %d (%d bytes) from %s", iteration, chosen["bytes"], self._place.shown)
        copies: list[Copy] = []

        def prepare() -> None:
            copies.append(read_copy(self._place, chosen["folder"]))
            if hashlib.sha256(copies[0].manifest_bytes).hexdigest() != chosen["manifest"]:
                raise CopyDamagedError(f"{self._place.name(chosen['folder'])} is not the copy that rank 0 has found")
            if group.rank == 0:
                prepare_fetch(self._run_dir, copies[0])

        def commit() -> None:
            if group.rank == 0:
                put_in_place(copies[0], self._run_dir, store, f"a whole copy was fetched from {self._place.shown}")

        parts: list[Callable[[], Any]] = [
            prepare,
            lambda: fetch_ranks(self._place, copies[0], _share(copies[0], group), self._run_dir),
            commit,
        ]
        for part in parts:
            problem = self._together(group, part, iteration)
            if problem is not None:
                return problem
        if group.rank == 0:
            message = (
                f"checkpoint {iteration} ({chosen['bytes']} bytes) was fetched from {self._place.shown} and verified"
            )
            self._report("target fetched", message, iteration, logging.WARNING)
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
        gathered = group.gather({"damage": damage, "refused": refused})
        if refusals := [one["refused"] for one in gathered if one["refused"] is not None]:
            raise RecoveryError(
                f"checkpoint {iteration} at {self._place.shown} is newer than what the run directory holds, and could "
                f"not be fetched: {'; '.join(refusals)}. What was fetched whole is kept: start again; to go on "
                "without it, take checkpoint.target out of the configuration"
            )
        return "; ".join(one["damage"] for one in gathered if one["damage"] is not None) or None

    def _mark_damaged(self) -> None:
        """Set damaged copies aside, once another state was fetched."""
        for folder, problem in self._damaged.items():
            try:
                set_aside(self._place, folder, problem)
            except TargetError as error:
                logger.warning("%s cannot be set aside: %s", self._place.name(folder), error)
                continue
            message = f"the copy {self._place.name(folder)} was set aside: {problem}"
            self._report("target set aside", message, step_iteration(folder), logging.DEBUG)
        self._damaged = {}

    def _agree(self, group: Group, question: Callable[[], Any]) -> Any:
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


def _share(copy: Copy, group: Group) -> list[int]:
    """The ranks whose parts this one fetches: its own, of as many ranks as there are; of others every size-th."""
    return list(range(group.rank, copy.manifest.world_size, group.size))
