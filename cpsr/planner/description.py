"""`cpsr plan`: a described job, to plan before the job exists.

For example:

    iteration_seconds: 0.6
    checkpoint: {stall_seconds: 0.9, persist_seconds: 5}
    failures: {mtbf_hours: 12, restart_seconds: 30, process_fraction: 0.5}
    memory: {stall_seconds: 0.01, replica_seconds: 2}
    recovery:
      predict_seconds: 2
      predictable_interval_iterations: 200
      end_cost: {per_horizon_iteration: 0.5}
    limits: {interval_min_iterations: 10, interval_max_iterations: 1000}
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console
from rich.table import Table

from cpsr.config import read_model
from cpsr.errors import ConfigError
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.journal import FailureScope
from cpsr.planner.inputs import (
    ITERATIONS_MAX,
    SECONDS_PER_HOUR,
    FailureClass,
    Limits,
    MemoryTier,
    PhaseInputs,
    PlannerInputs,
    RecoveryCost,
)
from cpsr.planner.plan import Plan
from cpsr.planner.planning import LEAST_COST, make_plan, policy_names
from cpsr.planner.recovery_curve import EndCostCurve, PaperCurve
from cpsr.predictor.divergence_watch import WATCH_ITERATIONS
from cpsr.tables import print_table

__all__ = ["FailureSpec", "PlanSpec", "run_plan"]

PERCENT = 100.0


class Section(BaseModel):
    """Keys that are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointSpec(Section):
    """What a checkpoint of the slowest rank costs."""

    stall_seconds: float = Field(ge=0, description="Extra time of the training thread.")
    persist_seconds: float = Field(ge=0, description="From the snapshot to the commit record.")


class FailureSpec(Section):
    """How often the job fails, and what each failure costs however it is recovered from."""

    mtbf_hours: float = Field(gt=0, description="Mean time between failures of the whole job.")
    restart_seconds: float = Field(default=0.0, ge=0, description="From the failure to the restored checkpoint.")
    process_fraction: float = Field(
        default=PRIOR_SHARES["process"],
        ge=0,
        le=1,
        description="Of the failures, those that leave the machines and their memory.",
    )
    everything_fraction: float = Field(
        default=PRIOR_SHARES["everything"],
        ge=0,
        le=1,
        description="Of the failures, those that leave the disk alone; the others take one machine.",
    )

    @model_validator(mode="after")
    def _all_are_failures(self) -> "FailureSpec":
        if self.process_fraction + self.everything_fraction > 1:
            raise ValueError(
                f"process_fraction and everything_fraction ({self.everything_fraction:g}) are more than 1 together"
            )
        return self

    def classes(self) -> dict[FailureScope, FailureClass]:
        """The classes by name."""
        shares: dict[FailureScope, float] = {
            "process": self.process_fraction,
            "machine": max(0.0, 1 - self.process_fraction - self.everything_fraction),
            "everything": self.everything_fraction,
        }
        return {scope: FailureClass(share, share) for scope, share in shares.items()}


class MemorySpec(Section):
    """Snapshots in host memory between the checkpoints; without this section there are none."""

    stall_seconds: float = Field(ge=0, description="Extra time of the training thread per snapshot.")
    interval_iterations: int | None = Field(default=None, ge=1, description="null: planned.")
    replica_seconds: float | None = Field(
        default=None, ge=0, description="From a snapshot to its replicas on other machines; null: there are none."
    )


class EndCostSpec(Section):
    """The end cost of a predicted recovery, `constant + per_horizon u + per_interval T_c`, all in iterations."""

    constant_iterations: float = Field(default=0.0, description="Negative where runs end better.")
    per_horizon_iteration: float = Field(description="1 is what recomputing costs.")
    per_interval_iteration: float = 0.0


class RecoverySpec(Section):
    """What a predicted recovery costs; without an end cost the paper's curve of the phase is taken."""

    predict_seconds: float = Field(default=0.0, ge=0, description="To forecast, predict and inject.")
    predictable_interval_iterations: int | None = Field(
        default=None, ge=1, description="Longest interval from which the state can be predicted."
    )
    end_cost: EndCostSpec | None = Field(default=None)


class PhaseSpec(Section):
    """The paper's curves in the phase that is planned for (its Eq. 7, 8 and 11)."""

    first_iteration: int = Field(ge=0)
    last_iteration: int = Field(ge=1)
    alpha1_per_iteration: float = Field(gt=0, description="Loss exp(-alpha1 t + alpha2).")
    alpha2: float
    tau1_per_checkpoint: float = Field(description="Predictor's error exp(-tau1 n + tau2) after n checkpoints.")
    tau2: float
    xi: float = Field(ge=0, description="Mean second moment of the gradients.")
    parameters: int = Field(ge=1, description="How many a failure takes.")

    @model_validator(mode="after")
    def _in_order(self) -> "PhaseSpec":
        if self.last_iteration < self.first_iteration:
            raise ValueError("last_iteration is before first_iteration")
        return self


class LimitSpec(Section):
    """What no policy may overstep."""

    interval_min_iterations: int = Field(default=1, ge=1, le=ITERATIONS_MAX)
    interval_max_iterations: int = Field(default=10_000, ge=1, le=ITERATIONS_MAX)

    @model_validator(mode="after")
    def _in_order(self) -> "LimitSpec":
        if self.interval_min_iterations > self.interval_max_iterations:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


