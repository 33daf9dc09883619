"""Snapshots in host memory between the checkpoints on the disk: what they cost, and how often to take them."""

import math
from collections.abc import Callable, Sequence

import numpy

from cpsr.planner.inputs import Array, MemoryTier, PlannerInputs
from cpsr.planner.units import in_iterations, root, whole_iterations

__all__ = ["Snapshots", "closed_form", "per_interval"]

_NEVER = MemoryTier(0.0, 1)  # of a rank without snapshots; nothing of it is used


class Snapshots:
    """Costs of several ranks at once; intervals are those of the disk, arrays are `(ranks, intervals)`.

    A snapshot is complete an iteration later, before the next update. A failure that leaves the memory goes back to the
    newest complete one. A failure of a machine goes back to the newest whole replica: a transfer begins with the newest
    snapshot, when the one before has ended.

    A window of W iterations is a state that is whole W iterations later, and stalls nothing more: it goes on all the
    time. A failure then costs W to 2 W iterations. Each window that ends while no other is sent goes to the peers.

    Args:
        ranks: inputs of each; those without snapshots have no costs here.
    """

    def __init__(self, ranks: Sequence[PlannerInputs]) -> None:
        tiers = [rank.memory or _NEVER for rank in ranks]
        self._some = _column(ranks, lambda rank: rank.memory is not None)
        self._iteration_seconds = _column(ranks, lambda rank: rank.iteration_seconds)
        self._disk_stall_seconds = _column(ranks, lambda rank: rank.stall_seconds)
        self._persist_seconds = _column(ranks, lambda rank: rank.persist_seconds)
        self._failures_per_second = _column(ranks, lambda rank: rank.failures_per_second)
        with numpy.errstate(all="ignore"):  # an unknown rate has no share
            self._process = self._failures_per_second * _column(ranks, lambda rank: rank.share("process"))
            self._machine = self._failures_per_second * _column(ranks, _to_replicas)
        self._stall_seconds = numpy.array([[tier.stall_seconds] for tier in tiers])
        self._fixed = numpy.array([[tier.interval_iterations or math.nan] for tier in tiers], dtype=numpy.float64)
        self._longest = numpy.array([[tier.longest_iterations or math.inf] for tier in tiers], dtype=numpy.float64)
        self._replica_seconds = numpy.array([[tier.replica_seconds or 0.0] for tier in tiers])
        self._window = numpy.array([[tier.window] for tier in tiers])

    def best(self, intervals: Array) -> Array:
        """Iterations between snapshots, at most the interval; NaN of a rank without snapshots. Of windows their length.

        By Young's formula, for the failures that go back to snapshots, and for those alone that leave the memory: a
        slow network replicates as often whatever this interval is. Also the time of a transfer, within which no
        snapshot waits for the network. Of the two next numbers of snapshots in an interval for each of these, the
        cheapest: within 1% of the best of all. Where that exceeds the longest allowed, the fewest that do not.

        Args:
            intervals: in iterations.
        """
        with numpy.errstate(all="ignore"):
            rates = self._process + self._machine, self._process
            wanted = [numpy.sqrt(2 * self._stall_seconds / rate) / self._iteration_seconds for rate in rates]
            wanted.append(self._replica_seconds / self._iteration_seconds + numpy.zeros_like(intervals))
            wanted = [numpy.clip(numpy.where(one > 0, one, intervals), 1.0, intervals) for one in wanted]
            few = [numpy.floor(intervals / one) for one in wanted]
            options = numpy.stack([numpy.ceil(intervals / (count + more)) for count in few for more in (0, 1)])
            costs = numpy.stack([self._cost(option, intervals) for option in options])
            cheapest = numpy.argmin(numpy.where(numpy.isnan(costs), numpy.inf, costs), axis=0)
            planned = numpy.take_along_axis(options, cheapest[None], axis=0)[0]
            fewest = numpy.ceil(intervals / numpy.minimum(intervals, self._longest))
            planned = numpy.where(planned > self._longest, numpy.ceil(intervals / fewest), planned)
            fixed = numpy.where(self._window, self._fixed, numpy.minimum(self._fixed, intervals))
            found = numpy.where(numpy.isnan(self._fixed), planned, fixed)
        return numpy.where(self._some > 0, found, numpy.nan)

    def per_second(self, intervals: Array) -> Array:
        """Seconds lost per second of wall time: stalls, and failures that go back to snapshots or replicas.

        Args:
            intervals: in iterations.
        """
        with numpy.errstate(all="ignore"):
            return numpy.where(self._some > 0, self._cost(self.best(intervals), intervals), 0.0)

    def stall_per_second(self, every: Array, intervals: Array) -> Array:
        """Share of the wall time in stalls of snapshots beside those of the checkpoints.

        Args:
            every: iterations between snapshots.
            intervals: in iterations.
        """
        with numpy.errstate(all="ignore"):
            stalls = per_interval(every, intervals) * self._stall_seconds
            return numpy.asarray(stalls / (intervals * self._iteration_seconds + self._disk_stall_seconds + stalls))

    def process_seconds(self, every: Array) -> Array:
        """Mean training that a failure loses that leaves the machines.

        Args:
            every: iterations between snapshots.
        """
        with numpy.errstate(all="ignore"):
            trained = every * self._iteration_seconds
            whole = numpy.where(self._window, trained, self._iteration_seconds)
            return self._lost(trained, self._stall_seconds, whole)

    def machine_seconds(self, every: Array, intervals: Array) -> Array:
        """Mean training that a failure loses that takes a machine, where replicas are on others.

        Args:
            every: iterations between snapshots.
            intervals: in iterations; the disk may be nearer than a replica over a slow network; not of windows.
        """
        with numpy.errstate(all="ignore"):
            trained, transfer = every * self._iteration_seconds, self._replica_seconds
            windows_apart = numpy.maximum(numpy.ceil(transfer / trained), 1.0) * trained
            apart = numpy.where(self._window, windows_apart, numpy.maximum(trained, transfer))
            waiting = numpy.where(~self._window & (transfer > trained), trained / 2, 0.0)
            whole = transfer + numpy.where(self._window, trained, 0.0)
            replicated = self._lost(apart, numpy.zeros_like(transfer), whole) + waiting
            return numpy.where(self._window, replicated, numpy.fmin(replicated, self._disk_seconds(intervals)))

    def _disk_seconds(self, intervals: Array) -> Array:
        return numpy.asarray(intervals * self._iteration_seconds / 2 + self._persist_seconds)

    def _cost(self, every: Array, intervals: Array) -> Array:
        machine = numpy.fmin(self.machine_seconds(every, intervals), self._disk_seconds(intervals))
        machine = numpy.where(self._machine > 0, self._machine * machine, 0.0)
        process = self.process_seconds(every)
        # A window that is longer than the interval of the disk is not what a failure goes back to.
        process = numpy.where(self._window, numpy.fmin(process, self._disk_seconds(intervals)), process)
        return self.stall_per_second(every, intervals) + self._process * process + machine

    def _lost(self, trained: Array, stall: Array, until_whole: Array) -> Array:
        """Mean training since the newest whole state, or the restart, in lives that any failure ends (`Costs`)."""
        period = trained + stall
        rate = numpy.maximum(self._failures_per_second, 1e-9 / period)
        stalled = -numpy.expm1(-rate * stall) * numpy.exp(-rate * trained) / -numpy.expm1(-rate * period)
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


