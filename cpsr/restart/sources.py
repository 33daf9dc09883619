"""Sources of state behind one interface: a checkpoint on the disk, a snapshot in host memory, or from scratch."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cpsr.checkpoint.progress import Progress
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.journal import Beginning
from cpsr.ranks.group import Group
from cpsr.restart.choice import Candidate
from cpsr.restart.engine_state import EngineState
from cpsr.restart.ladder import Ladder
from cpsr.restart.mixed_levels import take_nearer_experts
from cpsr.restart.older_experts import OlderExperts, differing_operator, older_experts, older_operators
from cpsr.restart.restored import Refusal, Restored
from cpsr.restart.weights_alone import WeightsAlone
from cpsr.state.scalars import Scalars

__all__ = [
    "FromCheckpoint",
    "FromMemory",
    "FromScratch",
    "FromWeights",
    "RefusedError",
    "Restart",
    "StateSource",
    "bring",
]

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """A state near the failure was refused; raised on every rank.

    Args:
        refusal: why, and what the attempt found.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class StateSource(Protocol):
    """One state of all ranks that can be loaded into the engine."""

    @property
    def candidate(self) -> Candidate:
        """Which state: its iteration, which ranks' parts are lost, whether it is exact, and what it costs."""
        ...

    def bring(self, refusal: Refusal | None) -> Restored:
        """Put the state into the engine; a collective.

        Args:
            refusal: of an earlier source.

        Raises:
            CheckpointError: it cannot be read, on every rank; the engine is as it was.
            RefusedError: it was refused, on every rank; the engine may hold anything.
        """
        ...


@dataclass(frozen=True)
class Restart:
    """Facts shared by all sources of one restart.

    Attributes:
        mode: `auto`, `predict` or `exact`.
        checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
        failure_iteration: f, the last step that every rank had finished; None where nothing is lost.
        progress: the ranks' counters at that time.
        load_seconds: wall time until the sources were known.
    """

    mode: str
    checkpoint_iteration: int | None
    failure_iteration: int | None
    progress: Progress | None
    load_seconds: float


@dataclass(frozen=True)
class FromScratch:
    """Start from scratch: nothing was committed, nothing is in memory, and the engine stays as constructed.

    Attributes:
        candidate: which state.
        iteration: of the engine.
    """

    candidate: Candidate
    iteration: int

    def bring(self, refusal: Refusal | None) -> Restored:
        """Leave the engine as it is."""
        return Restored(Beginning.SCRATCH, self.iteration, None, None, "no checkpoint has been committed yet")


@dataclass(frozen=True)
class FromCheckpoint:
    """The newest checkpoint, which is in the recovery buffer.

    Attributes:
        candidate: which state.
        restart: what all sources know.
        engine: takes the state.
        snapshot: this rank's part.
        older: the experts that were saved before it, if any were.
        catch_up: whether these take longer steps until they have caught up.
        group: the ranks.
        ladder: its snapshots in memory may have these experts of nearer iterations.
    """

    candidate: Candidate
    restart: Restart
    engine: EngineState
    snapshot: Snapshot
    older: OlderExperts | None
    catch_up: bool
    group: Group
    ladder: Ladder

    def bring(self, refusal: Refusal | None) -> Restored:
        """Put the checkpoint into the engine, with older experts from memory where that has nearer ones."""
        own, nearer = self.ladder.own, 0
        if self.older is not None:
            nearer = take_nearer_experts(self.snapshot, self.engine.expert_units(self.snapshot.shard), own, self.group)
        restored = _whole(self, self.snapshot, self.restart.load_seconds, refusal)
        if self.older is None:
            return restored
        older = older_experts(self.snapshot, self.group) or OlderExperts(0, self.snapshot.iteration)
        labelled = _with_older(restored, self.snapshot, older, catch_up=self.catch_up)
        if not nearer:
            return labelled
        text = f"{nearer} more come from snapshots in the memory of machines that are left, nearer to the checkpoint"
        return replace(labelled, reason=f"{labelled.reason}; {text}")


@dataclass(frozen=True)
class FromWeights:
    """A checkpoint that keeps the weights alone: the optimizer begins anew.

    Attributes:
        candidate: which state.
        restart: what all sources know.
        engine: takes the state.
        weights: this rank's part.
    """

    candidate: Candidate
    restart: Restart
    engine: EngineState
    weights: WeightsAlone

    def bring(self, refusal: Refusal | None) -> Restored:
        """Put the weights and zero moments into the engine."""
        snapshot, restart, damaged = self.weights.snapshot, self.restart, self.weights.damaged
        seconds, failure = restart.load_seconds, restart.failure_iteration
        restored = self.engine.restore(snapshot, self.candidate.parts, snapshot.iteration, failure, seconds)
        lost = 0 if failure is None else self.candidate.cost_iterations(failure)
        recomputed = f"; {lost} iterations are recomputed from there" if lost else ""
        return replace(
            restored,
            beginning=Beginning.WEIGHTS,
            damaged=damaged,
            reason=f"no whole checkpoint is left ({', '.join(damaged) or 'none was found'}): the weights, the learning "
            f"rate, the schedule and the place in the data are those of checkpoint {snapshot.iteration}; moments and "
            f"step count of the optimizer are zero, random states are as the script has set them{recomputed}",
        )


