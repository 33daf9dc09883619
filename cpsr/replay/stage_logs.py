"""The logs of one rank's stage in a running job: filled in each step, and given again while the stage rests."""

import logging

from cpsr.checkpoint.memory import SharedMemory, shared_memory_left
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.job import Job
from cpsr.replay.resting import Rest
from cpsr.replay.upstream import LoggedSteps, Upstream

__all__ = ["StageLogs"]


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
        self._job, self._traffic = job, job.adapter.stage_traffic
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