def closed_form(inputs: PlannerInputs) -> tuple[int, int] | None:
    """Both intervals in iterations, of memory and disk, by Young's formula; None without snapshots in memory.

    Each tier pays for the failures that go back to it with the stalls that it adds:
    `m = sqrt(2 s_m / rate_m)`, `T = sqrt(2 (s_d - s_m) / rate_d)`. Of the two whole numbers around `T / m`, and of 1,
    which leaves no snapshot between two checkpoints, it is the cheapest by the leading terms, with the best m for it.
    That is the optimum of jobs that recompute, where failures are rare and no bound holds. None also where a snapshot
    stalls longer than a checkpoint, or one of the two is not known; and with windows, whose length is not planned.

    Args:
        inputs: of the job.
    """
    memory = inputs.memory
    if memory is None or memory.window or not inputs.stall_seconds >= memory.stall_seconds:
        return None
    rate, disk_share = inputs.failures_per_second, inputs.disk_share

    def young(stall_seconds: float, share: float) -> int:
        failures = rate * share
        seconds = math.sqrt(2) * root(stall_seconds) / root(failures) if failures > 0 else math.inf
        return whole_iterations(in_iterations(seconds, inputs.iteration_seconds))

    def pair(count: int) -> tuple[int, int]:
        """With so many snapshots in an interval, the checkpoint included."""
        stalls = inputs.stall_seconds + (count - 1) * memory.stall_seconds
        every = young(stalls / count, 1 - disk_share + count * disk_share)
        return every, count * every

    every, interval = (
        young(memory.stall_seconds, 1 - disk_share),
        young(inputs.stall_seconds - memory.stall_seconds, disk_share),
    )
    counts = {1, max(1, interval // every), max(1, -(-interval // every))}
    return min(map(pair, sorted(counts)), key=lambda one: _leading_seconds(inputs, memory.stall_seconds, *one))


def _leading_seconds(inputs: PlannerInputs, stall_seconds: float, every: int, interval: int) -> float:
    """Seconds lost per iteration, in stalls and in half of the interval that a failure goes back by."""
    stalls = inputs.stall_seconds + (interval // every - 1) * stall_seconds
    lost = (1 - inputs.disk_share) * every / 2 + inputs.disk_share * interval / 2
    return stalls / interval + inputs.failures_per_second * inputs.iteration_seconds * inputs.iteration_seconds * lost


def _to_replicas(rank: PlannerInputs) -> float:
    has = rank.memory is not None and rank.memory.replica_seconds is not None
    return rank.share("machine") if has else 0.0


def _column(ranks: Sequence[PlannerInputs], figure: Callable[[PlannerInputs], float]) -> Array:
    return numpy.array([[float(figure(rank))] for rank in ranks], dtype=numpy.float64)
