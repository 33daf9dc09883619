"""The commit protocol: through files alone, the ranks agree that a checkpoint exists or never will.

Every rank writes its shard and then its manifest. Rank 0 waits for all manifests of the same attempt and writes the
commit record. A rank that cannot save writes a skip marker, at which rank 0 abandons the checkpoint: its own skip
marker tells late ranks so.

A machine that is cut off, or a job that was taken for dead, may go on beside the job that took its place. Each life
claims its number by making the directory of its heartbeats, which succeeds for one. From then on no earlier life
writes or commits a checkpoint; its ranks leave at their next beat.
"""

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cpsr.checkpoint.files import (
    for_each,
    names_in,
    read_bytes,
    remove_entry,
    sync_directory,
    temporary_name,
    write_bytes,
)
from cpsr.checkpoint.manifest import (
    COMMIT,
    SLABS,
    Kind,
    Manifest,
    RankManifest,
    RankRecord,
    Save,
    is_rank_manifest,
    rank_manifest_name,
    slab_name,
    slab_path,
)
from cpsr.checkpoint.replicated import missing_among, refuse_drifted
from cpsr.checkpoint.verify import is_committed, read_manifest
from cpsr.errors import CheckpointError, RunDirectoryError, SaveError
from cpsr.ranks.group import Group
from cpsr.ranks.heartbeat import HeartbeatFiles, newer_life
from cpsr.ranks.link import JOB

__all__ = ["Attempt", "CommitResult", "Missing", "SavedSlice", "SupersededError", "claim_life", "refuse_superseded"]
__all__ += ["seal", "wait_for_ranks"]

# A rank's slice of a parameter: the global shape, the first element and the number of elements.
SavedSlice = tuple[Sequence[int], int, int]
# From each rank's slices by name, and their iterations where experts have their own files: what is wrong with these
# parts together, in a sentence, or None.
Missing = Callable[[Mapping[int, Mapping[str, SavedSlice]], Mapping[int, Mapping[str, int]]], str | None]

# By rank, its manifest and the SHA-256 of its bytes.
Parts = dict[int, tuple[RankManifest, str]]

# Between two looks for the parts of other ranks, or so many times as long as a look took: of 4,096 ranks 2 ms.
_POLL_SECONDS = 0.02
_PAUSES_PER_LOOK = 20
_LONGEST_PAUSE_SECONDS = 1.0  # a file system may hang for a while in one look

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """An attempt to save a checkpoint, with what the parts of all ranks must have in common.

    Attributes:
        directory: of the checkpoint.
        run_id: identity of the run.
        save: its iteration and life, and the roll-backs within the life, after which the same iterations come again.
        world_size: number of ranks.
    """

    directory: Path
    run_id: str
    save: Save
    world_size: int

    @property
    def is_committed(self) -> bool:
        """Whether the commit record is of this attempt, and not of another save of the iteration.

        Raises:
            CheckpointError: it is damaged, or cannot be read now.
        """
        return is_committed(self.directory) and read_manifest(self.directory).save == self.save

    def beside(self, kept: Collection[str]) -> list[Path]:
        """What is in its directory but these files, a commit record, and manifests of other saves.

        Of these some may be committed; the next start removes the others.

        Raises:
            OSError: the directory cannot be listed.
        """
        own = {rank_manifest_name(rank, self.save) for rank in range(self.world_size)}
        found = set(names_in(self.directory)).difference(kept, [COMMIT])
        return [self.directory / name for name in sorted(found) if name in own or not is_rank_manifest(name)]

    def mark_skipped(self, rank: int, reason: str) -> None:
        """Tell rank 0 that a rank writes no shard; the marker of rank 0 tells all ranks that this is abandoned."""
        _, life, attempt = self.save
        content = {"run_id": self.run_id, "life": life, "attempt": attempt, "reason": reason}
        write_bytes(self.directory / _skip_name(rank), json.dumps(content).encode("ascii"))
        if rank == 0:
            _log.warning("checkpoint %s is abandoned: %s", self.directory, reason)

    def skipped_reason(self, rank: int) -> str | None:
        """Why a rank skipped this attempt (rank 0: abandoned it for all); None while it did not."""
        try:
            content = json.loads((self.directory / _skip_name(rank)).read_bytes())
        except FileNotFoundError:
            return None
        if (content["run_id"], content["life"], content["attempt"]) != (self.run_id, *self.save[1:]):
            return None
        return str(content["reason"])

    def has_part(self, record: RankManifest, rank: int) -> bool:
        """Whether a manifest is a rank's of this attempt, not of an earlier life or of one before a roll-back."""
        found = record.rank, record.run_id, record.save, record.world_size
        return found == (rank, self.run_id, self.save, self.world_size)

    def remove_part(self, rank: int) -> None:
        """Remove a rank's part where this is not committed, its manifest first; that it was skipped stays marked.

        Raises:
            OSError: the file system refused.
        """
        manifest = self.directory / rank_manifest_name(rank, self.save)
        for path in (manifest, temporary_name(manifest)):
            path.unlink(missing_ok=True)
        for kind in get_args(Kind):  # no directory with files of all ranks is listed at each save
            slab_path(self.directory, slab_name(rank, kind, self.save)).unlink(missing_ok=True)

    def refuse_ended(self, rank: int, cause: Exception | None = None) -> None:
        """Raise where nothing more of it counts; the rank's part is then gone.

        Raises:
            SupersededError: a newer life has begun, whose files may lie there: they are left alone.
            SaveError: rank 0 has abandoned it.
            OSError: the file system refused.
        """
        refuse_superseded(self.directory.parents[1], self.save.life)
        reason = self.skipped_reason(0)
        if reason is not None:
            self.remove_part(rank)
            raise SaveError(f"{self.directory} was abandoned by rank 0: {reason}") from cause

    def abandon(self, reason: str) -> None:
        """Abandon it for all ranks: write the marker that they find, then remove its files and its slabs."""
        try:
            self.mark_skipped(0, reason)
        except OSError as error:
            # On a full disk the removal below still has to happen; late ranks then find their files gone.
            what = "checkpoint %s is abandoned (%s), but the marker cannot be written: %s"
            _log.warning(what, self.directory, reason, error)
        for path in self.beside([_skip_name(0)]):
            remove_entry(path)
        for path in list(slab_path(self.directory, "").glob(f"*-{self.save.word}.*")):  # also under construction
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class CommitResult:
    """Whether the checkpoint exists now, why not, and the bytes of all ranks' files together."""

    committed: bool
    reason: str
    bytes: int = 0


