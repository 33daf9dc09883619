"""Stages of a pipeline that have lost nothing: they rest while the others replay a window from what these had sent.

What a stage sends to the others lies in shared memory, iteration by iteration. A neighbour that has lost its state
computes the iterations of a window again, and this stage sends it once more what it sent the first time. Each iteration
has a file of its own; the oldest is overwritten once no window needs it.

Source: moevement, section 3.4: logs lie with the sender, by iteration and micro-batch.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch

from cpsr.checkpoint.arena import Arena, free_bytes
from cpsr.checkpoint.copying import CopyEngine, CopyPlan, Publish
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.manifest import dtype_name
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_ring import CLOSE_SECONDS, MemoryRing, Slot
from cpsr.checkpoint.memory_states import PAGE_BYTES, MemoryState, OpenState, SlabSize, load_states, verify_memory_state
from cpsr.checkpoint.parts import Held, Parts
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.tensor_file import PlacedTensor
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.stage_operations import Operation
from cpsr.errors import CheckpointError, SaveError
from cpsr.job import Job
from cpsr.state.codec import SCALARS, encode
from cpsr.state.device_values import Arrival
from cpsr.state.shard import Shard

__all__ = ["Kept", "LoggedSteps", "Rest", "StageLogs", "choose", "rest_of", "stage_logs"]

logger = logging.getLogger(__name__)

LEAST = 2  # iterations; a failure loses at least as many
_ALIGNED = 64
_WHOLE = "all"


def stage_logs(job: Job, memory: SharedMemory) -> "StageLogs | None":
    """Log what this rank's stage sends; a collective. None where there are no stages, or steps cannot be repeated."""
    pipeline, group = job.adapter.pipeline, job.group
    if pipeline is None:
        return None

    def report(message: str, level: int) -> None:
        if level != logging.INFO or group.rank == job.adapter.data_parallel_ranks[0]:  # one of each stage is enough
            job.journal.event("stages logged", message, level=level)

    def room() -> int:
        """Half of what is left is for later windows, and for others."""
        return free_bytes() // (2 * len(job.run.local_ranks))

    obstacles = group.gather_present(pipeline.traffic.obstacle)
    if obstacles:
        if group.rank == 0:
            report(f"a lost stage replays together with all others: {obstacles[0]}", logging.WARNING)
        return None
    logs = StageLogs(memory, job.adapter.device, report, room)
    pipeline.traffic.follow(logs)
    return logs


