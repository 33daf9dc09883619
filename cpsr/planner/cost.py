"""The cost of an interval: seconds lost to checkpoints and failures, per second of wall time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy

from cpsr.planner.inputs import Array, Mode, PlannerInputs
from cpsr.planner.snapshots import Snapshots

__all__ = ["Costs", "cheapest"]

# Lower limit of the failure rate per period: without failures the cost per failure would be 0 / 0.
RARE_PER_PERIOD = 1e-9
# Intervals in one pass of the search. From 10 to 500 iterations neighbours are 6% apart, and the cost of recomputing
# then differs by 0.2% around its optimum: the search misses no relevant minimum, and the last pass takes all integers.
SEARCH_INTERVALS = 64


class Costs:
    """Costs of a job at many intervals at once: arrays are `(intervals,)`.

    Exact for memoryless failures at any rate, if a checkpoint is durable before the next is begun. The costs exclude
    restarts, which take the same time at every interval and in both modes.

    A life lasts from one restart to the next failure. Its first checkpoint begins an interval after the restart, and
    after a predicted restart not before the watch is over. The following ones are a period `P = T_c + T_s` apart.
    Until the first is durable, a failure goes back to the checkpoint of an earlier life.

    A predicted recovery that gets ahead of the run without failure does so only after `lead_after_iterations`. If the
    next failure comes earlier, but after a durable checkpoint of that life, training continues without the lead: that
    recovery then costs only what is above zero. Without a durable checkpoint, the next recovery replaces it. The lead
    is that of a failure at the mean distance from its checkpoint.

    With snapshots in host memory only some failures go back to the disk. The others begin a life as well, with the
    state that the training had, so that distances add up over such lives. Of the lead, which is small where failures
    are rare, they count as if they had not happened. The costs of the snapshots, and of the failures that go back to
    them, are added (`Snapshots`). Each part is exact alone; that the stalls of one lengthen the periods of the other is
    left out.

    Source: recomputing is J. T. Daly's exact wall time (2006, Eq. 13), with a time to persist.

    Args:
        job: its inputs.

    Attributes:
        snapshots: those in host memory; None without any.
    """

    def __init__(self, job: PlannerInputs) -> None:
        self._job = job
        self.snapshots = None if job.memory is None else Snapshots(job, job.memory)
        # An unknown or infinite time is left to the bounds.
        self._persist_seconds = job.persist_seconds if numpy.isfinite(job.persist_seconds) else 0.0

    def stall_per_second(self, intervals: Array, mode: Mode) -> Array:
        """Share of the wall time in stalls of checkpoints on the disk: `T_s / (T_c + T_s)` if failures are rare.

        Args:
            intervals: in iterations.
            mode: how failures are recovered from.
        """
        with numpy.errstate(all="ignore"):
            return self._life(intervals, mode).stall

    def recovery_seconds(self, intervals: Array, mode: Mode) -> Array:
        """Mean cost in seconds of a failure that goes back to the disk.

        With recomputing, all training since the newest durable checkpoint. With prediction, the step under way, the
        time to predict, which a further failure repeats, and the end cost. Failures in a row without a durable
        checkpoint between them have one end cost in common, by the distance of the last one.

        Args:
            intervals: in iterations.
            mode: predict, at the end cost of the curve and the time to predict; or recompute.

        Returns:
            Seconds; negative if predicted recoveries get ahead.

        Raises:
            ValueError: prediction is asked for and there is no curve for it.
        """
        with numpy.errstate(all="ignore"):
            life = self._life(intervals, mode)
            if mode == "recompute":
                return life.redone_seconds
            mean = self._end_cost_iterations(self._horizons(life, mode), intervals)
            costs = 0.5 + life.renewed * mean + self._lost_lead(mean, intervals)
            lost = life.failures_per_second * costs * self._job.iteration_seconds
            before = -life.failures_per_second * self._job.predict_seconds
            share = -numpy.expm1(before) + numpy.exp(before) * lost
            return numpy.asarray(share / life.failures_per_second)

    def per_second(self, intervals: Array, mode: Mode) -> Array:
        """Seconds lost per second of wall time, `J = stalls + lambda * mean T_p`, over all classes of failures.

        Args:
            intervals: in iterations.
            mode: how failures are recovered from.

        Returns:
            Seconds per second; not finite if an input is not.
        """
        rate = self._job.failures_per_second * self._job.disk_share
        with numpy.errstate(all="ignore"):
            disk = self.stall_per_second(intervals, mode) + rate * self.recovery_seconds(intervals, mode)
            return disk if self.snapshots is None else disk + self.snapshots.per_second(intervals)

    def horizon_iterations(self, intervals: Array, mode: Mode) -> Array:
        """Mean distance of a failure from the checkpoint that recovery uses, in whole iterations.

        Args:
            intervals: in iterations.
            mode: how failures are recovered from.
        """
        with numpy.errstate(all="ignore"):
            return self._horizons(self._life(intervals, mode), mode)

    def lost_lead_iterations(self, intervals: Array, mode: Mode) -> Array:
        """Mean lead that is lost because the next failure comes too early; 0 if failures are recomputed.

        Args:
            intervals: in iterations.
            mode: how failures are recovered from.

        Raises:
            ValueError: prediction is asked for and there is no curve for it.
        """
        if mode == "recompute":
            return numpy.zeros_like(intervals)
        with numpy.errstate(all="ignore"):
            horizons = self._horizons(self._life(intervals, mode), mode)
            return self._lost_lead(self._end_cost_iterations(horizons, intervals), intervals)

    def _horizons(self, life: "_Life", mode: Mode) -> Array:
        """Mean distances, without the unfinished last step of each life."""
        whole = life.trained_seconds / self._job.iteration_seconds - 0.5
        return numpy.asarray(whole / (life.durable if mode == "predict" else life.ended))

    def _life(self, intervals: Array, mode: Mode) -> "_Life":
        rate, share = self._rate(intervals), self._job.disk_share
        other = self._part(intervals, intervals, rate)
        if mode == "recompute":
            return _joined(rate, share, other, other, numpy.ones_like(rate))
        own = self._part(intervals, self._first_iterations(intervals), rate)
        return _joined(rate, share, own, other, numpy.exp(-rate * self._job.predict_seconds))

    def _rate(self, intervals: Array) -> Array:
        period = intervals * self._job.iteration_seconds + self._job.stall_seconds
        return numpy.asarray(numpy.maximum(self._job.failures_per_second, RARE_PER_PERIOD / period))

    def _part(self, intervals: Array, first_iterations: Array, rate: Array) -> "_Part":
        """Means of the lives whose first checkpoint begins so many iterations after the restart."""
        stall_seconds = self._job.stall_seconds
        trained = intervals * self._job.iteration_seconds
        period = trained + stall_seconds
        first = first_iterations * self._job.iteration_seconds
        # Shares of the 1 / rate seconds of a life: in stalls, and in training that a durable checkpoint preserves.
        stall = -numpy.expm1(-rate * stall_seconds) * numpy.exp(-rate * first) / -numpy.expm1(-rate * period)
        durable = numpy.exp(-rate * (first + stall_seconds + self._persist_seconds))
        kept = durable * rate * (first + trained / numpy.expm1(rate * period))
        return _Part(stall, (1 - stall - kept) / rate, durable)

    def _first_iterations(self, intervals: Array) -> Array:
        """From a predicted restart to the first checkpoint."""
        return numpy.maximum(intervals, self._job.watch_iterations)

    def _lost_lead(self, costs: Array, intervals: Array) -> Array:
        """Mean lead of a life's recovery that is lost because its failure comes too early, in iterations."""
        job, rate = self._job, self._rate(intervals) * self._job.disk_share
        first = self._first_iterations(intervals)
        stalls = numpy.maximum(numpy.ceil((job.lead_after_iterations - first) / intervals), 0.0)
        had = job.lead_after_iterations * job.iteration_seconds + stalls * job.stall_seconds
        durable = first * job.iteration_seconds + job.stall_seconds + self._persist_seconds
        # The life has a durable checkpoint of its own, and ends before the lead is reached.
        too_early = numpy.exp(-rate * durable) * -numpy.expm1(-rate * numpy.maximum(had - durable, 0.0))
        return numpy.asarray(too_early * numpy.maximum(-costs, 0.0))

    def _end_cost_iterations(self, horizons: Array, intervals: Array) -> Array:
        if self._job.recovery is None:
            raise ValueError("inputs without a recovery-cost curve allow recomputing only")
        return self._job.recovery.end_cost_iterations(horizons, intervals)