class SupersededError(CheckpointError):
    """A newer life of the run has begun: this one changes nothing more in its directory."""


def claim_life(run_dir: Path, life: int, group: Group) -> None:
    """Make this life the newest of its run, before it writes anything else; a collective.

    Raises:
        RunDirectoryError: another job has begun under this number at the same time.
    """
    taken = False
    if group.rank == 0:
        try:
            heartbeats = HeartbeatFiles(run_dir, life)
            heartbeats.claim(os.environ.get(JOB, ""))
            heartbeats.remove_earlier()  # by which ranks of earlier lives notice, and leave their host memory
        except FileExistsError:
            taken = True
        except OSError as error:
            _log.error("an earlier life that still runs would not be stopped: %s; training goes on", error)
    if group.broadcast(taken):
        raise RunDirectoryError(
            f"another job has begun life {life} of the run in {run_dir} at the same time, and goes on; this one has "
            "changed nothing. End one of the two, or give this one another run_dir"
        )


def refuse_superseded(run_dir: Path, life: int) -> None:
    """Raise where a newer life has begun.

    Raises:
        SupersededError: it has.
        OSError: the directory cannot be read.
    """
    newer = newer_life(run_dir, life)
    if newer is not None:
        raise SupersededError(
            f"life {newer} of the run in {run_dir} has begun, this process is of life {life}: it writes nothing more "
            "there, and what was committed stays. End one of the two jobs if both still run"
        )


