"""How long one plan takes, by the number of ranks and by what differs between them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy

from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import PhaseInputs, PlannerInputs
from cpsr.planner.plan import make_plan
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS, EndCostCurve, PaperCurve
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["KINDS", "Timing", "measure"]

SEED = 0
PIPELINE_STAGES = 64  # more than any pipeline that has been published
LIMITS = Limits(10, 500, 200)
PHASE = PhaseInputs(1000, 3000, 3e-4, 1.8, 0.05, -9.0, 1e-6, 355_000_000)
# A lead up to 60 iterations behind the checkpoint, at a failure every ten minutes: nothing is left out of the cost.
LAG = EndCostCurve.with_independent_prior((-40.0, 0.6, 0.05), (20.0, 0.3, 0.1), 15.0)
JOB = PlannerInputs(
    0.6,
    0.9,
    5.0,
    1 / 600,
    LAG,
    30.0,
    2.0,
    PHASE,
    watch_iterations=WATCH_ITERATIONS,
    lead_after_iterations=LEAD_AFTER_ITERATIONS,
)


@dataclass(frozen=True)
class Timing:
    """One plan, made several times.

    Attributes:
        ranks: how many it is for.
        kind: what differs between them.
        median_seconds: of the repeats.
        longest_seconds: of the repeats.
    """

    ranks: int
    kind: str
    median_seconds: float
    longest_seconds: float


def measure(kind: str, ranks: int, repeats: int) -> Timing:
    """Make one plan several times.

    Args:
        kind: one of KINDS.
        ranks: number of ranks.
        repeats: plans, after one that is not counted.
    """
    inputs = KINDS[kind](ranks)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        make_plan(inputs, LIMITS)
        seconds.append(time.perf_counter() - started)
    return Timing(ranks, kind, statistics.median(seconds[1:]), max(seconds[1:]))


def _alike(ranks: int) -> list[PlannerInputs]:
    return [JOB] * ranks


def _own_costs(ranks: int) -> list[PlannerInputs]:
    """Each with its own state, and so its own stall and persist time; one lag curve, which the job measures."""
    stalls = numpy.random.default_rng(SEED).uniform(0.5, 2.0, ranks).tolist()
    return [replace(JOB, stall_seconds=stall, persist_seconds=5 * stall) for stall in stalls]


def _stages(ranks: int) -> list[PlannerInputs]:
    """Before anything is measured: the paper's curve for the parameters of each pipeline stage."""
    curves = [PaperCurve(replace(PHASE, parameters=PHASE.parameters + stage)) for stage in range(PIPELINE_STAGES)]
    return [replace(rank, recovery=curves[place % PIPELINE_STAGES]) for place, rank in enumerate(_own_costs(ranks))]


def _own_curves(ranks: int) -> list[PlannerInputs]:
    """The worst case: no two ranks share a curve."""
    return [
        replace(rank, recovery=PaperCurve(replace(PHASE, parameters=PHASE.parameters + place)))
        for place, rank in enumerate(_own_costs(ranks))
    ]


KINDS: Mapping[str, Callable[[int], list[PlannerInputs]]] = {
    "nothing": _alike,
    "stall and persist time": _own_costs,
    f"these, and curves of {PIPELINE_STAGES} stages": _stages,
    "these, and every curve": _own_curves,
}
