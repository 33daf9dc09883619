"""From what a running job has measured to what the planner takes."""

from dataclasses import dataclass

from cpsr.config import CPSRConfig
from cpsr.fitter.phases import PhaseDetector
from cpsr.planner.inputs import Origin, PhaseInputs, PlannerInputs, RecoveryCost
from cpsr.planner.plan import Plan
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS
from cpsr.planning.curves import Curves, prior_curves
from cpsr.planning.rank_costs import RankCosts
from cpsr.planning.recovery_cost import Schedule

__all__ = ["Situation", "planner_inputs", "unmeasured_inputs"]


@dataclass(frozen=True)
class Situation:
    """What the training thread knows when it asks for a plan.

    Attributes:
        schedule: where the training stands.
        iteration_seconds: median of the newest iterations.
        timed_iterations: how many these are.
        plan: that holds.
    """

    schedule: Schedule
    iteration_seconds: float
    timed_iterations: int
    plan: Plan


def unmeasured_inputs(config: CPSRConfig) -> PlannerInputs:
    """Before anything was measured: costs of zero, so that the bounds decide."""
    failures = prior_curves(0, config).failures
    return PlannerInputs(0.0, 0.0, 0.0, failures.mean_per_second, origins={"failures_per_second": Origin("configured")})


def planner_inputs(
    situation: Situation,
    costs: RankCosts,
    curves: Curves,
    lags: RecoveryCost | None,
    phases: PhaseDetector,
    watch_iterations: int,
    second_moments: Origin,
) -> PlannerInputs:
    """What is known of one rank.

    Args:
        situation: of the job.
        costs: of the rank's checkpoints.
        curves: of the job.
        lags: what a predicted recovery costs; None where none is possible.
        phases: of the training.
        watch_iterations: after a predicted restart, in which nothing is committed.
        second_moments: of how many ranks the phases' are.
    """
    iteration = situation.schedule.iteration
    saves = Origin.of_samples(costs.saves, max(0, iteration - costs.iteration))
    fitted = max(0, iteration - curves.iteration)
    failures = curves.failures
    origins = {
        "iteration_seconds": Origin.of_samples(situation.timed_iterations, 0),
        "stall_seconds": saves,
        "persist_seconds": saves,
        # Time without a failure lowers the rate, and says no more than that it is not higher.
        "failures_per_second": Origin.of_samples(failures.failures, fitted)
        if failures.exposure_seconds
        else Origin("configured"),
        "recovery": Origin.of_samples(len(curves.lags), fitted),
        "predict_seconds": Origin.of_samples(curves.predictions, fitted),
        "lead_after_iterations": Origin("prior"),
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
        lags,
        predict_seconds=curves.predict_seconds,
        watch_iterations=watch_iterations,
        lead_after_iterations=LEAD_AFTER_ITERATIONS,
        phase=phase,
        origins=origins,
    )


def _phase(costs: RankCosts, curves: Curves, phases: PhaseDetector) -> PhaseInputs | None:
    """The paper's curves for the phase that has begun, which is taken to be as long as the one before."""
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
