"""Which stages of a pipeline have lost nothing, and rest while the others replay a window."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory_reader import load_states, verify_memory_state
from cpsr.checkpoint.memory_states import MemoryState, memory_states
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import CheckpointError
from cpsr.job import Job
from cpsr.replay.stage_traffic import StageLogs

__all__ = ["Kept", "Rest", "choose", "rest_of"]

logger = logging.getLogger(__name__)

_ByIteration = dict[int, MemoryState]


@dataclass(frozen=True)
class Kept:
    """What a rank has of the run's end, beside its window.

    Attributes:
        stage: of the pipeline.
        iterations: of the whole states that it left when the group broke.
        logged: the last iteration of its logs, which begin right after the window's first.
        problem: why it has no use for them; None where it has.
    """

    stage: int
    iterations: tuple[int, ...]
    logged: int
    problem: str | None = None


def choose(kept: Sequence[Kept], last: int) -> tuple[int, tuple[int, ...]] | None:
    """Who rests: the stages that can go on from what all their ranks have left.

    Several lost stages compute together where they are neighbours, and each for itself where they are not.

    Args:
        kept: of each rank.
        last: of the window: before it no state is whole.

    Returns:
        The iteration at which most stages can; of two, the newer. And these stages, ascending. None where none can.
    """
    best: tuple[int, tuple[int, ...]] | None = None
    for until in sorted({one for rank in kept for one in rank.iterations if one >= last}):
        able = [until in rank.iterations and rank.logged >= until and rank.problem is None for rank in kept]
        lost = {rank.stage for rank, can in zip(kept, able, strict=True) if not can}
        stages = tuple(sorted({rank.stage for rank in kept} - lost))
        if stages and (best is None or len(stages) >= len(best[1])):
            best = until, stages
    return best


@dataclass
class Rest:
    """The rest of this rank's stage, or that of others.

    Attributes:
        until: iteration of their states, at which all go on together.
        stages: that rest.
        ranks: of these.
        logs: of this rank, by iteration; empty where it computes.
        snapshot: the state that it goes on with; None where it computes.
    """

    until: int
    stages: tuple[int, ...]
    ranks: frozenset[int]
    logs: _ByIteration = field(default_factory=dict)
    snapshot: Snapshot | None = None

    def end(self, adapter: EngineAdapter, pool: SnapshotPool) -> None:
        """Give the engine the state that this rank had left; a collective of its stage."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is None:
            return
        live = dict(adapter.shard(to_fill=True).tensors())
        with torch.no_grad():
            for key, values in snapshot.shard.tensors():
                live[key].copy_(values)
        adapter.load_scalars(snapshot.scalars["engine"])
        adapter.push_down()
        pool.release(snapshot)


def rest_of(
    job: Job, pool: SnapshotPool, window: MemoryState, last: int, small: Mapping[str, Any], stage_logs: StageLogs
) -> Rest | None:
    """Agree on who rests, and load what this rank goes on with; a collective.

    Args:
        job: of this rank.
        pool: has a buffer for it.
        window: that is replayed, as the life before left it.
        last: its last iteration.
        small: the small state of its first one.
        stage_logs: keeps the logs for this life.

    Returns:
        None where all stages replay; a warning then says why.
    """
    kept, states, logs = _kept(job, window, _obstacle(job, small))
    everyone = [Kept(**one) for one in job.group.gather(vars(kept))]
    choice = choose(everyone, last)
    if choice is None:
        reasons = [one.problem for one in everyone if one.problem is not None]
        _all_replay(job, [*reasons, "no stage's ranks have all left a state and the logs up to it"][0])
        return None
    until, stages = choice
    rest = Rest(until, stages, frozenset(rank for rank, one in enumerate(everyone) if one.stage in stages))
    problem = None
    if job.group.rank in rest.ranks:
        try:
            rest.snapshot = _loaded(pool, states[until])
            rest.logs = stage_logs.adopt([log for at, log in logs.items() if at <= until])
        except (CheckpointError, OSError) as error:
            problem = f"rank {job.group.rank}: {error}"
    problems = [one for one in job.group.gather(problem) if one is not None]
    if problems:
        if rest.snapshot is not None:
            pool.release(rest.snapshot)
        stage_logs.forget()  # also adopted ones: this life makes those iterations again
        _all_replay(job, "; ".join(problems))
        return None
    return rest


def _kept(job: Job, window: MemoryState, obstacle: str | None) -> tuple[Kept, _ByIteration, _ByIteration]:
    """What this rank has, verified; and where its whole states and its logs lie."""
    pipeline = job.adapter.pipeline
    assert pipeline is not None
    own = [
        state
        for state in memory_states(job.run.run_id)
        if state.rank == job.group.rank
        and (state.life, state.branch) == (window.life, window.branch)
        and state.iteration > window.iteration
        and state.place != "replica"
        and verify_memory_state(state) is None
    ]
    whole = (one for one in own if one.kind in ("departure", "snapshot") and one.oldest_iteration == one.iteration)
    states = {one.iteration: one for one in whole}
    logs = {one.iteration: one for one in own if one.kind == "upstream"}
    logged = window.iteration
    while logged + 1 in logs:
        logged += 1
    return Kept(pipeline.stage, tuple(sorted(states)), logged, obstacle), states, logs


def _loaded(pool: SnapshotPool, state: MemoryState) -> Snapshot:
    snapshot = pool.acquire(state.iteration, {state.path.name})
    if snapshot is None:
        raise CheckpointError("no host buffer is free for the state that it had left")
    try:
        scalars: dict[str, Any] = load_states([state], snapshot.shard)
        snapshot.scalars = scalars
    except CheckpointError:
        pool.release(snapshot)
        raise
    return snapshot


def _obstacle(job: Job, small: Mapping[str, Any]) -> str | None:
    """Why no stage of this pipeline may rest."""
    if job.shard.frozen:
        return "it has parameters outside the optimizer"
    if small["registered"]:
        return "the loop has registered objects, and may make them of what a stage at rest does not compute"
    return None


def _all_replay(job: Job, why: str) -> None:
    if job.group.rank == 0:
        logger.warning("all stages replay the window: %s", why)
