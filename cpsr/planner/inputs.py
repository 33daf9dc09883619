"""Inputs of a plan: costs in seconds, curves in iterations, and the limits of its interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy
from numpy.typing import NDArray

from cpsr.journal import FailureScope

__all__ = [
    "ITERATIONS_MAX",
    "SECONDS_PER_HOUR",
    "Array",
    "Bound",
    "Bounds",
    "FailureClass",
    "Limits",
    "MemoryTier",
    "Mode",
    "PhaseInputs",
    "PlannerInputs",
    "RecoveryCost",
    "bounds_of",
    "plain",
    "whole_iterations",
]

Array = NDArray[numpy.float64]
Mode = Literal["predict", "recompute"]
Bound = Literal["none", "minimum", "maximum", "persist", "predictor"]

SECONDS_PER_HOUR = 3600.0
# No run has more iterations; a rule that wants no checkpoint at all returns this number, and a bound decides.
ITERATIONS_MAX = 2**31


class RecoveryCost(Protocol):
    """Cost of a failure that is recovered by prediction; a line in the horizon.

    The planner evaluates it at the mean horizon of a failure: for a line that is the mean cost.
    """

    @property
    def source(self) -> str:
        """Origin of the curve, for the plan's explanation."""

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """End cost in iterations (negative: the run ends better) of a failure that far past its checkpoint.

        Args:
            horizon_iterations: `u = f - c` of the failures.
            interval_iterations: spacing of the checkpoints that the prediction rests on; broadcast with the horizons.
        """


@dataclass(frozen=True)
class PhaseInputs:
    """The paper's curves in one phase of training (its Eq. 7, 8 and 11), with the iteration as their unit of time.

    Attributes:
        first_iteration: of the phase.
        last_iteration: of the phase, as planned.
        alpha1_per_iteration: decay of the loss, `exp(-alpha1 t + alpha2)`.
        alpha2: its logarithm at t = 0.
        tau1_per_checkpoint: decay of the predictor's error, `exp(-tau1 n + tau2)` after n checkpoints.
        tau2: its logarithm at n = 0.
        xi: mean second moment of the gradients.
        parameters: N_p, the number that a failure affects.
        tau1_low_per_checkpoint: lower end of the 95% interval of tau1; None: tau1 is certain.
    """

    first_iteration: int
    last_iteration: int
    alpha1_per_iteration: float
    alpha2: float
    tau1_per_checkpoint: float
    tau2: float
    xi: float
    parameters: int
    tau1_low_per_checkpoint: float | None = None


@dataclass(frozen=True)
class FailureClass:
    """The failures that leave the same.

    Attributes:
        share: of all failures of the job, expected.
        prior_share: before any was seen.
        seen: failures of the run that are known to be of this class.
    """

    share: float
    prior_share: float
    seen: int = 0


@dataclass(frozen=True)
class MemoryTier:
    """Snapshots in host memory between the checkpoints on the disk, each of which is one as well.

    Attributes:
        stall_seconds: s_m, extra time of the training thread per snapshot.
        interval_iterations: set by the user; None: planned.
        replica_seconds: from a snapshot to its replicas on other machines; None if there are none.
        window: whether each is a window of so many iterations, which is whole at its end and replayed from its begin.
        longest_iterations: upper limit of a planned interval, also where a longer one costs less; None: no limit.
    """

    stall_seconds: float
    interval_iterations: int | None = None
    replica_seconds: float | None = None
    window: bool = False
    longest_iterations: int | None = None


