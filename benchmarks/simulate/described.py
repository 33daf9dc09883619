"""A described job under failures: every policy's interval, inside the same bounds, on the same failures.

The description has what `cpsr plan` needs, without `memory`, and then what only a simulation does: docs/simulation.md.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from cpsr.benchmarks.harness.measurement import Measurement
from cpsr.benchmarks.simulate.rivals import PCCHECK_CONCURRENT, RULES, pccheck
from cpsr.benchmarks.simulate.simulation import (
    Checkpoints,
    Failures,
    Job,
    Outcome,
    Recovery,
    System,
    simulate,
)
from cpsr.planner.description import FailureSpec, PlanSpec
from cpsr.planner.inputs import SECONDS_PER_HOUR, PlannerInputs, bounds_of
from cpsr.planner.planning import make_plan, policy_names

__all__ = ["SimulationSpec", "outcomes_of", "report", "show"]

SECONDS_PER_DAY = 86400.0


class ArrivalSpec(FailureSpec):
    """When failures come, and what each costs whoever recovers it."""

    weibull_shape: float = Field(default=1.0, gt=0, description="1: Poisson; below 1 failures come in bursts.")
    detection_seconds: float = Field(default=0.0, ge=0, description="From the failure until it is known.")
    replacement_seconds: float = Field(default=0.0, ge=0, description="From then until a replacement is there.")


class SimulationSpec(PlanSpec):
    """A job that is to be planned for, and simulated."""

    failures: ArrivalSpec
    wall_days: float = Field(default=54.0, gt=0, description="Length of a simulated run.")
    policies: tuple[str, ...] = ("young", "daly", "checkfreq", "pccheck", "gemini", "cpsr")
    runs: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _can_be_simulated(self) -> "SimulationSpec":
        unknown = [name for name in self.policies if name not in policy_names(RULES)]
        if unknown:
            raise ValueError(f"unknown policies {', '.join(unknown)}; known are {', '.join(policy_names(RULES))}")
        if self.memory is not None:
            raise ValueError("memory is not simulated: every failure goes back to the disk; leave it out")
        return self


def outcomes_of(spec: SimulationSpec) -> list[Outcome]:
    """The simulated runs of every policy.

    Policies get the true parameters of the simulated job. The baselines recompute after a failure; CPSR and the paper's
    forms predict where that is expected to cost less.
    """
    failures = Failures(spec.failures.mtbf_hours * SECONDS_PER_HOUR, spec.failures.weibull_shape)
    described = spec.inputs()
    job = Job(
        iteration_seconds=spec.iteration_seconds,
        wall_seconds=spec.wall_days * SECONDS_PER_DAY,
        detection_seconds=spec.failures.detection_seconds,
        replacement_seconds=spec.failures.replacement_seconds,
        restart_seconds=spec.failures.restart_seconds,
    )
    systems = [_system(name, described, spec) for name in spec.policies]
    return [simulate(job, system, failures, spec.runs, spec.seed) for system in systems]


def _system(name: str, job: PlannerInputs, spec: SimulationSpec) -> System:
    limits, rule = spec.bounds(), RULES.get(name)
    if name == "pccheck":
        # Several checkpoints at once are what it is about: the persist time of one bounds nothing.
        low, high = limits.interval_min_iterations, limits.interval_max_iterations
        interval = min(max(pccheck(job).interval_iterations, low), high)
        checkpoints = Checkpoints(interval, job.stall_seconds, job.persist_seconds, PCCHECK_CONCURRENT)
        return System(name, checkpoints, Recovery())
    if rule is not None and name not in ("theorem1", "untruncated", "sinh"):
        bounds = bounds_of(job, limits, "recompute")
        assert bounds is not None  # recomputing is always possible
        interval, _ = bounds.clamp(rule(job).interval_iterations)
        return System(name, Checkpoints(interval, job.stall_seconds, job.persist_seconds), Recovery())
    plan = make_plan(job, limits, name, rules=RULES)
    checkpoints = Checkpoints(plan.interval_iterations, job.stall_seconds, job.persist_seconds)
    recovery = Recovery()
    if plan.mode == "predict":
        assert job.recovery is not None  # or nothing is predicted
        recovery = Recovery(job.recovery, job.predict_seconds, job.watch_iterations)
    return System(name, checkpoints, recovery, plan.mode or "")


def show(call: Measurement, spec: SimulationSpec, outcomes: Sequence[Outcome]) -> None:
    """Print what every policy came to."""
    error = max(outcome.mean_and_error(outcome.ettr)[1] for outcome in outcomes)
    title = (
        f"Simulated: {spec.runs} runs of {spec.wall_days:g} days, MTBF {spec.failures.mtbf_hours:g} h, "
        f"iteration {spec.iteration_seconds:g} s"
    )
    note = (
        "every: iterations between checkpoints; stall, lost and down (restarting and waiting): % of the wall time; "
        f"standard error of a mean ETTR: up to {error:.5f}"
    )
    rows = []
    for outcome in outcomes:
        figures = outcome.to_json()
        quantiles, shares = figures["ettr_quantiles"], figures["wall_time_fractions"]
        ettr = figures["ettr_mean"], quantiles["0.05"], quantiles["0.95"]
        percent = shares["stall"], shares["lost"], shares["restart"] + shares["waiting"]
        texts = [f"{value:.4f}" for value in ettr] + [f"{100 * share:.2f}" for share in percent]
        name, every = outcome.system.name, str(figures["interval_iterations"])
        rows.append((name, every, *texts, f"{figures['failures_mean']:.0f}"))
    call.table(title, ("system", "every", "ETTR", "5%", "95%", "stall", "lost", "down", "fails"), rows, note)


def report(spec: SimulationSpec, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Plain data."""
    return {
        "simulated": True,
        "spec": spec.model_dump(mode="json"),
        "systems": [outcome.to_json() for outcome in outcomes],
    }