class StageLogs:
    """A `TrafficLog`. An error ends the log of that iteration, never the training.

    Args:
        memory: names and stamps of the files.
        device: of the engine.
        report: takes what could not be logged, and how much memory the logs take.
        room: bytes that they may take.

    Attributes:
        paused: nothing is logged: norms are not what they were where gradients of repeated iterations are left out.
    """

    def __init__(
        self, memory: SharedMemory, device: torch.device, report: Callable[[str, int], None], room: Callable[[], int]
    ) -> None:
        self._report, self._room = report, room
        self._engine = CopyEngine("upstream", device if device.type == "cuda" else None)
        self._ring = MemoryRing(memory, "upstream", self._engine)
        self.paused = False
        self._wanted = self._kept = 0  # iterations that windows need, and that there is memory for
        self._size = SlabSize(0, 0)  # of one iteration; of no bytes until the first was measured
        self._slot: Slot | None = None  # that is filled
        self._off = False
        self._log = _Log(-1)  # of the iteration that runs
        self._reported: set[str] = set()

    def keep(self, iterations: int) -> None:
        """Keep so many from now on; without it nothing is logged."""
        if iterations > self._wanted:
            self._wanted = iterations
            self._fit(self._size)

    # TrafficLog

    def begin(self, iteration: int) -> None:
        """Overwrite the oldest iteration with this one."""
        self._log, self._slot = _Log(iteration, dropped=self._off or self.paused), None
        if self._kept < LEAST or self._log.dropped:
            return
        try:
            self._slot = self._ring.next(self._kept, self._size)
            self._slot.iteration = iteration
        except (OSError, SaveError) as error:
            self._give_up(error)

    def add(self, operation: Operation, values: torch.Tensor | None, plain: Any = None) -> None:
        """See `TrafficLog.add`."""
        log, slot = self._log, self._slot
        if plain is not None:
            log.plain[len(log.operations)] = plain
        if values is None:
            log.operations.append((vars(operation), None))
            return
        start = -(-log.end // _ALIGNED) * _ALIGNED
        log.end = start + values.nbytes
        log.operations.append((vars(operation), (start, tuple(values.shape), dtype_name(values.dtype))))
        if slot is None or log.dropped:
            return
        if log.end > slot.file.bytes.numel():
            log.dropped = True  # what is sent has grown: the next file is as large
        elif values.is_cuda:
            try:
                self._engine.copy_beside(_place(slot, start, values), values)
            except RuntimeError as error:
                self.drop(f"it could not be copied: {error}")
        else:
            # Layers keep what they sent, for the backward pass. Collectives and receives write where they have read.
            kept = values.detach() if operation.verb == "send" else values.clone()
            log.kept.append((start, kept, kept._version))

    def end(self, applied: bool, form: Any) -> None:
        """Seal it beside the training."""
        log = self._log
        aligned = -(-log.end // PAGE_BYTES) * PAGE_BYTES
        size = SlabSize.for_tensors([f"other/{_WHOLE}"], aligned)
        if (size := _larger(size, self._size)) != self._size:
            self._fit(size)
        slot, self._slot = self._slot, None
        if slot is None or log.dropped:
            return
        prepare = partial(self._prepare, slot, log, {"applied": applied, "form": form}, self._engine.arrival())
        slot.last_work = self._engine.seal(prepare)

    def drop(self, reason: str | None) -> None:
        """This iteration is not kept; None: it was not completed."""
        self._drop(self._log, reason)

    def _drop(self, log: "_Log", reason: str | None) -> None:
        log.dropped = True
        if reason is not None:
            self._say(f"what this stage sent in iteration {log.iteration} is not logged, since {reason}")

    # A life

    def adopt(self, logs: Collection[MemoryState]) -> dict[int, MemoryState]:
        """Keep logs of the life before as those of this one.

        Returns:
            What they are now, by iteration.

        Raises:
            OSError: one is not there any more, or another process has it.
        """
        kept = {log.iteration: self._ring.adopt(int(log.name.rpartition("-")[2])) for log in logs}
        if kept:
            self._fit(reduce(_larger, (slot.file.size for slot in self._ring.slots.values())))
        return kept

    def forget(self) -> None:
        """No log leads to the run's state any more."""
        self._ring.forget()
        self._log.dropped = True

    def close(self, *, remove: bool) -> None:
        """Let the memory go; see `MemoryFile.close`."""
        if not self._ring.close(remove=remove):
            self._say(f"a copy to host memory has not ended within {CLOSE_SECONDS:g} s: its memory is left as it is")

    def _prepare(self, slot: Slot, log: "_Log", scalars: dict[str, Any], copied: Arrival | None) -> Publish | None:
        """In the engine's thread, after the copies that it has made."""
        iteration = log.iteration
        try:
            if log.dropped:
                return None
            if copied is not None:
                copied.wait("its copies")
            held = self._copy(slot, log)
            if any(values._version != version for _, values, version in log.kept):
                self._drop(log, "something has written to a tensor after it was sent")
                return None
            log.kept.clear()
            # As text: the training waits while this thread has Python, ten times as long for a tree of small lists.
            scalars |= {"operations": json.dumps(log.operations), "plain": log.plain}
            return slot.file.prepare(
                "upstream", Shard({}, {_WHOLE: slot.file.bytes}), iteration, encode(scalars, prefix=SCALARS), held=held
            )
        except Exception as error:  # noqa: BLE001 - training goes on without this log
            self._say(f"what this stage sent in iteration {iteration} is not logged: {error}")
            return None

    def _copy(self, slot: Slot, log: "_Log") -> Held:
        """Copy what the host has; in the engine's thread."""
        content = slot.file.bytes
        if slot.held is None:
            slot.held = Held(Parts([(f"other/{_WHOLE}", 0, len(content))], len(content)), content)
        held = slot.held
        held.overwrite(held.parts.names)
        pairs = ((_place(slot, start, values), values) for start, values, _ in log.kept)
        CopyPlan(pairs, held).run(None, hashed=self._engine.hashes)
        held.fill(held.parts.names, log.iteration)
        return held

    def _fit(self, size: SlabSize) -> None:
        """As many as there is memory for; of no bytes while the size of one is not known."""
        self._size = size
        if not size.bytes:
            return
        there = sum(slot.file.size.bytes for slot in self._ring.slots.values())
        try:
            self._kept = min(self._wanted, (self._room() + there) // self._size.bytes)
        except OSError as error:
            self._give_up(error)
            return
        each, total = self._size.bytes / 1e6, self._kept * self._size.bytes / 1e6
        if self._kept < self._wanted:
            self._report(
                f"of the {self._wanted} iterations since the oldest window, host memory takes what this stage sends to "
                f"others ({each:.2f} MB) for {self._kept}: a failure after more of them repeats all stages",
                logging.WARNING,
            )
        else:
            text = f"{each:.2f} MB an iteration, {self._kept} iterations, {total:.1f} MB of host memory"
            self._report(f"what this stage sends to others is logged: {text}", logging.INFO)

    def _give_up(self, error: Exception) -> None:
        self._off = self._log.dropped = True
        self._say(f"no logs of what stages send are kept in this life: {error}. A failure then repeats all stages")

    def _say(self, message: str) -> None:
        kind = message.partition(":")[0].partition(" in iteration ")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(message, logging.WARNING)


@dataclass
class _Log:
    """Of one iteration.

    Attributes:
        iteration: of it.
        end: of its values in the file, in bytes.
        operations: as they happened, each with start, shape and type of its values, if it has any.
        plain: place of an operation -> its plain data.
        kept: what the host has, until it is copied: where it starts, and how often torch had changed it.
        dropped: it does not count; said by any thread.
    """

    iteration: int
    end: int = 0
    operations: list[tuple[dict[str, Any], tuple[int, tuple[int, ...], str] | None]] = field(default_factory=list)
    plain: dict[int, Any] = field(default_factory=dict)
    kept: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    dropped: bool = False


class LoggedSteps:
    """`Repeats` of the logs in shared memory.

    Args:
        logs: of this rank, by iteration.
        resting: ranks that repeat only what crosses the boundaries.
        void: ends the use of the logs.
    """

    def __init__(self, logs: dict[int, MemoryState], resting: frozenset[int], void: Callable[[], None]) -> None:
        self._logs, self.resting, self.void = logs, resting, void
        self.form: Any = None
        self._applied: dict[int, bool] = {}

    def operations(self, iteration: int) -> Iterator[tuple[Operation, torch.Tensor | None, Any]]:
        """See `Repeats.operations`.

        Raises:
            CheckpointError: that iteration was not logged, or its log is damaged.
        """
        if iteration not in self._logs:
            raise CheckpointError(f"what this stage sent in iteration {iteration} was not logged")
        with OpenState(self._logs[iteration]) as log:
            scalars, content = log.scalars(), log.as_it_is(f"other/{_WHOLE}")
            self.form, self._applied[iteration] = scalars["form"], scalars["applied"]
            for place, (operation, placed) in enumerate(json.loads(scalars["operations"])):
                values = None
                if placed is not None:
                    start, shape, dtype = placed
                    values = PlacedTensor("", tuple(shape), getattr(torch, dtype), start).view(content)
                operation["shape"] = tuple(operation["shape"])
                yield Operation(**operation), values, scalars["plain"].get(place)

    def applied(self, iteration: int) -> bool:
        """See `Repeats.applied`; known once its operations were read."""
        return self._applied[iteration]


def _place(slot: Slot, start: int, values: torch.Tensor) -> torch.Tensor:
    """Where these values lie in the file."""
    return slot.file.bytes[start : start + values.nbytes].view(values.dtype).view(values.shape)


def _larger(one: SlabSize, other: SlabSize) -> SlabSize:
    """With room for both."""
    return SlabSize(max(one.header_bytes, other.header_bytes), max(one.buffer_bytes, other.buffer_bytes))


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
        steps: what this rank has logged; None where it computes, as the snapshot then is.
        snapshot: the state that it goes on with.
    """

    until: int
    stages: tuple[int, ...]
    ranks: frozenset[int]
    steps: LoggedSteps | None = None
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
    job: Job, pool: SnapshotPool, window: MemoryState, last: int, small: Mapping[str, Any], own_logs: StageLogs
) -> Rest | None:
    """Agree on who rests, and load what this rank goes on with; a collective.

    Args:
        job: of this rank.
        pool: has a buffer for it.
        window: that is replayed, as the life before left it.
        last: its last iteration.
        small: the small state of its first one.
        own_logs: keeps the logs for this life.

    Returns:
        None where all stages replay; a warning then says why.
    """
    obstacle = "it has parameters outside the optimizer" if job.shard.frozen else None
    if small["registered"]:
        obstacle = "the loop has registered objects, and may make them of what a stage at rest does not compute"
    kept, states, logs = _kept(job, window, obstacle)
    everyone = [Kept(**one) for one in job.group.gather(vars(kept))]
    until, stages = choose(everyone, last) or (last, ())
    rest = Rest(until, stages, frozenset(rank for rank, one in enumerate(everyone) if one.stage in stages))
    problem = None
    if not stages:
        reasons = [one.problem for one in everyone if one.problem is not None]
        problem = [*reasons, "no stage's ranks have all left a state and the logs up to it"][0]
    elif job.group.rank in rest.ranks:
        try:
            rest.snapshot = pool.acquire(until, {states[until].name})
            if rest.snapshot is None:
                raise CheckpointError("no host buffer is free for the state that it had left")
            rest.snapshot.scalars = load_states([states[until]], rest.snapshot.shard)
            adopted = own_logs.adopt([log for at, log in logs.items() if at <= until])
            rest.steps = LoggedSteps(adopted, rest.ranks, own_logs.forget)
        except (CheckpointError, OSError) as error:
            problem = f"rank {job.group.rank}: {error}"
    problems = job.group.gather_present(problem)
    if not problems:
        return rest
    if rest.snapshot is not None:
        pool.release(rest.snapshot)
    own_logs.forget()  # also adopted ones: this life makes those iterations again
    if job.group.rank == 0:
        logger.warning("all stages replay the window: %s", "; ".join(dict.fromkeys(problems)))
    return None


def _kept(job: Job, window: MemoryState, obstacle: str | None) -> tuple[Kept, _ByIteration, _ByIteration]:
    """What this rank has, verified; and where its whole states and its logs lie."""
    pipeline = job.adapter.pipeline
    assert pipeline is not None
    own = [
        state
        for state in Arena(job.run.run_id).list(job.group.rank)
        if (state.life, state.branch) == (window.life, window.branch)
        and state.iteration > window.iteration
        and state.place != "replica"
        and verify_memory_state(state) is None
    ]
    held = [one for one in own if one.kind in ("departure", "snapshot") and one.oldest_iteration == one.iteration]
    states = {one.iteration: one for one in held if not one.lacking}
    logs = {one.iteration: one for one in own if one.kind == "upstream"}
    logged = window.iteration
    while logged + 1 in logs:
        logged += 1
    return Kept(pipeline.stage, tuple(sorted(states)), logged, obstacle), states, logs
