"""The planner's inputs, from the measurements of a running job."""

from collections.abc import Mapping
from dataclasses import dataclass

from cpsr.config import CPSRConfig
from cpsr.fitter.failures import PRIOR_SHARES, FailureClasses
from cpsr.fitter.phases import PhaseDetector
from cpsr.journal import FailureScope
from cpsr.planner.inputs import FailureClass, MemoryTier, Origin, PhaseInputs, PlannerInputs, RecoveryCost
from cpsr.planner.live.curves import Curves, prior_curves
from cpsr.planner.live.rank_costs import RankCosts
from cpsr.planner.live.recovery_cost import Schedule
from cpsr.planner.plan import Plan
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS

__all__ = ["Situation", "planner_inputs", "unmeasured_inputs"]


@dataclass(frozen=True)
class Situation:
    """The state of the training thread when it asks for a plan.

    Attributes:
        schedule: progress of the training.
        iteration_seconds: median of the newest iterations.
        timed_iterations: how many these are.
        plan: the current one.
    """

    schedule: Schedule
    iteration_seconds: float
    timed_iterations: int
    plan: Plan


def unmeasured_inputs(config: CPSRConfig) -> PlannerInputs:
    """Inputs before any measurement: costs of zero, so that the bounds decide."""
    failures = prior_curves(0, config).failures
    return PlannerInputs(
        0.0, 0.0, 0.0, failures.total.mean_per_second, origins={"failures_per_second": Origin("configured")}
    )


def planner_inputs(
    situation: Situation,
    costs: RankCosts,
    curves: Curves,
    recovery: RecoveryCost | None,
    phases: PhaseDetector,
    watch_iterations: int,
    second_moments: Origin,
    memory: MemoryTier | None,
    memory_origins: Mapping[str, Origin],
) -> PlannerInputs:
    """The inputs of one rank.

    Args:
        situation: of the job.
        costs: of the rank's checkpoints.
        curves: of the job.
        recovery: end cost of a predicted recovery; None if none is possible.
        phases: of the training.
        watch_iterations: after a predicted restart; nothing is committed in them.
        second_moments: origin of the phases' second moments.
        memory: snapshots in host memory; None: there are none.
        memory_origins: of their times that were measured in this life; others are as old as the checkpoints.
    """
    iteration = situation.schedule.iteration
    saves = Origin.of_samples(costs.saves, max(0, iteration - costs.iteration))
    fitted = max(0, iteration - curves.iteration)
    failures = curves.failures.total
    origins = {
        "iteration_seconds": Origin.of_samples(situation.timed_iterations, 0),
        "stall_seconds": saves,
        "persist_seconds": saves,
        # Time without a failure lowers the rate; it only shows that the rate is not higher.
        "failures_per_second": Origin.of_samples(round(failures.failures), fitted)
        if failures.exposure_seconds
        else Origin("configured"),
        "recovery": Origin.of_samples(len(curves.costs), fitted),
        "predict_seconds": Origin.of_samples(curves.predictions, fitted),
        "lead_after_iterations": Origin("prior"),
        "memory_stall_seconds": saves,
        "replica_seconds": Origin("prior") if memory is None or memory.replica_seconds is None else saves,
        **{
            f"{place}_load_seconds": Origin.of_samples(count, fitted)
            for place, (_, count) in curves.load_seconds.items()
        },
        **memory_origins,
    }
    phase = _phase(costs, curves, phases)
    if phase is not None and curves.loss is not None:
        origins["phase"] = Origin.of_samples(curves.loss.points, fitted)
        origins["xi"] = second_moments
    return PlannerInputs(
        situation.iteration_seconds,
        costs.stall_seconds,
        costs.persist_seconds,
        failures.mean_per_second,
        recovery,
        predict_seconds=curves.predict_seconds,
        watch_iterations=watch_iterations,
        lead_after_iterations=LEAD_AFTER_ITERATIONS,
        phase=phase,
        origins=origins,
        classes=_classes(curves.failures),
        memory=memory,
        load_seconds={place: seconds for place, (seconds, _) in curves.load_seconds.items()},
        lost_share=curves.lost_share,
    )


def _classes(failures: FailureClasses) -> dict[FailureScope, FailureClass]:
    return {
        scope: FailureClass(failures.share(scope), prior, failures.seen.get(scope, 0))
        for scope, prior in PRIOR_SHARES.items()
    }


def _phase(costs: RankCosts, curves: Curves, phases: PhaseDetector) -> PhaseInputs | None:
    """The paper's curves for the phase that has begun, assumed to be as long as the one before."""
    xi, first, before = phases.xi, phases.first_iteration, phases.phases
    if curves.loss is None or curves.predictor is None or xi is None or first is None or not before:
        return None
    length = before[-1].last_iteration - before[-1].first_iteration
    return PhaseInputs(
        first,
        first + length,
        curves.loss.alpha1_per_iteration,
        curves.loss.alpha2,
        curves.predictor.tau1_per_checkpoint,
        curves.predictor.tau2,
        xi,
        costs.parameters,
    )
