"""Ranks in lockstep: the job that they form, and its cheapest interval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cpsr.planner.bounds import Bound, Bounds, Limits, Mode, bounds_of
from cpsr.planner.inputs import Array, MemoryTier, Origin, PhaseInputs, PlannerInputs, RecoveryCost
from cpsr.planner.objective import Costs, cheapest

__all__ = ["Optimum", "cheaper", "job_of", "memory_interval", "optimum"]


# For these the job has the largest value of any rank.
LARGEST_FIELDS = (
    "iteration_seconds",
    "stall_seconds",
    "persist_seconds",
    "failures_per_second",
    "restart_seconds",
    "predict_seconds",
)


@dataclass(frozen=True)
class Optimum:
    """The interval of least cost in one mode.

    Attributes:
        interval_iterations: inside the bounds.
        mode: how failures are recovered from.
        cost_per_second: seconds lost per second, without restarts; infinite if an input is unknown.
        bounds: of the mode.
        bound: the active one; without it another interval would be cheaper.
        memory_interval_iterations: between snapshots in host memory, at most the interval; None without any.
    """

    interval_iterations: int
    mode: Mode
    cost_per_second: float
    bounds: Bounds
    bound: Bound
    memory_interval_iterations: int | None = None


@dataclass(frozen=True)
class _MeanCurve:
    """The mean of the ranks' recovery costs: a failure may hit any of them."""

    curves: tuple[tuple[RecoveryCost, int], ...]
    ranks: int

    @property
    def source(self) -> str:
        return f"mean over {self.ranks} ranks; the first: {self.curves[0][0].source}"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        costs = numpy.zeros(numpy.broadcast_shapes(numpy.shape(horizon_iterations), numpy.shape(interval_iterations)))
        for curve, count in self.curves:
            costs += count / self.ranks * curve.end_cost_iterations(horizon_iterations, interval_iterations)
        return costs


def job_of(ranks: Sequence[PlannerInputs]) -> PlannerInputs:
    """One description of ranks in lockstep: all wait for the slowest, and a failure may hit any of them.

    Prediction is possible if it is on every rank, and so are snapshots in memory and replicas of them. An input that is
    unknown on one rank is unknown for the job. A predicted restart predicts all ranks: the phase has the parameters of
    all. An origin is that of the rank with the largest value, or of the first rank if all are equal.

    Args:
        ranks: at least one.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return first
    largest: dict[str, Any] = {name: _largest(getattr(rank, name) for rank in ranks) for name in LARGEST_FIELDS}
    return replace(
        first,
        **largest,
        watch_iterations=max(rank.watch_iterations for rank in ranks),
        lead_after_iterations=max(rank.lead_after_iterations for rank in ranks),
        recovery=_mean_recovery(ranks),
        phase=_whole_phase(ranks),
        memory=_memory(ranks),
        origins=_origins(ranks),
    )


def optimum(job: PlannerInputs, limits: Limits, mode: Mode) -> Optimum | None:
    """The interval of least cost in one mode; None if prediction is not possible.

    Args:
        job: its inputs.
        limits: of the user and the predictor.
        mode: how failures are recovered from.
    """
    bounds = None if mode == "predict" and job.recovery is None else bounds_of(job, limits, mode)
    if bounds is None:
        return None
    costs = Costs([job])
    lowest, highest = numpy.array([bounds.minimum_iterations]), numpy.array([bounds.maximum_iterations])
    interval = int(cheapest(lambda grid: costs.per_second(grid, mode), lowest, highest)[0])
    around = numpy.maximum(numpy.array([[interval - 1, interval, interval + 1]], dtype=numpy.float64), 1.0)
    row = costs.per_second(around, mode)[0].tolist()
    cost = row[1] if math.isfinite(row[1]) else math.inf
    return Optimum(interval, mode, cost, bounds, _active(interval, row, bounds), memory_interval(job, interval))


def cheaper(options: Sequence[Optimum | None]) -> Optimum:
    """The option of least cost; recomputing if both cost the same. At least one option must be possible."""
    able = [option for option in options if option is not None]
    return min(able, key=lambda option: (option.cost_per_second, option.mode == "predict"))


def memory_interval(inputs: PlannerInputs, interval_iterations: int) -> int | None:
    """Iterations between snapshots in host memory beside checkpoints at an interval; None without any.

    Args:
        inputs: of the job.
        interval_iterations: of the checkpoints.
    """
    every = float(Costs([inputs]).memory_intervals(numpy.array([[float(interval_iterations)]]))[0, 0])
    return None if math.isnan(every) else int(every)


def _active(interval: int, costs: Sequence[float], bounds: Bounds) -> Bound:
    """The bound at which the cost still falls outwards; `costs` are those one below, at, and one above the interval."""
    below, at, above = costs
    if interval == bounds.minimum_iterations and interval > 1 and (below < at or not math.isfinite(at)):
        return bounds.minimum_by
    if interval == bounds.maximum_iterations and above < at:
        return bounds.maximum_by
    return "none"


def _mean_recovery(ranks: Sequence[PlannerInputs]) -> RecoveryCost | None:
    counts: dict[int, int] = {}
    curves: dict[int, RecoveryCost] = {}
    for rank in ranks:
        if rank.recovery is None:
            return None
        curves[id(rank.recovery)] = rank.recovery
        counts[id(rank.recovery)] = counts.get(id(rank.recovery), 0) + 1
    if len(curves) == 1:
        return ranks[0].recovery
    return _MeanCurve(tuple((curves[key], counts[key]) for key in curves), len(ranks))


def _whole_phase(ranks: Sequence[PlannerInputs]) -> PhaseInputs | None:
    """The first rank's, of the parameters of all; None where a rank's is not known."""
    phases = [rank.phase for rank in ranks if rank.phase is not None]
    if len(phases) < len(ranks):
        return None
    return replace(phases[0], parameters=sum(phase.parameters for phase in phases))


def _memory(ranks: Sequence[PlannerInputs]) -> MemoryTier | None:
    """The longest stall, transfer and limit."""
    tiers = [rank.memory for rank in ranks if rank.memory is not None]
    if len(tiers) < len(ranks):
        return None
    replicas = [tier.replica_seconds for tier in tiers if tier.replica_seconds is not None]
    limits = [tier.longest_iterations for tier in tiers if tier.longest_iterations is not None]
    return MemoryTier(
        _largest(tier.stall_seconds for tier in tiers),
        tiers[0].interval_iterations,
        _largest(replicas) if len(replicas) == len(ranks) else None,
        tiers[0].window,
        max(limits) if len(limits) == len(ranks) else None,
    )


def _origins(ranks: Sequence[PlannerInputs]) -> dict[str, Origin]:
    """Of each figure, that of the rank whose value the job has."""
    origins = dict(ranks[0].origins)
    figures = {name: [getattr(rank, name) for rank in ranks] for name in LARGEST_FIELDS}
    tiers = [rank.memory or MemoryTier(0.0) for rank in ranks]
    figures["memory_stall_seconds"] = [tier.stall_seconds for tier in tiers]
    figures["replica_seconds"] = [tier.replica_seconds or 0.0 for tier in tiers]
    for name, values in figures.items():
        # numpy's argmax takes a NaN for the largest, as the job does.
        origin = ranks[int(numpy.argmax(values))].origins.get(name)
        if origin is not None:
            origins[name] = origin
    return origins


def _largest(values: Iterable[float]) -> float:
    # numpy's maximum keeps a NaN; the builtin drops or keeps it by its place.
    return float(numpy.max(numpy.fromiter(values, dtype=numpy.float64)))
