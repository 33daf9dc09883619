"""The committed checkpoints of one run, as one rank writes and reads them.

::

    <run_dir>/checkpoints/slabs/
        rank-00000.params-0000000100-0.0.safetensors     weights that rank 0 saved at iteration 100, in life 0
        rank-00000.moments-0000000100-0.0.safetensors    the optimizer's tensors
        rank-00000.extra-0000000100-0.0.safetensors      buffers, and the tensors among the scalars
        rank-00000.expert-{params,moments}-0000000080-0.0.safetensors   of mixtures: see `cpsr.checkpoint.rank_part`
        rank-00000.frozen-<hash>.safetensors             see `cpsr.checkpoint.frozen_files`
    <run_dir>/checkpoints/step-0000000100/
        rank-00000-0.0.json    what belongs to this rank, and its slabs with sizes and hashes
        COMMIT                 lists the slabs of all ranks, and the SHA-256 of their manifests; without it there is no
                               checkpoint

An iteration may be saved again, as a whole after a sparse checkpoint. Its `COMMIT` then takes the place of the first.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from cpsr.checkpoint.assemble import Piece
from cpsr.checkpoint.catalogue import (
    Catalogue,
    Retention,
    RetentionPlan,
    remove_unlisted,
    retain,
    scan,
    set_aside,
    warn_once,
)
from cpsr.checkpoint.commit import Attempt, CommitResult, Missing, refuse_superseded, seal, wait_for_ranks
from cpsr.checkpoint.files import make_directory, write_bytes
from cpsr.checkpoint.frozen_files import FrozenFiles, FrozenPart
from cpsr.checkpoint.manifest import COMMIT, SLABS, Manifest, Save, rank_manifest_name, step_name
from cpsr.checkpoint.rank_part import RankPartWriter
from cpsr.checkpoint.replicated import DriftedError
from cpsr.checkpoint.saved import SavedCheckpoint, piece_of
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.verify import (
    CheckpointFileError,
    is_committed,
    is_there,
    verify_run,
)
from cpsr.errors import CheckpointError, RunMismatchError, SaveError
from cpsr.state.shard import Shard

__all__ = ["DIFFERING", "CheckpointStore", "CommitResult", "verify_run"]

# In the run's directory: replicas that a commit found to differ.
DIFFERING = "ranks-differ"

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The `checkpoints` directory of a run.

    Args:
        run_dir: directory of the run, on storage that every rank shares.
        rank: this process.
        world_size: number of ranks.
        run_id: identity of the run, the same in every life.
        life: counts the starts of the job; shards of different lives never form one checkpoint.
        missing: returns what all ranks' parts together lack, in a sentence; a commit requires None.

    Attributes:
        rank, run_id: as given.
        directory: `<run_dir>/checkpoints`.
        copied_iteration: a checkpoint that is being copied elsewhere, which `retain` leaves whole; None: none.
        verified_iterations: checkpoints that a verified step began with, which `retain` leaves whole.
        drifted: which replicas a commit found to differ (rank 0), as a sentence; None: none so far.
        frozen: files of this rank's parameters outside the optimizer; None: it has none.
        reshard: loads a checkpoint of another number of ranks into the views; None: refused.
        attempt: every rank increases it when the job rolls back within its life, with the writers drained. So shards of
            two passes over the same iterations never form one checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        run_id: str,
        life: int,
        *,
        missing: Missing | None = None,
    ) -> None:
        self.directory = run_dir / "checkpoints"
        self.attempt = 0
        self._sequence = 0  # largest commit count that was seen or assigned in this life
        self._committed_attempt = -1  # the last one with a commit; once this store has one, no other store commits
        self.copied_iteration: int | None = None
        self.verified_iterations: Sequence[int] = ()
        self.drifted: str | None = None
        self.frozen: FrozenFiles | None = None
        self.reshard: Callable[[SavedCheckpoint, Shard], Any] | None = None
        self.rank = rank
        self._world_size = world_size
        self.run_id = run_id
        self._life = life
        self._missing = missing
        self._part = RankPartWriter(rank)

    @property
    def alike(self) -> bool | None:
        """Whether the commits of this attempt found all replicas equal (rank 0); None: it has none yet."""
        return False if self.drifted is not None else self._committed_attempt == self.attempt or None

    def refuse_superseded(self) -> None:
        """Raise SupersededError where a newer life of the run has begun; OSError where that cannot be read."""
        refuse_superseded(self.directory.parent, self._life)

    def prepare(self) -> list[CheckpointFileError]:
        """Clean up after earlier lives; by rank 0 alone, before any rank writes.

        Removes saves that were never committed, and sets aside checkpoints with an invalid commit record.

        Returns:
            What was wrong with those that were set aside.

        Raises:
            UnreadableFileError: the file system cannot read a commit record now; nothing was changed.
        """
        make_directory(self.directory)
        problems = self._readable().problems
        for problem in problems:
            self._set_aside(problem.iteration or 0, "damaged", f"{problem.file}: {problem.what}")
        remove_unlisted(self.directory)
        return problems

    def write(self, snapshot: Snapshot, outside: FrozenPart | None = None) -> int:
        """Write this rank's part; it counts once rank 0 committed the step.

        Args:
            snapshot: what to write.
            outside: what is listed of the parameters outside the optimizer; None: they are written.

        Returns:
            The bytes that were new.

        Raises:
            SupersededError: a newer life has begun, whose files may lie there now: they are left alone.
            SaveError: this save is committed already, was abandoned by rank 0, or what was read back differs.
            OSError: the file system refused. In these cases nothing of this rank's part is left.
        """
        self.refuse_superseded()
        attempt = self._attempt(snapshot.iteration)
        make_directory(attempt.directory)
        if attempt.is_committed:
            raise SaveError(f"{attempt.directory} is committed already; another save of it needs another attempt")
        try:
            attempt.remove_part(self.rank)
            written = self._part.write(snapshot, attempt, self.frozen, outside)
            attempt.refuse_ended(self.rank)
        except (OSError, SaveError) as error:
            self.refuse_superseded()
            attempt.remove_part(self.rank)
            # Rank 0 removes the files when it abandons a step, so that its reason hides behind other errors.
            attempt.refuse_ended(self.rank, error)
            raise
        return written

    def skip(self, iteration: int, reason: str) -> None:
        """Mark that this rank writes no part, so that rank 0 abandons the step at once.

        Raises:
            OSError: the file system failed; rank 0 then abandons the step after its timeout.
        """
        attempt = self._attempt(iteration)
        with suppress(CheckpointFileError):  # else it cannot be told now, and a marker does no harm
            if attempt.is_committed:
                _log.warning("%s is committed already; nothing to skip", attempt.directory)
                return
        make_directory(attempt.directory)
        attempt.mark_skipped(self.rank, reason)

    def commit(self, iteration: int, timeout_seconds: float, cancelled: threading.Event) -> CommitResult:
        """Wait for every rank's part and write the commit record; rank 0 alone.

        Args:
            iteration: the step, of which this rank's part is written.
            timeout_seconds: how long the other ranks may take.
            cancelled: ends the waiting at once.

        Returns:
            `committed=False` with the reason where the step was abandoned: a rank skipped it, or did not come.

        Raises:
            SupersededError: a newer life has begun.
            SaveError: the file system or a rank's manifest made the commit impossible; the step is abandoned, and an
                earlier checkpoint of it stays.
        """
        attempt = self._attempt(iteration)
        directory = attempt.directory
        replaces = is_committed(directory)
        try:
            parts = wait_for_ranks(attempt, timeout_seconds, cancelled)
            self.refuse_superseded()
            if isinstance(parts, str):
                attempt.abandon(parts)
                return CommitResult(False, parts)
            self._sequence = self._newest_sequence() + 1
            total = seal(attempt, parts, self._sequence, self._missing)
            self._committed_attempt = attempt.save.attempt
        except (OSError, ValueError, SaveError) as error:
            self.refuse_superseded()
            if isinstance(error, DriftedError):
                self._record_drift(str(error))
            # The commit record may be in place and only its fsync have failed: without it the step is not durable. If
            # it has replaced another, one of the two is there after a crash, and both are whole.
            if not replaces:
                (directory / COMMIT).unlink(missing_ok=True)
            with suppress(CheckpointFileError):  # which record is there cannot be told now: nothing is removed
                if directory.is_dir() and not attempt.is_committed:
                    attempt.abandon(str(error))
            raise SaveError(f"{directory} could not be committed: {error}") from error
        return CommitResult(True, "", total)

    def is_settled(self, iteration: int) -> bool:
        """Whether a step that this rank has written is committed, or never will be.

        It never will be if rank 0 has abandoned this attempt, or this rank's part is gone.

        Raises:
            CheckpointError: the file system cannot answer now.
            OSError: the same.
        """
        attempt = self._attempt(iteration)
        if attempt.is_committed or not is_there(attempt.directory / rank_manifest_name(self.rank, attempt.save)):
            return True
        return attempt.skipped_reason(0) is not None

    def directory_of(self, iteration: int) -> Path:
        """Directory of a step.

        Raises:
            SaveError: a symbolic link is in its place, or in that of the slabs.
        """
        directory = self.directory / step_name(iteration)
        for path in (directory, self.directory / SLABS):
            if path.is_symlink():
                raise SaveError(f"{path} is a symbolic link: nothing is read or written through it; remove the link")
        return directory

    def catalogue(self) -> list[SavedCheckpoint]:
        """Committed checkpoints, ascending in iteration, without those with an invalid commit record.

        Those that the file system cannot read now are left out, too.
        """
        found = scan(self.directory)
        for problem in (*found.problems, *found.unreadable):
            warn_once(self.directory, f"checkpoint is skipped: {problem.file} {problem.what}")
        return found.checkpoints

    def remains(self) -> list[str]:
        """Names of directories that prove earlier commits of this run, restorable or not."""
        found = scan(self.directory)
        known = [info.directory.name for info in found.checkpoints]
        known += [problem.file.parent.name for problem in found.unreadable]
        return known + [aside.directory.name for aside in found.asides]

    def load(self, iteration: int, into: Shard, manifest: Manifest | None = None) -> Any:
        """Copy this rank's part of a committed checkpoint into the views of `into`, and frozen weights into the engine.

        Args:
            iteration: of the checkpoint.
            into: views to be written.
            manifest: its commit record, where rank 0 has read it for all ranks; else it is read.

        Returns:
            The scalars that were saved with it.

        Raises:
            CheckpointCorruptError: a file is damaged (the message names it); `into` holds anything.
            UnreadableFileError: the file system cannot read a file now; the checkpoint may be whole, `into` holds
                anything.
            RunMismatchError: it is of another run, world size or model (the message names the first difference).
            CheckpointError: there is none at that iteration, or it holds the weights only.
        """
        directory = self.directory_of(iteration)
        if manifest is None and not (directory / COMMIT).exists():
            full = [info.iteration for info in self.catalogue() if info.full]
            raise CheckpointError(
                f"{directory} is not a committed checkpoint; there are {f'full ones at {full}' if full else 'none'}"
            )
        saved = SavedCheckpoint(directory, manifest)
        run_id, ranks = saved.manifest.run_id, saved.manifest.world_size
        if ranks != self._world_size and self.reshard is None:
            raise RunMismatchError(
                f"{directory} was saved by {ranks} ranks, this job has {self._world_size}: start it with {ranks} ranks"
            )
        if run_id != self.run_id:
            raise RunMismatchError(f"{directory} is of the run {run_id!r}, this is {self.run_id!r}")
        if not saved.full:
            raise CheckpointError(f"{directory} keeps the weights only, without moments: training cannot restart there")
        if self.reshard is not None and ranks != self._world_size:
            return self.reshard(saved, into)
        scalars = saved.load(self.rank, into, self._frozen_pieces())
        if self.frozen is not None:
            self.frozen.load(saved)
        return scalars

    def quarantine(self, iteration: int, reason: str) -> Path | None:
        """Set a damaged checkpoint aside as `damaged-step-...`, so that its step can be committed again.

        Returns:
            Its new directory, None where it is no longer there (another rank did it).
        """
        return self._set_aside(iteration, "damaged", reason)

    def abandon_after(self, iteration: int, reason: str) -> list[Path]:
        """Set every committed checkpoint newer than `iteration` aside as `abandoned-step-...`; rank 0 alone acts.

        For use after a roll-back or the user's own load, while no rank is writing. Only uncommitted saves are deleted.

        Raises:
            UnreadableFileError: the file system cannot read the commit record of a newer one now, which could come back
                later; nothing was changed.
        """
        if self.rank != 0:
            return []
        self.refuse_superseded()
        found = self._readable(after=iteration)
        newer = [one.iteration for one in found.checkpoints if one.iteration > iteration]
        moved = [self._set_aside(newer_iteration, "abandoned", reason) for newer_iteration in newer]
        remove_unlisted(self.directory, after=iteration)
        return [path for path in moved if path is not None]

    def retain(self, rules: Retention) -> RetentionPlan:
        """Thin and delete old checkpoints; by rank 0 alone, after a commit.

        Raises:
            OSError: the file system refused; what is still there is valid.
            CheckpointError: a checkpoint became damaged or unreadable meanwhile; the same.
        """
        self.refuse_superseded()
        return retain(self.directory, rules, (self.copied_iteration, *self.verified_iterations))

    def _record_drift(self, drifted: str) -> None:
        """Record differing replicas for this life and, in the run's directory, for later ones."""
        self.drifted = drifted
        try:
            write_bytes(self.directory.parent / DIFFERING, drifted.encode())
        except OSError as error:
            _log.warning("that ranks differ is not recorded for the next life, which will detect it again: %s", error)

    def _frozen_pieces(self) -> Mapping[str, Piece]:
        if (files := self.frozen) is None:
            return {}
        return {f"frozen/{name}": piece_of(files.described(name)) for name in files.weights.tensors}

    def _readable(self, after: int = -1) -> Catalogue:
        """The catalogue, if every commit record of iterations later than `after` is readable."""
        catalogue = self._scan()
        for problem in catalogue.unreadable:
            if problem.iteration is not None and problem.iteration > after:
                raise problem
        return catalogue

    def _scan(self) -> Catalogue:
        """The catalogue; a count that was seen once is not assigned again, whether or not it is visible then."""
        found = scan(self.directory)
        self._sequence = max(self._sequence, found.newest_sequence)
        return found

    def _set_aside(self, iteration: int, kind: Literal["damaged", "abandoned"], reason: str) -> Path | None:
        return set_aside(self.directory_of(iteration), kind, reason, self._newest_sequence())

    def _newest_sequence(self) -> int:
        """Largest commit count of the run, of checkpoints that were set aside too."""
        if self._committed_attempt < 0:
            self._scan()
        return self._sequence

    def _attempt(self, iteration: int) -> Attempt:
        save = Save(iteration, self._life, self.attempt)
        return Attempt(self.directory_of(iteration), self.run_id, save, self._world_size)