class PlanSpec(Section):
    """A job that is to be planned."""

    iteration_seconds: float = Field(gt=0)
    checkpoint: CheckpointSpec
    failures: FailureSpec
    memory: MemorySpec | None = Field(default=None, description="null: every failure goes back to the disk.")
    recovery: RecoverySpec | None = Field(default=None, description="null: nothing is predicted.")
    phase: PhaseSpec | None = None
    limits: LimitSpec = LimitSpec()
    mode: Literal["auto", "predict", "exact"] = Field(default="auto", description="As in the configuration.")

    @model_validator(mode="after")
    def _can_be_planned(self) -> "PlanSpec":
        if self.recovery is not None and self.recovery.end_cost is None and self.phase is None:
            raise ValueError("recovery needs an end_cost, or a phase with the paper's curves")
        return self

    def inputs(self) -> PlannerInputs:
        """The planner's inputs."""
        phase = None if self.phase is None else PhaseInputs(**self.phase.model_dump())
        recovery = self.recovery
        return PlannerInputs(
            iteration_seconds=self.iteration_seconds,
            stall_seconds=self.checkpoint.stall_seconds,
            persist_seconds=self.checkpoint.persist_seconds,
            failures_per_second=1 / (self.failures.mtbf_hours * SECONDS_PER_HOUR),
            recovery=self._end_cost(phase),
            restart_seconds=self.failures.restart_seconds,
            predict_seconds=0.0 if recovery is None else recovery.predict_seconds,
            watch_iterations=0 if recovery is None else WATCH_ITERATIONS,
            phase=phase,
            classes=self.failures.classes(),
            memory=None if self.memory is None else MemoryTier(**self.memory.model_dump()),
        )

    def bounds(self) -> Limits:
        """The limits of every plan."""
        longest = None if self.recovery is None else self.recovery.predictable_interval_iterations
        return Limits(self.limits.interval_min_iterations, self.limits.interval_max_iterations, longest)

    def _end_cost(self, phase: PhaseInputs | None) -> RecoveryCost | None:
        if self.recovery is None:
            return None
        if self.recovery.end_cost is None:
            assert phase is not None  # the description was checked for it
            return PaperCurve(phase)
        return EndCostCurve(**self.recovery.end_cost.model_dump(), source="the job's description")


def run_plan(path: Path, policies: Sequence[str], as_json: bool) -> None:
    """Plan a described job by each policy, and print the plans.

    Args:
        path: the description, a YAML or JSON file.
        policies: names; none is the policy of least cost.
        as_json: print one JSON object.

    Raises:
        ConfigError: the description or a policy is not usable; the message names each key.
    """
    spec, known = read_model(PlanSpec, path), policy_names()
    unknown = [name for name in policies if name not in known]
    if unknown:
        raise ConfigError(f"unknown policies {', '.join(unknown)}; known are {', '.join(known)}")
    plans = [make_plan(spec.inputs(), spec.bounds(), policy, spec.mode) for policy in policies or (LEAST_COST,)]
    if as_json:
        print(json.dumps({"plans": [_plain(plan) for plan in plans]}, allow_nan=False))  # noqa: T201
        return
    console = Console()
    print_table(console, _plans_table(plans))
    print_table(console, _rules_table(plans[0]))
    console.print(
        "A failure that goes back to the disk costs, on average over its distance from the checkpoint, one of:"
    )
    for option in plans[0].explanation["modes"].values():
        if isinstance(option, Mapping):
            console.print(f"- {option['failure']} (a checkpoint every {option['interval_iterations']} iterations)")
    for note in dict.fromkeys(note for plan in plans for note in plan.explanation["notes"]):
        console.print(f"- {note}")


def _plain(plan: Plan) -> dict[str, Any]:
    return {
        "policy": plan.origin,
        "interval_iterations": plan.interval_iterations,
        "memory_interval_iterations": plan.memory_interval_iterations,
        "mode": plan.mode,
        "explanation": plan.explanation,
    }


def _plans_table(plans: Sequence[Plan]) -> Table:
    title = "Plans, in % of the wall time (without restarts)"
    table = Table("policy", "interval", "in memory", "mode", "bound", "stall %", "recover %", "total %", title=title)
    for plan in plans:
        expected: Mapping[str, Any] = plan.explanation["expected"]
        shares = [expected[f"{part}_per_second"] for part in ("stall", "recovery", "cost")]
        memory = "-" if plan.memory_interval_iterations is None else str(plan.memory_interval_iterations)
        interval, bound = str(plan.interval_iterations), plan.explanation["bound"]
        table.add_row(plan.origin, interval, memory, plan.mode, bound, *map(_percent, shares))
    return table


def _rules_table(plan: Plan) -> Table:
    """What every rule would choose before any bound, by its own recovery."""
    table = Table("rule", "interval", "cost %", "note", title="What others would choose, unbounded")
    for name, choice in plan.explanation["rivals"].items():
        table.add_row(name, str(choice["interval_iterations"]), _percent(choice["cost_per_second"]), choice["note"])
    return table


def _percent(share: float | str) -> str:
    return share if isinstance(share, str) else f"{PERCENT * share:.3f}"
