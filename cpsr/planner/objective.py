"""The cost of an interval: seconds lost to checkpoints and failures, per second of wall time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.planner.bounds import Mode
from cpsr.planner.horizons import Horizons
from cpsr.planner.inputs import Array, PlannerInputs, RecoveryCost
from cpsr.planner.snapshots import Snapshots

__all__ = ["Costs", "cheapest", "cost_per_second"]

# Lower limit of the failure rate per period: without failures the cost per failure would be 0 / 0.
RARE_PER_PERIOD = 1e-9
# Intervals in one pass of the search. From 10 to 500 iterations neighbours are 14% apart, and the cost of recomputing
# then differs by 1% around its optimum: the search misses no relevant minimum, and the second pass takes all integers.
SEARCH_INTERVALS = 32


class Costs:
    """Costs of several ranks at once, each at its own intervals: arrays are `(ranks, intervals)`.

    Exact for memoryless failures at any rate, if a checkpoint is durable before the next is begun. The costs exclude
    restarts, which take the same time at every interval and in both modes.

    A life lasts from one restart to the next failure. Its first checkpoint begins an interval after the restart, and
    after a predicted restart not before the watch is over. The following ones are a period `P = T_c + T_s` apart.
    Until the first is durable, a failure goes back to the checkpoint of an earlier life.

    A predicted recovery that gets ahead of the run without failure does so only after `lead_after_iterations`. If the
    next failure comes earlier, but after a durable checkpoint of that life, training continues without the lead: that
    recovery then costs only what is above zero. Without a durable checkpoint, the next recovery replaces it.

    With snapshots in host memory only some failures go back to the disk. The others begin a life as well, with the
    state that the training had, so that distances add up over such lives. Of the lead, which is small where failures
    are rare, they count as if they had not happened. The costs of the snapshots, and of the failures that go back to
    them, are added (`Snapshots`). Each part is exact alone; that the stalls of one lengthen the periods of the other is
    left out.

    Source: recomputing is J. T. Daly's exact wall time (2006, Eq. 13), with a time to persist.

    Args:
        ranks: inputs of each.
    """

    def __init__(self, ranks: Sequence[PlannerInputs]) -> None:
        self._iteration_seconds = _column(rank.iteration_seconds for rank in ranks)
        self._stall_seconds = _column(rank.stall_seconds for rank in ranks)
        self._failures_per_second = _column(rank.failures_per_second for rank in ranks)
        self._predict_seconds = _column(rank.predict_seconds for rank in ranks)
        self._watch_iterations = _column(rank.watch_iterations for rank in ranks)
        self._lead_after_iterations = _column(rank.lead_after_iterations for rank in ranks)
        self._disk_share = _column(rank.disk_share for rank in ranks)
        self._snapshots = Snapshots(ranks) if any(rank.memory is not None for rank in ranks) else None
        persist = _column(rank.persist_seconds for rank in ranks)
        # An unknown or infinite time is left to the bounds.
        self._persist_seconds = numpy.where(numpy.isfinite(persist), persist, 0.0)
        self._curves = _by_curve(ranks)

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
            ValueError: prediction is asked for and a rank has no curve for it.
        """
        with numpy.errstate(all="ignore"):
            life = self._life(intervals, mode)
            if mode == "recompute":
                return numpy.asarray(life.redone_seconds)
            horizons = self._horizons(life, mode)
            mean = self._end_cost_iterations(horizons, intervals)
            costs = 0.5 + life.renewed * mean + self._lost_lead(horizons, mean, intervals)
            lost = life.failures_per_second * costs * self._iteration_seconds
            before = -life.failures_per_second * self._predict_seconds
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
        with numpy.errstate(all="ignore"):
            recoveries = self._failures_per_second * self._disk_share * self.recovery_seconds(intervals, mode)
            disk = self.stall_per_second(intervals, mode) + recoveries
            return numpy.asarray(disk if self._snapshots is None else disk + self._snapshots.per_second(intervals))

    def memory_intervals(self, intervals: Array) -> Array:
        """Iterations between snapshots in host memory beside checkpoints of these intervals; NaN without any."""
        if self._snapshots is None:
            return numpy.full_like(intervals, numpy.nan)
        return self._snapshots.best(intervals)

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
            ValueError: prediction is asked for and a rank has no curve for it.
        """
        if mode == "recompute":
            return numpy.zeros_like(intervals)
        with numpy.errstate(all="ignore"):
            horizons = self._horizons(self._life(intervals, mode), mode)
            return self._lost_lead(horizons, self._end_cost_iterations(horizons, intervals), intervals)

    def _horizons(self, life: "_Life", mode: Mode) -> Array:
        """Mean distances, without the unfinished last step of each life."""
        whole = life.trained_seconds / self._iteration_seconds - 0.5
        return numpy.asarray(whole / (life.durable if mode == "predict" else life.ended))

    def _life(self, intervals: Array, mode: Mode) -> "_Life":
        rate = self._rate(intervals)
        other = self._part(intervals, intervals, rate)
        if mode == "recompute":
            return _joined(rate, self._disk_share, other, other, numpy.ones_like(rate))
        own = self._part(intervals, self._first_iterations(intervals), rate)
        return _joined(rate, self._disk_share, own, other, numpy.exp(-rate * self._predict_seconds))

    def _rate(self, intervals: Array) -> Array:
        period = intervals * self._iteration_seconds + self._stall_seconds
        return numpy.maximum(self._failures_per_second, RARE_PER_PERIOD / period)

    def _part(self, intervals: Array, first_iterations: Array, rate: Array) -> "_Part":
        """Means of the lives whose first checkpoint begins so many iterations after the restart."""
        trained = intervals * self._iteration_seconds
        period = trained + self._stall_seconds
        first = first_iterations * self._iteration_seconds
        # Shares of the 1 / rate seconds of a life: in stalls, and in training that a durable checkpoint preserves.
        stall = -numpy.expm1(-rate * self._stall_seconds) * numpy.exp(-rate * first) / -numpy.expm1(-rate * period)
        durable = numpy.exp(-rate * (first + self._stall_seconds + self._persist_seconds))
        kept = durable * rate * (first + trained / numpy.expm1(rate * period))
        return _Part(stall, (1 - stall - kept) / rate, durable)

    def _first_iterations(self, intervals: Array) -> Array:
        """From a predicted restart to the first checkpoint."""
        return numpy.maximum(intervals, self._watch_iterations)

    def _lost_lead(self, horizons: Array, costs: Array, intervals: Array) -> Array:
        """Mean lead of a life's recovery that is lost because its failure comes too early, in iterations.

        The duration of a life does not depend on the distance of the previous failure from its checkpoint. So the lost
        lead is the mean over these distances, times its probability. It uses the line through two end costs.

        Args:
            horizons: mean distance of a failure from its checkpoint.
            costs: there.
            intervals: in iterations.
        """
        rate = self._rate(intervals) * self._disk_share
        lost = self._too_early(rate, intervals)
        some = lost > 0
        if not some.any():
            return numpy.zeros_like(lost)
        slopes = (self._end_cost_iterations(horizons + intervals, intervals) - costs) / intervals

        def where(figures: Array) -> Array:
            return numpy.asarray(numpy.broadcast_to(figures, some.shape)[some])

        iteration_seconds = self._iteration_seconds
        distances = Horizons(
            where(rate * iteration_seconds),
            where(intervals),
            where(self._first_iterations(intervals)),
            where(self._stall_seconds / iteration_seconds),
            where(self._persist_seconds / iteration_seconds),
        )
        lost[some] *= _mean_lead(distances, where(horizons), where(costs), where(slopes))
        return lost

    def _too_early(self, rate: Array, intervals: Array) -> Array:
        """Probability that a life has a durable checkpoint of its own, and ends before the lead is reached."""
        first = self._first_iterations(intervals)
        after = self._lead_after_iterations
        stalls = numpy.maximum(numpy.ceil((after - first) / intervals), 0.0)
        had = after * self._iteration_seconds + stalls * self._stall_seconds
        durable = first * self._iteration_seconds + self._stall_seconds + self._persist_seconds
        between = numpy.maximum(had - durable, 0.0)
        return numpy.asarray(numpy.exp(-rate * durable) * -numpy.expm1(-rate * between))

    def _end_cost_iterations(self, horizons: Array, intervals: Array) -> Array:
        intervals, costs = numpy.broadcast_to(intervals, horizons.shape), numpy.empty(horizons.shape)
        for curve, places in self._curves:
            if curve is None:
                raise ValueError("inputs without a recovery-cost curve allow recomputing only")
            costs[places] = curve.end_cost_iterations(horizons[places], intervals[places])
        return costs


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
        """Of training since the checkpoint that such a failure goes back to, over the lives since then."""
        return numpy.asarray(self.trained_seconds / self.ended)


def _joined(rate: Array, disk_share: Array, own: _Part, other: _Part, begun: Array) -> _Life:
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


def _mean_lead(distances: Horizons, horizons: Array, costs: Array, slopes: Array) -> Array:
    """Mean over the distances of the negative part of the line through mean distance and end cost."""
    even = horizons - costs / slopes  # at this distance the end cost is 0
    # Half a step more: the step under way is lost, and a horizon counts whole iterations.
    nearer = distances.mean_shortfall(even + 0.5)
    leads = numpy.where(slopes > 0, slopes * nearer, -slopes * (horizons - even + nearer))
    # At a slope of 0 the mean suffices; and no mean of leads is smaller than the lead of the mean.
    return numpy.asarray(numpy.fmax(numpy.where(slopes == 0, -costs, leads), numpy.maximum(-costs, 0.0)))


def cost_per_second(inputs: PlannerInputs, interval_iterations: Array, mode: Mode) -> Array:
    """Seconds lost per second of wall time by one rank or job; see `Costs.per_second`.

    Args:
        inputs: what is known of it.
        interval_iterations: `(intervals,)`.
        mode: how failures are recovered from.

    Returns:
        `(intervals,)`.
    """
    row = numpy.asarray(interval_iterations, dtype=numpy.float64)[None]
    return numpy.asarray(Costs([inputs]).per_second(row, mode)[0])


def cheapest(
    cost: Callable[[Array], Array], lowest: NDArray[numpy.int64], highest: NDArray[numpy.int64]
) -> NDArray[numpy.int64]:
    """The interval of least cost between two bounds, for every rank; the shortest if no cost is finite.

    Searches a geometric selection of the intervals, then between the neighbours of the best, until all integers there
    are covered. The work hardly depends on the number of intervals.

    Args:
        cost: seconds per second of intervals, `(ranks, intervals)` to the same shape.
        lowest: `(ranks,)` iterations, at least 1.
        highest: `(ranks,)` iterations, at least the lowest.
    """
    rows = numpy.arange(len(lowest))
    low, high = lowest, highest
    while True:
        grid = _grid(low, high)
        costs = cost(grid)
        best = numpy.argmin(numpy.where(numpy.isfinite(costs), costs, numpy.inf), axis=1)
        if numpy.all(high - low < SEARCH_INTERVALS):
            return numpy.asarray(grid[rows, best], dtype=numpy.int64)
        low = grid[rows, numpy.maximum(best - 1, 0)].astype(numpy.int64)
        # Two further: rounding may put the best on the grid twice, and one further is then no step.
        high = grid[rows, numpy.minimum(best + 2, SEARCH_INTERVALS - 1)].astype(numpy.int64)


def _grid(low: NDArray[numpy.int64], high: NDArray[numpy.int64]) -> Array:
    """All integers from low to high if they are few, else a geometric selection; `(ranks, SEARCH_INTERVALS)`."""
    steps = numpy.arange(SEARCH_INTERVALS)
    every: Array = numpy.minimum(low[:, None] + steps, high[:, None]).astype(numpy.float64)
    wide = high - low >= SEARCH_INTERVALS
    if not wide.any():
        return every
    ratio = (high / low)[:, None]
    selected = numpy.rint(low[:, None] * ratio ** (steps / (SEARCH_INTERVALS - 1)))
    return numpy.asarray(numpy.where(wide[:, None], numpy.minimum(selected, high[:, None]), every))


def _by_curve(ranks: Sequence[PlannerInputs]) -> list[tuple[RecoveryCost | None, slice | list[int]]]:
    """Groups of ranks that share a curve, to evaluate it once for each group.

    Grouped by identity, since curves need not be comparable; a slice for a single rank is several times as fast.
    """
    places: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        places.setdefault(id(rank.recovery), []).append(place)
    return [(ranks[own[0]].recovery, slice(own[0], own[0] + 1) if len(own) == 1 else own) for own in places.values()]


def _column(values: Iterable[float]) -> Array:
    return numpy.asarray(numpy.fromiter(values, dtype=numpy.float64)[:, None])
