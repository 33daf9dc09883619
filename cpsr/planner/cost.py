"""The cost of an interval: seconds lost to checkpoints, snapshots and failures, per second of wall time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from cpsr.planner.inputs import Array, MemoryTier, Mode, PlannerInputs

__all__ = ["Costs", "Snapshots", "cheapest", "per_interval"]

# Lower limit of the failure rate per period: without failures the cost per failure would be 0 / 0.
RARE_PER_PERIOD = 1e-9
# Intervals in one pass of the search. From 10 to 500 iterations neighbours are 6% apart, and the cost of recomputing
# then differs by 0.2% around its optimum: the search misses no relevant minimum, and the last pass takes all integers.
SEARCH_INTERVALS = 64


@dataclass(frozen=True)
class _Lives:
    """Means over lives, `(intervals,)` each.

    Attributes:
        stall: share of the wall time.
        trained_seconds: since the checkpoint of their own, or the restart, until they end.
        durable: probability that a checkpoint of their own is durable.
        ended: probability that such a checkpoint is durable, or that the life ends by a failure that goes to the disk.
        renewed: share of such failures with no other one since the same checkpoint.
    """

    stall: Array
    trained_seconds: Array
    durable: Array
    ended: Array
    renewed: Array


class Costs:
    """Costs of a job at many intervals at once: arrays are `(intervals,)`.

    Exact for memoryless failures at any rate, if a checkpoint is durable before the next is begun. The costs exclude
    restarts, which take the same time at every interval and in both modes.

    A life lasts from one restart to the next failure. Its first checkpoint begins an interval after the restart, and
    after a predicted restart not before the watch is over. The following ones are a period `P = T_c + T_s` apart.
    Until the first is durable, a failure goes back to the checkpoint of an earlier life.

    With snapshots in host memory only some failures go back to the disk. The others begin a life as well, with the
    state that the training had, so that distances add up over such lives. The costs of the snapshots, and of the
    failures that go back to them, are added (`Snapshots`). Each part is exact alone; that the stalls of one lengthen
    the periods of the other is left out.

    Source: recomputing is J. T. Daly's exact wall time (2006, Eq. 13), with a time to persist.

    Args:
        job: its inputs.

    Attributes:
        snapshots: those in host memory; None without any.
    """

    def __init__(self, job: PlannerInputs) -> None:
        self._job = job
        self.snapshots = None if job.memory is None else Snapshots(job, job.memory)

    def stall_per_second(self, intervals: Array, mode: Mode) -> Array:
        """Share of the wall time in stalls of checkpoints on the disk: `T_s / (T_c + T_s)` if failures are rare."""
        with numpy.errstate(all="ignore"):
            return self._lives(intervals, mode).stall

    def recovery_seconds(self, intervals: Array, mode: Mode) -> Array:
        """Mean cost in seconds of a failure that goes back to the disk.

        With recomputing, all training since the newest durable checkpoint. With prediction, the step under way, the
        time to predict, which a further failure repeats, and the end cost. Failures in a row without a durable
        checkpoint between them have one end cost in common, by the distance of the last one.

        Returns:
            Seconds.

        Raises:
            ValueError: prediction is asked for and there is no curve for it.
        """
        with numpy.errstate(all="ignore"):
            lives, rate = self._lives(intervals, mode), self._rate(intervals)
            if mode == "recompute":
                return numpy.asarray(lives.trained_seconds / lives.ended)
            mean = self._end_cost_iterations(self._horizons(lives, mode), intervals)
            costs = 0.5 + lives.renewed * mean
            before = -rate * self._job.predict_seconds
            share = -numpy.expm1(before) + numpy.exp(before) * rate * costs * self._job.iteration_seconds
            return numpy.asarray(share / rate)

    def per_second(self, intervals: Array, mode: Mode) -> Array:
        """Seconds lost per second of wall time, `J = stalls + lambda * mean T_p`, over all classes of failures.

        Args:
            intervals: in iterations.
            mode: how failures are recovered from.

        Returns:
            Seconds per second; infinite or NaN where failures leave no time to train.
        """
        rate = self._job.failures_per_second * self._job.disk_share
        with numpy.errstate(all="ignore"):
            disk = self.stall_per_second(intervals, mode) + rate * self.recovery_seconds(intervals, mode)
            return disk if self.snapshots is None else disk + self.snapshots.per_second(intervals)

    def horizon_iterations(self, intervals: Array, mode: Mode) -> Array:
        """Mean distance of a failure from the checkpoint that recovery uses, in whole iterations."""
        with numpy.errstate(all="ignore"):
            return self._horizons(self._lives(intervals, mode), mode)

    def _horizons(self, lives: _Lives, mode: Mode) -> Array:
        """Mean distances, without the unfinished last step of each life."""
        whole = lives.trained_seconds / self._job.iteration_seconds - 0.5
        return numpy.asarray(whole / (lives.durable if mode == "predict" else lives.ended))

    def _lives(self, intervals: Array, mode: Mode) -> _Lives:
        """All lives, by the failures before them: those that go back to the disk begin a life of the mode's own."""
        other_stall, other_trained, other_durable = self._life(intervals, intervals)
        own_stall, own_trained, own_durable = other_stall, other_trained, other_durable
        if mode == "predict":
            own_stall, own_trained, own_durable = self._life(intervals, self._first_iterations(intervals))
            # A failure before the prediction is over: the life never gets to train.
            own_stall = own_stall * numpy.exp(-self._rate(intervals) * self._job.predict_seconds)
        share, rest = self._job.disk_share, 1 - self._job.disk_share
        durable = share * own_durable + rest * other_durable
        # After a life that ends otherwise, the next one decides.
        later = other_durable / (1 - (1 - other_durable) * rest)
        return _Lives(
            share * own_stall + rest * other_stall,
            share * own_trained + rest * other_trained,
            durable,
            1 - (1 - durable) * rest,
            own_durable + (1 - own_durable) * rest * later,
        )

    def _life(self, intervals: Array, first_iterations: Array) -> tuple[Array, Array, Array]:
        """Stall, trained seconds and durability of the lives with their first checkpoint so long after the restart."""
        rate, stall_seconds = self._rate(intervals), self._job.stall_seconds
        trained = intervals * self._job.iteration_seconds
        period, first = trained + stall_seconds, first_iterations * self._job.iteration_seconds
        # Shares of the 1 / rate seconds of a life: in stalls, and in training that a durable checkpoint preserves.
        stall = -numpy.expm1(-rate * stall_seconds) * numpy.exp(-rate * first) / -numpy.expm1(-rate * period)
        durable = numpy.exp(-rate * (first + stall_seconds + self._job.persist_seconds))
        kept = durable * rate * (first + trained / numpy.expm1(rate * period))
        return stall, (1 - stall - kept) / rate, durable

    def _rate(self, intervals: Array) -> Array:
        period = intervals * self._job.iteration_seconds + self._job.stall_seconds
        return numpy.asarray(numpy.maximum(self._job.failures_per_second, RARE_PER_PERIOD / period))

    def _first_iterations(self, intervals: Array) -> Array:
        """From a predicted restart to the first checkpoint."""
        return numpy.maximum(intervals, self._job.watch_iterations)

    def _end_cost_iterations(self, horizons: Array, intervals: Array) -> Array:
        if self._job.recovery is None:
            raise ValueError("inputs without a recovery-cost curve allow recomputing only")
        return self._job.recovery.end_cost_iterations(horizons, intervals)


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
        cheapest: within 2% of the best of all. Where that exceeds the longest allowed, the fewest that do not.

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


def cheapest(cost: Callable[[Array], Array], lowest: int, highest: int) -> int:
    """The interval of least cost between two bounds; the shortest if no cost is finite.

    Searches a geometric selection of the intervals, then between the neighbours of the best, until all integers there
    are covered.

    Args:
        cost: seconds per second of intervals, `(intervals,)` to the same shape.
        lowest: at least 1.
        highest: at least the lowest.
    """
    while True:
        few = highest - lowest < SEARCH_INTERVALS
        every = numpy.arange(lowest, highest + 1) if few else numpy.geomspace(lowest, highest, SEARCH_INTERVALS).round()
        grid = numpy.unique(every.astype(numpy.float64))
        costs = cost(grid)
        best = int(numpy.argmin(numpy.where(numpy.isfinite(costs), costs, numpy.inf)))
        if few:
            return int(grid[best])
        lowest, highest = int(grid[max(best - 1, 0)]), int(grid[min(best + 1, len(grid) - 1)])