@dataclass(frozen=True)
class _Part:
    """Means of the lives that begin alike.

    Attributes:
        stall: share of them.
        trained_seconds: since the checkpoint of their own, or the restart, until they end.
        durable: probability that a checkpoint of their own is durable.
    """

    stall: Array
    trained_seconds: Array
    durable: Array


@dataclass(frozen=True)
class _Life:
    """Means over all lives, and of the failures that go back to the disk.

    Attributes:
        failures_per_second: at least RARE_PER_PERIOD.
        stall: share of the wall time.
        trained_seconds: as in `_Part`.
        durable: as in `_Part`.
        ended: probability that a checkpoint of its own is durable, or that it ends by such a failure.
        renewed: share of such failures with no other one since the same checkpoint.
    """

    failures_per_second: Array
    stall: Array
    trained_seconds: Array
    durable: Array
    ended: Array
    renewed: Array

    @property
    def redone_seconds(self) -> Array:
        """Training since the checkpoint that such a failure goes back to, over the lives since then."""
        return numpy.asarray(self.trained_seconds / self.ended)


def _joined(rate: Array, disk_share: float, own: _Part, other: _Part, begun: Array) -> _Life:
    """All lives, by the failures before them.

    Args:
        rate: of all failures.
        disk_share: share of the failures that go back to the disk.
        own: lives after such a failure.
        other: lives after another one.
        begun: probability that a life after such a failure gets to train at all.
    """
    rest = 1 - disk_share
    stall = disk_share * begun * own.stall + rest * other.stall
    trained = disk_share * own.trained_seconds + rest * other.trained_seconds
    durable = disk_share * own.durable + rest * other.durable
    # After a life that ends otherwise, the next one decides.
    later = other.durable / (1 - (1 - other.durable) * rest)
    renewed = own.durable + (1 - own.durable) * rest * later
    return _Life(rate, stall, trained, durable, 1 - (1 - durable) * rest, renewed)


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