@dataclass(frozen=True)
class FromMemory:
    """A snapshot in this machine's host memory, or in that of a peer, from which it is fetched.

    Attributes:
        candidate: which state.
        restart: what all sources know.
        engine: takes the state.
        group: the ranks.
        ladder: reads what is in memory.
        pool: the host buffers.
        checkpoint: small state of the newest checkpoint, for what the snapshot leaves out; None without one.
        catch_up: whether older experts take longer steps until they have caught up.
        alone: there is no other state to continue from.
    """

    candidate: Candidate
    restart: Restart
    engine: EngineState
    group: Group
    ladder: Ladder
    pool: SnapshotPool
    checkpoint: dict[str, Any] | None
    catch_up: bool = False
    alone: bool = False

    def bring(self, refusal: Refusal | None) -> Restored:
        """Load the snapshot into the recovery buffer, and put it into the engine, as it is."""
        started = time.perf_counter()
        snapshot = self._load()
        older = older_experts(snapshot, self.group)
        restored = _whole(self, snapshot, self.restart.load_seconds + time.perf_counter() - started, refusal)
        if self.candidate.is_window:  # the buffer holds no whole state
            self.pool.release(snapshot)
        return restored if older is None else _with_older(restored, snapshot, older, catch_up=self.catch_up)

    def _load(self) -> Snapshot:
        own = self.candidate.parts[self.group.rank]
        snapshot = self.pool.acquire(own.iteration, {entry.name for entry in own.entries})
        if snapshot is None:
            raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
        try:
            self.ladder.bring(self.candidate.parts)
            snapshot.scalars = Scalars.with_learned(self.ladder.load(own, snapshot.shard), self.checkpoint)
            differing = differing_operator(snapshot, self.group)
            if differing is not None:
                raise CheckpointError(f"ranks hold '{differing}' of different iterations: one had skipped a snapshot")
            self._bring_frozen(snapshot)
        except CheckpointError:
            self.pool.release(snapshot)
            raise
        if not self.candidate.is_window:
            self.pool.seal(snapshot)  # stamped with this life, in case it ends before its first snapshot
            self.pool.keep(snapshot)
        return snapshot

    def _bring_frozen(self, snapshot: Snapshot) -> None:
        """Give the engine its frozen weights; a collective: if one rank has none of them, all raise."""
        problem = None
        try:
            self.engine.bring_frozen(snapshot.scalars)
        except CheckpointError as error:
            problem = f"rank {self.group.rank}: {error}"
        problems = "; ".join(part for part in self.group.gather(problem) if part is not None)
        if problems and self.alone:
            raise RecoveryError(
                f"the state of iteration {snapshot.iteration} in memory is all that is left of this run, and cannot be "
                f"continued: {problems}. It stays in memory: start again with those weights, or end it with `cpsr "
                "release` to begin anew"
            )
        if problems:
            raise CheckpointError(problems)


def bring(sources: list[StateSource], refusal: Refusal | None) -> Restored | None:
    """Load the first source that can be loaded; a collective.

    Args:
        sources: in the order of the choice.
        refusal: why none of them is near the failure.

    Returns:
        None where none can be loaded; the engine is then unchanged.
    """
    for source in sources:
        try:
            return source.bring(refusal)
        except RefusedError as error:
            refusal = error.refusal
        except CheckpointError as error:
            logger.warning("%s cannot be used, and the next state is tried: %s", _place(source.candidate), error)
    return None


def _whole(
    source: FromCheckpoint | FromMemory, snapshot: Snapshot, load_seconds: float, refusal: Refusal | None
) -> Restored:
    """Load a whole state into the engine, and state the reason for it."""
    restart, parts = source.restart, source.candidate.parts
    c, f = restart.checkpoint_iteration, restart.failure_iteration
    restored = source.engine.restore(snapshot, parts, c, f, load_seconds)
    place, lost = _place(source.candidate), 0 if f is None else source.candidate.cost_iterations(f)
    if lost == 0 and source.candidate.beginning is not Beginning.EXACT:
        return replace(restored, reason=f"at {place}")
    if lost == 0:
        return replace(restored, reason=f"exactly at {place}; nothing is lost")
    recomputed = f"{lost} iterations are recomputed from {place}"
    if refusal is None:
        return replace(restored, reason=f"mode {restart.mode}: {recomputed}")
    return restored.instead(refusal, recomputed)


def _with_older(restored: Restored, snapshot: Snapshot, older: OlderExperts, *, catch_up: bool) -> Restored:
    """The same life, labelled: some experts are of earlier iterations."""
    how = ", with longer steps until they have caught up" if catch_up else ""
    before = snapshot.iteration - older.oldest_iteration
    return replace(
        restored,
        beginning=Beginning.OLDER_EXPERTS,
        reason=f"{restored.reason}; {older.parameters} parameters of experts are up to {before} iterations older and "
        f"go on as they were{how}",
        taken_at=older_operators(snapshot),
    )


def _place(candidate: Candidate) -> str:
    if candidate.is_window:
        return f"the window in memory that begins with iteration {candidate.iteration}"
    if candidate.in_memory:
        return f"the state of iteration {candidate.iteration} in memory"
    return f"checkpoint {candidate.iteration}"