def wait_for_ranks(attempt: Attempt, timeout_seconds: float, cancelled: threading.Event) -> Parts | str:
    """Every rank's manifest, or the reason why the checkpoint has to be abandoned."""
    deadline = time.monotonic() + timeout_seconds
    found: Parts = {}
    skips = {_skip_name(rank): rank for rank in range(attempt.world_size)}
    awaited = {rank_manifest_name(rank, attempt.save): rank for rank in range(attempt.world_size)}
    while True:
        began = time.monotonic()
        names = set(names_in(attempt.directory))
        pause_seconds = max(_POLL_SECONDS, _PAUSES_PER_LOOK * (time.monotonic() - began))
        for name in sorted(names & skips.keys()):
            reason = attempt.skipped_reason(skips[name])
            if reason is not None:
                return f"rank {skips[name]} skipped it: {reason}"
        come = sorted(names & awaited.keys())
        for name, data in zip(come, for_each(read_bytes, [attempt.directory / name for name in come]), strict=True):
            rank = awaited[name]
            record = RankManifest.parse(data)
            if attempt.has_part(record, rank):
                found[rank] = record, hashlib.sha256(data).hexdigest()
                del awaited[name]
        if not awaited:
            return found
        missing = sorted(awaited.values())
        if cancelled.is_set():
            return f"cancelled while waiting for the shards of ranks {missing}"
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            return f"the shards of ranks {missing} did not come within {timeout_seconds:g} s"
        cancelled.wait(min(pause_seconds, _LONGEST_PAUSE_SECONDS, left_seconds))


def seal(attempt: Attempt, parts: Parts, sequence: int, missing: Missing | None = None) -> int:
    """Write the commit record, last of all, perhaps in the place of that of another save.

    Returns:
        Bytes of all ranks' files together.

    Raises:
        SaveError: a listed file is missing or has another size; no rank has some part of the model; or a rank did not
            write an operator that another rank left to it.
        DriftedError: replicas of one operator differ.
        SupersededError: a newer life has begun.
        OSError: the file system refused.
    """
    directory, (iteration, life, number) = attempt.directory, attempt.save
    records = {rank: record for rank, (record, _) in parts.items()}
    _check_parts(directory, records, missing)
    scalars = records[0].scalars
    label = scalars.get("origin") if isinstance(scalars, dict) else None
    manifest = Manifest(
        run_id=attempt.run_id,
        life=life,
        attempt=number,
        iteration=iteration,
        world_size=attempt.world_size,
        sequence=sequence,
        label=label if isinstance(label, str) else None,
        created_unix_seconds=time.time(),
        ranks={
            rank: RankRecord(sha256=sha256, files={name: file.listed for name, file in record.files.items()})
            for rank, (record, sha256) in sorted(parts.items())
        },
    )
    others = attempt.beside([rank_manifest_name(rank, attempt.save) for rank in records])
    refuse_superseded(directory.parents[1], life)  # among these may be what a newer life has committed
    for path in others:
        remove_entry(path)  # markers and temporary files of an attempt before this one
    # The ranks forced their files; on some file systems only this makes their names visible after a crash.
    for path in (directory.parent / SLABS, directory, directory.parent):
        sync_directory(path)
    refuse_superseded(directory.parents[1], life)  # again: forcing files to a disk takes a while
    write_bytes(directory / COMMIT, manifest.to_bytes())
    return manifest.total_bytes


def _check_parts(directory: Path, records: Mapping[int, RankManifest], missing: Missing | None) -> None:
    """Raise SaveError, or DriftedError, where the ranks' parts do not form one checkpoint; see `seal`."""
    listed = [(slab_path(directory, name), file) for one in records.values() for name, file in one.files.items()]
    sizes = for_each(_size_of, [path for path, _ in listed])
    for (path, file), size in zip(listed, sizes, strict=True):
        if size != file.bytes:
            raise SaveError(f"{path} is not there with the {file.bytes} bytes that its rank wrote")
    for rank, what in missing_among(records):
        raise SaveError(f"rank {rank} {what}")
    refuse_drifted(records)
    slices = {rank: _saved_slices(record) for rank, record in records.items()}
    ages = {
        rank: {name: operator.iteration for name, operator in record.operators.items()}
        for rank, record in records.items()
        if record.sparse
    }
    lacking = None if missing is None else missing(slices, ages)
    if lacking is not None:
        raise SaveError(f"the ranks' parts do not make up the model: {lacking}")


def _size_of(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _saved_slices(record: RankManifest) -> dict[str, SavedSlice]:
    """What the rank has saved of each parameter and buffer."""
    trained: dict[str, SavedSlice] = {
        name: (one.global_shape, one.offset, one.numel) for name, one in record.operators.items()
    }
    shapes = {name: one.shape for name, one in record.others.items()}
    shapes |= {name: one.shape for name, one in record.frozen.items()}
    return {name: (shape, 0, math.prod(shape)) for name, shape in shapes.items()} | trained


def _skip_name(rank: int) -> str:
    return f"rank-{rank:05d}.skip"
