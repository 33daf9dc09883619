"""What this stage of a pipeline sends to the others, iteration by iteration, in shared memory.

A neighbour that has lost its state computes the iterations of a window again, and this stage sends it once more what it
sent the first time. Each iteration has a file of its own; the oldest is overwritten once no window needs it.

Source: moevement, section 3.4: logs lie with the sender, by iteration and micro-batch.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import torch

from cpsr.checkpoint.device_copy import Pinning, new_event
from cpsr.checkpoint.manifest import dtype_name
from cpsr.checkpoint.memory import MemoryFile, SharedMemory, shared_memory_left
from cpsr.checkpoint.memory_reader import OpenState
from cpsr.checkpoint.memory_states import PAGE_BYTES, MemoryState, SlabSize, describe
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.engines.stage_operations import Operation
from cpsr.errors import CheckpointError, SaveError
from cpsr.job import Job
from cpsr.state.shard import Shard

__all__ = ["LoggedSteps", "StageLogs", "stage_logs"]

LEAST = 2  # iterations; a failure loses at least as many
PLAIN_TENSORS = 8  # of the random states beside an operation
_ALIGNED = 64
_WHOLE = "all"


@dataclass
class _Slot:
    """The file of one iteration."""

    file: MemoryFile
    pinning: Pinning | None
    iteration: int
    sealed: "Future[None] | None" = None


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
        return min(available_host_bytes(), shared_memory_left()) // (2 * len(job.run.local_ranks))

    obstacles = [one for one in group.gather(pipeline.traffic.obstacle) if one is not None]
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
        self._memory, self._report, self._room = memory, report, room
        self._device = device if device.type == "cuda" else None
        self._stream: Any = None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpsr-upstream")
        self.paused = False
        self._wanted = self._kept = 0  # iterations that windows need, and that there is memory for
        self._size = SlabSize(0, 0)  # of one iteration; of no bytes until the first was measured
        self._slots: list[_Slot] = []
        self._slot: _Slot | None = None  # that is filled
        self._off = self._dropped = False
        self._iteration = -1
        self._end = 0
        self._entries: list[dict[str, Any]] = []
        self._reported: set[str] = set()

    def keep(self, iterations: int) -> None:
        """Keep so many from now on; without it nothing is logged."""
        if iterations > self._wanted:
            self._wanted = iterations
            self._fit(self._size)

    # TrafficLog

    def begin(self, iteration: int) -> None:
        """Overwrite the oldest iteration with this one."""
        self._iteration, self._end, self._entries, self._dropped = iteration, 0, [], self._off or self.paused
        self._slot = None
        if self._kept < LEAST or self._dropped:
            return
        try:
            slot = self._slot = self._next()
            slot.iteration = iteration
            slot.file.unseal()
        except (OSError, SaveError) as error:
            self._give_up(error)

    def add(self, operation: Operation, values: torch.Tensor | None, plain: Any = None) -> None:
        """See `TrafficLog.add`."""
        entry: dict[str, Any] = {"operation": asdict(operation), "plain": plain}
        if values is not None:
            start = -(-self._end // _ALIGNED) * _ALIGNED
            self._end = start + values.numel() * values.element_size()
            kept = [start, list(values.shape), dtype_name(values.dtype)]
            entry["values"] = kept
            slot = self._slot
            if slot is not None and not self._dropped:
                if self._end <= slot.file.bytes.numel():
                    self._keep(slot.file.bytes[start : self._end].view(values.dtype).view(values.shape), values)
                else:
                    self._dropped = True  # what is sent has grown: the next file is as large
        self._entries.append(entry)

    def end(self, applied: bool, form: Any) -> None:
        """Seal it beside the training."""
        plain = sum(entry["plain"] is not None for entry in self._entries)
        aligned = -(-self._end // PAGE_BYTES) * PAGE_BYTES
        size = SlabSize.for_tensors([f"other/{_WHOLE}"], aligned, PLAIN_TENSORS * plain)
        if (size := _larger(size, self._size)) != self._size:
            self._fit(size)
        slot, self._slot = self._slot, None
        if slot is None or self._dropped:
            return
        event = None
        if self._stream is not None:
            event = new_event()
            event.record(self._stream)
        scalars = {"entries": self._entries, "applied": applied, "form": form}
        slot.sealed = self._worker.submit(self._seal, slot, self._iteration, scalars, event)

    def drop(self, reason: str | None) -> None:
        """This iteration is not kept; None: it was not completed."""
        self._dropped = True
        if reason is not None:
            self._say(f"what this stage sent in iteration {self._iteration} is not logged, since {reason}")

    # A life

    def adopt(self, logs: Collection[MemoryState]) -> dict[int, MemoryState]:
        """Keep logs of the life before as those of this one.

        Returns:
            What they are now, by iteration.

        Raises:
            OSError: one is not there any more, or another process has it.
        """
        kept = {}
        for log in logs:
            found = describe(log.path)
            if found is None:
                raise OSError(f"{log.path} holds no log any more")
            file = self._memory.file(f"upstream-{_number_in(log.path.name)}", found.size)
            self._slots.append(_Slot(file, None, log.iteration))
            file.restamp(self._memory.life, self._memory.branch)
            kept[log.iteration] = replace(log, life=self._memory.life, branch=self._memory.branch)
        if self._slots:
            self._fit(reduce(_larger, (slot.file.size for slot in self._slots)))
        return kept

    def forget(self) -> None:
        """No log leads to the run's state any more."""
        self._worker.submit(lambda: None).result()
        for slot in self._slots:
            slot.file.unseal()
            slot.iteration = -1
        self._dropped = True

    def close(self, *, remove: bool) -> None:
        """Let the memory go; see `MemoryFile.close`."""
        self._worker.shutdown(wait=True)
        for slot in self._slots:
            if slot.pinning is not None:
                slot.pinning.undo()
            slot.file.close(remove=remove)

    def _next(self) -> _Slot:
        """The file of the oldest iteration, or one more."""
        if len(self._slots) < self._kept:
            taken = {_number_in(slot.file.path.name) for slot in self._slots}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            slot = _Slot(self._memory.file(f"upstream-{number}", self._size), None, -1)
            self._slots.append(slot)
        else:
            slot = min(self._slots, key=lambda one: one.iteration)
            if slot.sealed is not None:
                slot.sealed.result()
            if slot.file.size != self._size:
                number = _number_in(slot.file.path.name)
                if slot.pinning is not None:
                    slot.pinning.undo()
                slot.file.close(remove=True)
                slot.file, slot.pinning = self._memory.file(f"upstream-{number}", self._size), None
        if self._device is not None and slot.pinning is None:
            slot.pinning = Pinning(slot.file.bytes, self._device)
        return slot

    def _keep(self, target: torch.Tensor, source: torch.Tensor) -> None:
        try:
            self._copy(target, source)
        except RuntimeError as error:
            self.drop(f"it could not be copied: {error}")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            if self._stream is None:
                target.copy_(source.detach())
                return
            kept = source.detach().clone()  # what comes next on the present stream may change it in place
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                target.copy_(kept, non_blocking=True)
            kept.record_stream(self._stream)

    def _seal(self, slot: _Slot, iteration: int, scalars: dict[str, Any], event: Any) -> None:
        """In the worker."""
        try:
            if event is not None:
                event.synchronize()
            views = Shard({}, {_WHOLE: slot.file.bytes})
            memory = self._memory
            slot.file.seal(memory.rank, memory.life, "upstream", views, iteration, scalars, branch=memory.branch)
        except Exception as error:  # noqa: BLE001 - training goes on without this log
            self._say(f"what this stage sent in iteration {iteration} is not logged: {error}")

    def _fit(self, size: SlabSize) -> None:
        """As many as there is memory for; of no bytes while the size of one is not known."""
        self._size = size
        if not size.bytes:
            return
        there = sum(slot.file.size.bytes for slot in self._slots)
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
        self._off = self._dropped = True
        self._say(f"no logs of what stages send are kept in this life: {error}. A failure then repeats all stages")

    def _say(self, message: str) -> None:
        kind = message.partition(":")[0].partition(" in iteration ")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(message, logging.WARNING)


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
            for entry in scalars["entries"]:
                operation = entry["operation"]
                operation = Operation(**{**operation, "shape": tuple(operation["shape"])})
                yield operation, _values(content, entry.get("values")), entry["plain"]

    def applied(self, iteration: int) -> bool:
        """See `Repeats.applied`; known once its operations were read."""
        return self._applied[iteration]


def _larger(one: SlabSize, other: SlabSize) -> SlabSize:
    """With room for both."""
    return SlabSize(max(one.header_bytes, other.header_bytes), max(one.buffer_bytes, other.buffer_bytes))


def _values(content: torch.Tensor, kept: Any) -> torch.Tensor | None:
    if kept is None:
        return None
    start, shape, dtype = kept
    kind = getattr(torch, dtype)
    return content[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def _number_in(name: str) -> int:
    return int(name.rpartition("-")[2])
