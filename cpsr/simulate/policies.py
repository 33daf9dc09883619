"""From a description to the systems that are simulated: every policy's interval, inside the same bounds."""

from collections.abc import Sequence
from dataclasses import replace

from cpsr.errors import ConfigError
from cpsr.planner.baselines import Baseline, PCcheck
from cpsr.planner.bounds import Limits, bounds_of
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.plan import make_plan, policy_names
from cpsr.planner.ranks import job_of
from cpsr.simulate.spec import SimulationSpec, SystemSpec
from cpsr.simulate.system import Checkpoints, Prediction, Recovery, Replay, Rollback, System

__all__ = ["systems"]


def systems(spec: SimulationSpec, mtbf_seconds: float, policies: Sequence[str] | None = None) -> list[System]:
    """The chosen policies with the intervals they take, then the description's own systems.

    Policies get the true parameters of the simulated job. The baselines recompute after a failure; CPSR and the
    paper's forms predict where that is expected to cost less.

    Args:
        spec: the description.
        mtbf_seconds: of the failures that will come.
        policies: names, instead of the description's.

    Raises:
        ConfigError: a policy is not known.
    """
    job, limits, baselines = (
        replace(job_of(spec.inputs()), failures_per_second=1 / mtbf_seconds),
        spec.bounds(),
        spec.baselines(),
    )
    names = spec.policies if policies is None else policies
    known = policy_names(baselines)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown policies {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    chosen = [
        _baseline(name, baselines[name], job, limits) if name in baselines else _planned(name, job, limits)
        for name in names
    ]
    return [*chosen, *(_own(job, system) for system in spec.systems)]


def _baseline(name: str, rule: Baseline, job: PlannerInputs, limits: Limits) -> System:
    choice = rule.choose(job)
    slots = rule.concurrent if isinstance(rule, PCcheck) else 1
    if slots > 1:
        # Several checkpoints at once are what PCcheck is about: the persist time of one bounds nothing.
        low, high = limits.interval_min_iterations, limits.interval_max_iterations
        interval, bound = min(max(choice.interval_iterations, low), high), "none"
    else:
        bounds = bounds_of(job, limits, "recompute")
        assert bounds is not None
        interval, bound = bounds.clamp(choice.interval_iterations)
    note = "; ".join(part for part in (choice.note, "" if bound == "none" else f"bound: {bound}") if part)
    return System(name, Checkpoints(interval, job.stall_seconds, job.persist_seconds, slots), Rollback(), note)


def _planned(name: str, job: PlannerInputs, limits: Limits) -> System:
    plan = make_plan([job], limits, name)
    assert plan.mode is not None
    checkpoints = Checkpoints(plan.interval_iterations, job.stall_seconds, job.persist_seconds, contention="skip")
    recovery: Recovery = _prediction(job) if plan.mode == "predict" else Rollback()
    return System(name, checkpoints, recovery, plan.mode)


def _own(job: PlannerInputs, system: SystemSpec) -> System:
    checkpoints = Checkpoints(
        system.interval_iterations, system.stall_seconds, system.persist_seconds, system.slots, system.contention
    )
    recovery: Recovery = Rollback()
    if system.recovery == "replay":
        recovery = Replay(system.conversion_iterations, system.replay_time_fraction)
    elif system.recovery == "predict":
        recovery = _prediction(job)
    return System(system.name, checkpoints, recovery)


def _prediction(job: PlannerInputs) -> Prediction:
    # The description is checked for it.
    assert job.recovery is not None
    return Prediction(job.recovery, job.predict_seconds, job.watch_iterations, job.lead_after_iterations)
