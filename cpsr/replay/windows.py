"""The windows of one rank's life: one is replayed where the life began with it, then new ones are taken."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.tiers import Source, state_of
from cpsr.engines.moe.naming import experts_of
from cpsr.errors import SaveError
from cpsr.job import Job
from cpsr.replay.conversion import Conversion
from cpsr.replay.layout import WindowLayout
from cpsr.replay.recorder import Copied, Recorder
from cpsr.replay.schedule import schedule, units_of, window_iterations
from cpsr.state.shard import Shard

__all__ = ["Windows"]

MEASURED_COPIES = 8  # bandwidth and overlap are medians of this many


class Windows:
    """Called after each step; on the training thread.

    All ranks begin their windows after the same iterations, with as many iterations. What has its turn when is each
    rank's own affair: a rank replays its own part of the state, and gives the others compute weights that are right.

    Args:
        job: this rank's.
        memory: names and stamps of the files.
        pool: takes no snapshot while the state is not whole.
    """

    def __init__(self, job: Job, memory: SharedMemory, pool: SnapshotPool) -> None:
        self._job, self._pool = job, pool
        shard = job.shard
        self._units = units_of(shard, experts_of(job.adapter.expert_naming(), shard.operators))
        self._compute = job.adapter.compute_dtypes()
        self._active = [sum(shard.operators[one].state_bytes for one in names) for names in self._units.values()]
        self._kept = shard
        self._recorder: Recorder | None = Recorder(memory, self._shard, self._report)
        self._conversion: Conversion | None = None
        self._iterations = job.config.replay.window_iterations or 1
        self._layout = self._laid_out()
        self._first: int | None = None
        self._rates: deque[float] = deque(maxlen=MEASURED_COPIES)  # bytes per second
        self._overlaps: deque[float] = deque(maxlen=MEASURED_COPIES)

    def settle(self, sources: Sequence[Source]) -> None:
        """Keep the window that this life begins with, before the states of earlier lives are void."""
        source = sources[self._job.group.rank] if sources else None
        if source is not None and source.entry is not None and source.entry.kind == "window":
            assert self._recorder is not None
            self._recorder.adopt(source.entry.name)
            conversion = self._conversion = Conversion(state_of(source.entry), self._job.adapter)
            self._pool.obstacle = (
                f"the state is whole again after iteration {conversion.last}: until then the window of iterations "
                f"{conversion.first} to {conversion.last} is replayed"
            )

    def start(self) -> None:
        """Take the memory of the windows; where a rank has too little, it takes none, and training goes on."""
        assert self._recorder is not None
        problem = None
        try:
            self._recorder.prepare(self._layout)
        except (OSError, SaveError) as error:
            problem = f"rank {self._job.group.rank}: {error}"
        problems = [one for one in self._job.group.gather(problem) if one is not None]
        if problems:
            self._recorder.close(remove=self._conversion is None)
            self._recorder = None
            self._report(f"no windows are kept in this life: {'; '.join(problems)}", once=True)

    def before_update(self) -> None:
        """The optimizer is about to change the state."""
        copied = None if self._recorder is None else self._recorder.finish()
        if copied is not None:
            self._note(copied)

    def after_step(self, iteration: int) -> None:
        """Right after a step, before anything looks at its state."""
        if self._conversion is not None:
            self._conversion.after_step(iteration)

    def take(self, iteration: int, capture: Callable[[], Any]) -> None:
        """At the end of an iteration: take its snapshot, or check what was repeated.

        Args:
            iteration: the finished one.
            capture: gives the whole small state.

        Raises:
            RecoveryError: an iteration was not repeated as it was; see `Conversion.require_same`.
        """
        if self._conversion is not None:
            self._check(self._conversion, iteration)
        if self._conversion is not None or self._recorder is None:
            return
        step = 0 if self._first is None else iteration - self._first
        if 0 < step < len(self._layout.turns):
            self._recorder.take(step, iteration)
            return
        if len(self._layout.turns) != self._iterations:
            self._layout = self._laid_out()
        self._first = iteration
        self._recorder.begin(self._layout, iteration, capture())

    def agree(self) -> None:
        """Find the number of iterations anew from what was measured; a collective."""
        if self._job.config.replay.window_iterations is not None:
            return
        self._iterations = max(self._job.group.gather(self._wanted_iterations()))

    def forget(self) -> None:
        """The run has gone back, or elsewhere: no window leads there."""
        self._end_conversion()
        self._first = None
        if self._recorder is not None:
            self._recorder.forget()

    def close(self, *, remove: bool) -> None:
        """Let the memory go; see `MemoryFile.close`."""
        self._end_conversion()
        if self._recorder is not None:
            self._recorder.close(remove=remove)

    def _check(self, conversion: Conversion, iteration: int) -> None:
        if iteration <= conversion.last:
            try:
                conversion.require_same(iteration)
            except BaseException:
                if self._recorder is not None:
                    self._recorder.forget()
                raise
        if iteration >= conversion.last:
            self._end_conversion()
            message = f"the window of iterations {conversion.first} to {conversion.last} is replayed"
            self._job.journal.event("replayed", f"{message}: the state is whole", iteration)

    def _end_conversion(self) -> None:
        conversion, self._conversion = self._conversion, None
        if conversion is not None:
            self._pool.obstacle = None
            conversion.close()

    def _shard(self) -> Shard:
        """The engine's views; those of the last snapshot where nothing was replaced."""
        kept = self._job.adapter.renewed(self._kept)
        self._kept = self._job.adapter.shard() if kept is None else kept
        return self._kept

    def _laid_out(self) -> WindowLayout:
        turns = schedule(self._units, self._active, self._iterations)
        return WindowLayout(self._job.shard, turns, self._compute)

    def _note(self, copied: Copied) -> None:
        if copied.seconds > 0 and copied.overlap_seconds > 0:
            self._rates.append(copied.bytes / copied.seconds)
            self._overlaps.append(copied.overlap_seconds)

    def _wanted_iterations(self) -> int:
        """The fewest that this rank's forward and backward hide; as now until a copy was measured."""
        if not self._rates or not self._units:
            return self._iterations
        budget = statistics.median(self._rates) * statistics.median(self._overlaps)
        operators = self._job.shard.operators
        frozen = [
            sum(self._compute_bytes(name, operators[name].parameter.values) for name in names)
            for names in self._units.values()
        ]
        return window_iterations(self._active, frozen, budget)

    def _compute_bytes(self, name: str, values: torch.Tensor) -> int:
        return math.prod(values.shape) * int(self._compute.get(name, values.dtype).itemsize)

    def _report(self, message: str, *, once: bool = False) -> None:
        if not once or self._job.group.rank == 0:
            self._job.journal.event("window not kept", message, level=logging.WARNING)