@dataclass(frozen=True)
class PlannerInputs:
    """The known costs of the job when a plan is made; finite, and ranks wait for each other, so the slowest counts.

    Attributes:
        iteration_seconds: mean time of one iteration; positive.
        stall_seconds: T_s, extra time of the training thread per checkpoint.
        persist_seconds: from the snapshot to the commit record.
        failures_per_second: lambda, of the whole job.
        recovery: cost of a predicted recovery; None if prediction is not possible, and failures are recomputed.
        restart_seconds: from the failure to the restored checkpoint, the same in both modes.
        predict_seconds: extra time of forecasting, predicting and injecting.
        phase: the paper's curves; None until they could be fitted.
        watch_iterations: no checkpoint is begun in so many iterations after a predicted restart.
        classes: of the failures, whose shares add up to 1; empty: all are of class `everything`.
        memory: snapshots in host memory; None: there are none, and every failure goes back to the disk.
        lost_share: of the state, for which `recovery` holds.
        interval_iterations: that Theorem 1 keeps where it has no solution.
    """

    iteration_seconds: float
    stall_seconds: float
    persist_seconds: float
    failures_per_second: float
    recovery: RecoveryCost | None = None
    restart_seconds: float = 0.0
    predict_seconds: float = 0.0
    phase: PhaseInputs | None = None
    watch_iterations: int = 0
    classes: Mapping[FailureScope, FailureClass] = field(default_factory=dict)
    memory: MemoryTier | None = None
    lost_share: float = 1.0
    interval_iterations: int = 1

    def share(self, scope: FailureScope) -> float:
        """Share of the failures that are of a class."""
        if not self.classes:
            return 1.0 if scope == "everything" else 0.0
        return self.classes[scope].share if scope in self.classes else 0.0

    @property
    def disk_share(self) -> float:
        """Share of the failures that leave nothing but the disk."""
        if self.memory is None:
            return 1.0
        machine = self.share("machine") if self.memory.replica_seconds is None else 0.0
        return self.share("everything") + machine


@dataclass(frozen=True)
class Limits:
    """Limits from the user and the predictor.

    Attributes:
        interval_min_iterations: the user's minimum, at least 1.
        interval_max_iterations: the user's maximum.
        predictable_interval_iterations: longest interval from which the state can be predicted; None if no limit is
            known.
    """

    interval_min_iterations: int = 1
    interval_max_iterations: int = ITERATIONS_MAX
    predictable_interval_iterations: int | None = None


@dataclass(frozen=True)
class Bounds:
    """The shortest and the longest interval in one mode, and which rule set each.

    Attributes:
        minimum_iterations: at least 1.
        maximum_iterations: at least the minimum.
        minimum_by: what set the minimum.
        maximum_by: what set the maximum.
        notes: limits that could not be kept.
    """

    minimum_iterations: int
    maximum_iterations: int
    minimum_by: Bound = "minimum"
    maximum_by: Bound = "maximum"
    notes: tuple[str, ...] = ()

    def clamp(self, interval_iterations: int) -> tuple[int, Bound]:
        """The nearest interval inside, and the bound that moved it ("none" if it was inside)."""
        if interval_iterations < self.minimum_iterations:
            return self.minimum_iterations, self.minimum_by
        if interval_iterations > self.maximum_iterations:
            return self.maximum_iterations, self.maximum_by
        return interval_iterations, "none"


def bounds_of(inputs: PlannerInputs, limits: Limits, mode: Mode) -> Bounds | None:
    """The bounds of a job in one mode; None if prediction is impossible at every allowed interval.

    A checkpoint must be durable before the next one is due. If the disk needs longer than the user's maximum, that
    maximum cannot be kept.
    """
    if mode == "predict" and inputs.recovery is None:
        return None
    bounds = _disk_and_user(inputs, limits)
    longest = limits.predictable_interval_iterations
    if mode == "recompute" or longest is None or longest >= bounds.maximum_iterations:
        return bounds
    if longest < bounds.minimum_iterations:
        return None
    return Bounds(bounds.minimum_iterations, longest, bounds.minimum_by, "predictor", bounds.notes)


def _disk_and_user(inputs: PlannerInputs, limits: Limits) -> Bounds:
    low, high = limits.interval_min_iterations, limits.interval_max_iterations
    persist = inputs.persist_seconds / inputs.iteration_seconds
    if persist <= low:
        return Bounds(low, high)
    shortest = math.ceil(min(persist, ITERATIONS_MAX))
    if shortest <= high:
        return Bounds(shortest, high, "persist", "maximum")
    note = f"a checkpoint is durable after {persist} iterations: an interval of {high} at most cannot be kept"
    return Bounds(shortest, shortest, "persist", "persist", (note,))


def whole_iterations(iterations: float) -> int:
    """The nearest valid interval, from 1 to ITERATIONS_MAX."""
    return round(min(max(iterations, 1.0), ITERATIONS_MAX))


def plain(value: float) -> float | str:
    """The number, or its name if JSON has no such number."""
    return float(value) if math.isfinite(value) else str(float(value))
