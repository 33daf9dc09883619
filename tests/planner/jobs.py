"""Jobs to plan for, and the strategies that draw them."""

import math
from dataclasses import dataclass, replace

import numpy
from hypothesis import strategies as st

from cpsr.planner.cost import Costs
from cpsr.planner.inputs import (
    Array,
    Bounds,
    FailureClass,
    Limits,
    MemoryTier,
    Mode,
    PhaseInputs,
    PlannerInputs,
    RecoveryCost,
)
from cpsr.planner.recovery_curve import EndCostCurve

HOUR = 3600.0
# GPT-2 of 355M parameters in the middle of its training, in round numbers.
PHASE = PhaseInputs(
    first_iteration=1000,
    last_iteration=3000,
    alpha1_per_iteration=3e-4,
    alpha2=1.8,
    tau1_per_checkpoint=0.05,
    tau2=-9.0,
    xi=1e-6,
    parameters=355_000_000,
)
JOB = PlannerInputs(
    iteration_seconds=0.6, stall_seconds=0.9, persist_seconds=5.0, failures_per_second=1 / (12 * HOUR), phase=PHASE
)
ANY = st.floats(0.0, 1e7) | st.sampled_from([0.0, 1e-300])
HALF = FailureClass(0.5, 0.5)
USUAL = st.floats(1e-4, 1e5)


def end_cost(constant: float, per_horizon: float, per_interval: float = 0.0) -> EndCostCurve:
    return EndCostCurve(constant, per_horizon, per_interval, 20.0)


def job(mtbf_hours: float = 12.0, **fields: object) -> PlannerInputs:
    return replace(JOB, failures_per_second=1 / (mtbf_hours * HOUR), **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scaled:
    """A curve that is off by a factor."""

    curve: RecoveryCost
    factor: float

    @property
    def source(self) -> str:
        return "scaled"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        return self.factor * self.curve.end_cost_iterations(horizon_iterations, interval_iterations)


def cost_per_second(inputs: PlannerInputs, intervals: Array, mode: Mode) -> Array:
    """Seconds lost per second of wall time."""
    return Costs(inputs).per_second(intervals, mode)


def lost_work_seconds(
    iteration_seconds: float, interval_iterations: float, stall_seconds: float, persist_seconds: float = 0.0
) -> float:
    """Mean training time that a failure takes back where failures are rare and persisting ends within the interval.

    For an interval of k seconds: a failure in the stall s loses k, and one later the time since. One before the newest
    checkpoint is durable loses another k. Together: `k (k/2 + s + p) / (k + s)`.
    """
    trained = iteration_seconds * interval_iterations
    return trained * (trained / 2 + stall_seconds + persist_seconds) / (trained + stall_seconds)


def exact_ettr(
    iteration_seconds: float,
    interval_iterations: float,
    stall_seconds: float,
    restart_seconds: float,
    mtbf_seconds: float,
) -> float:
    """ETTR of a job under Poisson failures that goes back to its last checkpoint, at any rate of failures.

    A checkpoint is durable when its stall ends; failures may come during restarts and stalls. With
    w = I T_iter + T_s, a segment takes `M e^(R/M) (e^(w/M) - 1)` on average.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, Eq. 13.
    """
    useful = iteration_seconds * interval_iterations
    segment = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds)
    return useful / (segment * math.expm1((useful + stall_seconds) / mtbf_seconds))


def brute_force(inputs: PlannerInputs, bounds: Bounds, mode: Mode) -> tuple[int, float]:
    """The best of all integers inside the bounds, and its cost."""
    every = numpy.arange(bounds.minimum_iterations, bounds.maximum_iterations + 1, dtype=numpy.float64)
    costs = cost_per_second(inputs, every, mode)
    place = int(numpy.argmin(costs))
    return int(every[place]), float(costs[place])


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low, high = sorted((draw(st.integers(1, 10_000)), draw(st.integers(1, 10_000))))
    return Limits(low, high, draw(st.none() | st.integers(1, 10_000)))


@st.composite
def any_phase(draw: st.DrawFn) -> PhaseInputs:
    first, length = draw(st.integers(0, 10**6)), draw(st.integers(0, 10**6))
    return PhaseInputs(
        first_iteration=first,
        last_iteration=first + length,
        alpha1_per_iteration=draw(st.floats(-1.0, 1.0)),
        alpha2=draw(st.floats(-1e3, 1e3)),
        tau1_per_checkpoint=draw(st.floats(-1.0, 1.0)),
        tau2=draw(st.floats(-1e3, 1e3)),
        xi=draw(ANY),
        parameters=draw(st.integers(0, 10**13)),
    )


@st.composite
def any_job(draw: st.DrawFn) -> PlannerInputs:
    return PlannerInputs(
        iteration_seconds=draw(USUAL),
        stall_seconds=draw(ANY),
        persist_seconds=draw(ANY),
        failures_per_second=draw(st.just(0.0) | st.floats(1e-15, 1e3)),
        recovery=draw(st.none() | st.builds(end_cost, *[st.floats(-1e3, 1e3)] * 3)),
        restart_seconds=draw(ANY),
        predict_seconds=draw(ANY),
        phase=draw(st.none() | any_phase()),
        watch_iterations=draw(st.integers(0, 10**4)),
        classes=draw(st.sampled_from([{}, {"process": HALF, "everything": HALF}, {"machine": HALF, "process": HALF}])),
        memory=draw(st.none() | st.builds(MemoryTier, ANY, st.none() | st.integers(1, 10**6), st.none() | ANY)),
    )
