"""Snapshots in host memory between the checkpoints on the disk: what they cost, and how often to take them."""

import math

import numpy

from cpsr.planner.inputs import Array, MemoryTier, PlannerInputs

__all__ = ["Snapshots", "per_interval"]


class Snapshots:
    """Costs of a job's snapshots; intervals are those of the disk, arrays are `(intervals,)`.

    A snapshot is complete an iteration later, before the next update. A failure that leaves the memory goes back to the
    newest complete one. A failure of a machine goes back to the newest whole replica: a transfer begins with the newest
    snapshot, when the one before has ended.

    A window of W iterations is a state that is whole W iterations later, and stalls nothing more: it goes on all the
    time. A failure then costs W to 2 W iterations. Each window that ends while no other is sent goes to the peers.

    Args:
        job: its inputs.
        memory: its snapshots.
    """

    def __init__(self, job: PlannerInputs, memory: MemoryTier) -> None:
        self._job, self._memory = job, memory
        self._process = job.failures_per_second * job.share("process")
        self._machine = job.failures_per_second * (job.share("machine") if memory.replica_seconds is not None else 0.0)
        self._replica_seconds = memory.replica_seconds or 0.0

    def best(self, intervals: Array) -> Array:
        """Iterations between snapshots, at most the interval; of windows their length.

        By Young's formula, for the failures that go back to snapshots, and for those alone that leave the memory: a
        slow network replicates as often whatever this interval is. Also the time of a transfer, within which no
        snapshot waits for the network. Of the two next numbers of snapshots in an interval for each of these, the
        cheapest: within 1% of the best of all. Where that exceeds the longest allowed, the fewest that do not.

        Args:
            intervals: in iterations.
        """
        memory, seconds = self._memory, self._job.iteration_seconds
        if memory.interval_iterations is not None:
            fixed = numpy.full_like(intervals, float(memory.interval_iterations))
            return fixed if memory.window else numpy.minimum(fixed, intervals)
        with numpy.errstate(all="ignore"):
            rates = numpy.array([self._process + self._machine, self._process])
            wanted = numpy.array([*numpy.sqrt(2 * memory.stall_seconds / rates), self._replica_seconds]) / seconds
            counts = []
            for one in wanted:
                few = numpy.floor(intervals / numpy.clip(one if one > 0 else intervals, 1.0, intervals))
                counts += [few, few + 1]
            options = numpy.ceil(intervals / numpy.stack(counts))
            costs = numpy.stack([self._cost(option, intervals) for option in options])
            cheapest = numpy.argmin(numpy.where(numpy.isnan(costs), numpy.inf, costs), axis=0)
            planned: Array = numpy.take_along_axis(options, cheapest[None], axis=0)[0]
            longest = math.inf if memory.longest_iterations is None else float(memory.longest_iterations)
            fewest = numpy.ceil(intervals / numpy.minimum(intervals, longest))
            return numpy.where(planned > longest, numpy.ceil(intervals / fewest), planned)

    def per_second(self, intervals: Array) -> Array:
        """Seconds lost per second of wall time: stalls, and failures that go back to snapshots or replicas.

        Args:
            intervals: in iterations.
        """
        with numpy.errstate(all="ignore"):
            return self._cost(self.best(intervals), intervals)

    def stall_per_second(self, every: Array, intervals: Array) -> Array:
        """Share of the wall time in stalls of snapshots beside those of the checkpoints.

        Args:
            every: iterations between snapshots.
            intervals: in iterations.
        """
        with numpy.errstate(all="ignore"):
            stalls = per_interval(every, intervals) * self._memory.stall_seconds
            return numpy.asarray(stalls / (intervals * self._job.iteration_seconds + self._job.stall_seconds + stalls))

    def process_seconds(self, every: Array) -> Array:
        """Mean training that a failure loses that leaves the machines.

        Args:
            every: iterations between snapshots.
        """
        with numpy.errstate(all="ignore"):
            trained = every * self._job.iteration_seconds
            whole = trained if self._memory.window else numpy.full_like(trained, self._job.iteration_seconds)
            return self._lost(trained, self._memory.stall_seconds, whole)

    def machine_seconds(self, every: Array, intervals: Array) -> Array:
        """Mean training that a failure loses that takes a machine, where replicas are on others.

        Args:
            every: iterations between snapshots.
            intervals: in iterations; the disk may be nearer than a replica over a slow network; not of windows.
        """
        with numpy.errstate(all="ignore"):
            trained, transfer = every * self._job.iteration_seconds, self._replica_seconds
            if self._memory.window:
                apart = numpy.maximum(numpy.ceil(transfer / trained), 1.0) * trained
                return self._lost(apart, 0.0, transfer + trained)
            waiting = numpy.where(transfer > trained, trained / 2, 0.0)
            apart = numpy.maximum(trained, transfer)
            replicated = self._lost(apart, 0.0, numpy.full_like(trained, transfer)) + waiting
            return numpy.asarray(numpy.fmin(replicated, self._disk_seconds(intervals)))

    def _disk_seconds(self, intervals: Array) -> Array:
        return intervals * self._job.iteration_seconds / 2 + self._job.persist_seconds

    def _cost(self, every: Array, intervals: Array) -> Array:
        disk, process = self._disk_seconds(intervals), self.process_seconds(every)
        if self._memory.window:  # one that is longer than the interval of the disk is not what a failure goes back to
            process = numpy.fmin(process, disk)
        machine = self._machine * numpy.fmin(self.machine_seconds(every, intervals), disk) if self._machine > 0 else 0.0
        return numpy.asarray(self.stall_per_second(every, intervals) + self._process * process + machine)

    def _lost(self, trained: Array, stall_seconds: float, until_whole: Array) -> Array:
        """Mean training since the newest whole state, or the restart, in lives that any failure ends (`Costs`)."""
        period = trained + stall_seconds
        rate = numpy.maximum(self._job.failures_per_second, 1e-9 / period)
        stalled = -numpy.expm1(-rate * stall_seconds) * numpy.exp(-rate * trained) / -numpy.expm1(-rate * period)
        whole = numpy.exp(-rate * (period + until_whole))
        kept = whole * rate * (trained + trained / numpy.expm1(rate * period))
        return numpy.asarray((1 - stalled - kept) / rate)


def per_interval(every: Array, intervals: Array) -> Array:
    """Snapshots in memory alone between two checkpoints on the disk.

    Args:
        every: iterations between snapshots.
        intervals: between checkpoints, in iterations.
    """
    return numpy.asarray(numpy.ceil(intervals / every) - 1)
