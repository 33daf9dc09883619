"""Which stages of a pipeline have lost nothing, and rest while the others replay a window."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory import SharedMemory, shared_memory_left
from cpsr.checkpoint.memory_reader import load_memory_state, verify_memory_state
from cpsr.checkpoint.memory_states import MemoryState, memory_states
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import CheckpointError
from cpsr.job import Job
from cpsr.replay.upstream import LoggedSteps, Upstream

__all__ = ["Choice", "Kept", "Rest", "StageLogs", "choose", "rest_of"]

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


@dataclass(frozen=True)
class Choice:
    """Who rests.

    Attributes:
        until: iteration of their states, at which all go on together.
        stages: that rest, ascending.
        ranks: of these stages.
    """

    until: int
    stages: tuple[int, ...]
    ranks: frozenset[int]


def choose(kept: Sequence[Kept], last: int) -> Choice | None:
    """The iteration at which most stages can go on from what all their ranks have left; of two, the newer.

    Several lost stages compute together where they are neighbours, and each for itself where they are not.

    Args:
        kept: of each rank.
        last: of the window: before it no state is whole.

    Returns:
        None where no stage can rest.
    """
    best: Choice | None = None
    for until in sorted({one for rank in kept for one in rank.iterations if one >= last}):
        able = [until in rank.iterations and rank.logged >= until and rank.problem is None for rank in kept]
        lost = {rank.stage for rank, can in zip(kept, able, strict=True) if not can}
        stages = tuple(sorted({rank.stage for rank in kept} - lost))
        if stages and (best is None or len(stages) >= len(best.stages)):
            ranks = frozenset(number for number, rank in enumerate(kept) if rank.stage in stages)
            best = Choice(until, stages, ranks)
    return best


def _kept(job: Job, window: MemoryState, obstacle: str | None) -> tuple[Kept, _ByIteration, _ByIteration]:
    """What this rank has, verified; and where its whole states and its logs lie.

    Args:
        job: of this rank.
        window: that is replayed, as the life before left it.
        obstacle: why steps of this pipeline cannot be repeated.
    """
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
    states = {one.iteration: one for one in own if one.kind in ("departure", "snapshot") and _is_whole(one)}
    logs = {one.iteration: one for one in own if one.kind == "upstream"}
    logged = window.iteration
    while logged + 1 in logs:
        logged += 1
    return Kept(pipeline.stage, tuple(sorted(states)), logged, obstacle), states, logs


def _is_whole(state: MemoryState) -> bool:
    return state.oldest_iteration == state.iteration


@dataclass
class Rest:
    """The rest of this rank's stage, or that of others.

    Attributes:
        choice: who rests.
        logs: of this rank, by iteration; empty where it computes.
        snapshot: the state that it goes on with; None where it computes.
    """

    choice: Choice
    logs: dict[int, MemoryState]
    snapshot: Snapshot | None

    @property
    def here(self) -> bool:
        """Whether this rank rests."""
        return self.snapshot is not None

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
    job: Job, pool: SnapshotPool, window: MemoryState, last: int, small: Mapping[str, Any], upstream: Upstream | None
) -> Rest | None:
    """Agree on who rests, and load what this rank goes on with; a collective.

    Args:
        job: of this rank.
        pool: has a buffer for it.
        window: that is replayed, as the life before left it.
        last: its last iteration.
        small: the small state of its first one.
        upstream: keeps the logs for this life; None, on all ranks, where nothing is logged.

    Returns:
        None where all stages replay; a warning then says why.
    """
    kept, states, logged = _kept(job, window, _obstacle(job, small, upstream))
    everyone = [Kept(**one) for one in job.group.gather(vars(kept))]
    choice = choose(everyone, last)
    if choice is None:
        if job.group.rank == 0:
            logger.warning("all stages replay the window: %s", _why(everyone, window.iteration))
        return None
    snapshot, logs, problem = None, dict[int, MemoryState](), None
    if job.group.rank in choice.ranks and upstream is not None:
        try:
            snapshot = _loaded(pool, states[choice.until])
            logs = upstream.adopt([log for at, log in logged.items() if at <= choice.until])
        except (CheckpointError, OSError) as error:
            problem = f"rank {job.group.rank}: {error}"
    problems = [one for one in job.group.gather(problem) if one is not None]
    if problems:
        if snapshot is not None:
            pool.release(snapshot)
        if upstream is not None:
            upstream.forget()  # also adopted ones: this life makes those iterations again
        if job.group.rank == 0:
            logger.warning("all stages replay the window: %s", "; ".join(problems))
        return None
    return Rest(choice, logs, snapshot)


def _loaded(pool: SnapshotPool, state: MemoryState) -> Snapshot:
    snapshot = pool.acquire(state.iteration, {state.path.name})
    if snapshot is None:
        raise CheckpointError("no host buffer is free for the state that it had left")
    try:
        scalars: dict[str, Any] = load_memory_state(state, snapshot.shard)
        snapshot.scalars = scalars
    except CheckpointError:
        pool.release(snapshot)
        raise
    return snapshot


def _obstacle(job: Job, small: Mapping[str, Any], upstream: Upstream | None) -> str | None:
    if upstream is None:
        return "what its stages send is not logged"
    if job.shard.frozen:
        return "it has parameters outside the optimizer"
    if small["registered"]:
        return "the loop has registered objects, and may make them of what a stage at rest does not compute"
    return None


def _why(kept: Sequence[Kept], first: int) -> str:
    problem = next((rank.problem for rank in kept if rank.problem is not None), None)
    if problem is not None:
        return problem
    parts = []
    for number, rank in enumerate(kept):
        left = f"the state of iteration {rank.iterations[-1]}" if rank.iterations else "no state"
        logs = f"logs up to iteration {rank.logged}" if rank.logged > first else "no logs"
        parts.append(f"rank {number} (stage {rank.stage}) has left {left} and {logs}")
    return "; ".join(parts)


class StageLogs:
    """Does nothing without a pipeline of several stages.

    Args:
        job: this rank's.
        memory: names and stamps of the files.
        iterations: that are kept at first.

    Attributes:
        of_pipeline: whether there are several stages.
        upstream: the logs; None where there are none, or nothing can be logged, on all ranks.
    """

    def __init__(self, job: Job, memory: SharedMemory, iterations: int) -> None:
        pipeline = job.adapter.pipeline
        self._job, self._traffic = job, None if pipeline is None else pipeline.traffic
        self.of_pipeline = self._traffic is not None
        self.upstream: Upstream | None = None
        if self._traffic is None:
            return
        if self._traffic.obstacle is None:
            self.upstream = Upstream(memory, job.adapter.device, self._report, self._room)
            self.upstream.keep(iterations)
            self._traffic.follow(self.upstream)
        elif job.group.rank == 0:
            self._report(f"a lost stage replays together with all others: {self._traffic.obstacle}", logging.WARNING)

    def keep(self, iterations: int) -> None:
        """Keep so many from now on."""
        if self.upstream is not None:
            self.upstream.keep(iterations)

    def repeat(self, rest: Rest) -> None:
        """From the next step on this rank repeats what it had logged."""
        assert self._traffic is not None
        self._traffic.repeat(LoggedSteps(rest.logs, rest.choice.ranks, self.forget))

    def pause(self, *, paused: bool) -> None:
        """Log nothing meanwhile."""
        if self.upstream is not None:
            self.upstream.paused = paused

    def go_on(self) -> None:
        """The next step is computed."""
        if self._traffic is not None:
            self._traffic.go_on()

    def forget(self) -> None:
        """No log leads to the run's state any more."""
        if self.upstream is not None:
            self.upstream.forget()

    def close(self, *, remove: bool) -> None:
        """The engine is as before, and the memory goes; see `MemoryFile.close`."""
        if self._traffic is not None:
            self._traffic.stop()
        if self.upstream is not None:
            self.upstream.close(remove=remove)

    def _room(self) -> int:
        """Bytes for this rank: half of what is left is for later windows, and for others."""
        return min(available_host_bytes(), shared_memory_left()) // (2 * len(self._job.run.local_ranks))

    def _report(self, message: str, level: int) -> None:
        if level == logging.INFO and self._job.group.rank != self._job.adapter.data_parallel_ranks[0]:
            return  # the first of each stage is enough
        self._job.journal.event("stages logged", message, level=level)
