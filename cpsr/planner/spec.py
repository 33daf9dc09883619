"""A job's description, to plan before the job exists.

For example:

    iteration_seconds: 0.6
    checkpoint: {state_bytes: 4.2e9, snapshot_bytes_per_second: 5e9, persist_bytes_per_second: 1e9}
    failures: {mtbf_hours: 12, restart_seconds: 30, process_fraction: 0.5}
    memory: {stall_seconds: 0.01, replica_seconds: 2}
    recovery:
      predict_seconds: 2
      predictable_interval_iterations: 200
      end_cost: {per_horizon_iteration: 0.5}
    limits: {interval_min_iterations: 10, interval_max_iterations: 1000}
    ranks: [{count: 7}, {state_bytes: 5e9}]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cpsr.config import read_model
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.journal import FailureScope
from cpsr.planner.baselines import TOLERANCE_FRACTION, Baseline, baselines
from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import FailureClass, MemoryTier, Origin, PhaseInputs, PlannerInputs, RecoveryCost
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS, EndCostCurve, PaperCurve
from cpsr.planner.units import ITERATIONS_MAX, SECONDS_PER_HOUR
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["PlanSpec", "read_plan_spec"]

# A given line is certain: no observation is added, and nothing uses its uncertainty.
CERTAIN = (1e-6, 1e-6, 1e-6)
CERTAIN_SCATTER_ITERATIONS = 1.0


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointSpec(_Section):
    """What a checkpoint of one rank costs: seconds, or bytes and bandwidths."""

    state_bytes: float | None = Field(default=None, gt=0, description="Weights and moments of one rank.")
    snapshot_bytes_per_second: float | None = Field(default=None, gt=0, description="Device to host, while it stalls.")
    persist_bytes_per_second: float | None = Field(default=None, gt=0, description="Host to disk, of one rank.")
    stall_seconds: float | None = Field(default=None, ge=0, description="Extra time of the training thread.")
    persist_seconds: float | None = Field(default=None, ge=0, description="From the snapshot to the commit record.")

    @model_validator(mode="after")
    def _complete(self) -> "CheckpointSpec":
        for seconds, bandwidth in (
            ("stall_seconds", "snapshot_bytes_per_second"),
            ("persist_seconds", "persist_bytes_per_second"),
        ):
            rate = getattr(self, bandwidth)
            if (getattr(self, seconds) is None) == (rate is None):
                raise ValueError(f"give either {seconds} or {bandwidth}")
            if rate is not None and self.state_bytes is None:
                raise ValueError(f"{bandwidth} needs state_bytes")
        return self

    def seconds(self, state_bytes: float | None) -> tuple[float, float]:
        """Stall and persist time of a rank with so much state; None is this description's own."""
        size = self.state_bytes if state_bytes is None else state_bytes
        return (
            _seconds(self.stall_seconds, size, self.snapshot_bytes_per_second),
            _seconds(self.persist_seconds, size, self.persist_bytes_per_second),
        )


class FailureSpec(_Section):
    """How often the job fails, and what each failure costs however it is recovered from.

    Of the two fractions, one that is left out takes at most what the other one leaves.
    """

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
        if sum(self._fractions()) > 1:
            raise ValueError("process_fraction and everything_fraction are more than 1 together")
        return self

    def classes(self) -> dict[FailureScope, FailureClass]:
        """The classes by name."""
        process, everything = self._fractions()
        shares: dict[FailureScope, float] = {"process": process, "machine": max(0.0, 1 - process - everything)}
        shares["everything"] = everything
        return {scope: FailureClass(share, share) for scope, share in shares.items()}

    def _fractions(self) -> tuple[float, float]:
        """Of class `process`, and of `everything`."""
        process, everything = self.process_fraction, self.everything_fraction
        if "everything_fraction" not in self.model_fields_set:
            return process, min(everything, 1 - process)
        return (process if "process_fraction" in self.model_fields_set else min(process, 1 - everything)), everything


class MemorySpec(_Section):
    """Snapshots in host memory between the checkpoints; without this section there are none."""

    stall_seconds: float | None = Field(
        default=None, ge=0, description="Extra time of the training thread per snapshot; null: that of a checkpoint."
    )
    interval_iterations: int | None = Field(default=None, ge=1, description="null: planned.")
    replica_seconds: float | None = Field(
        default=None, ge=0, description="From a snapshot to its replicas on other machines; null: there are none."
    )


class EndCostSpec(_Section):
    """The end cost of a predicted recovery, `constant + per_horizon u + per_interval T_c`, all in iterations."""

    constant_iterations: float = Field(default=0.0, description="Negative where runs end better.")
    per_horizon_iteration: float = Field(description="1 is what recomputing costs.")
    per_interval_iteration: float = 0.0


class RecoverySpec(_Section):
    """What a predicted recovery costs; without an end cost the paper's curve of the phase is taken."""

    predict_seconds: float = Field(default=0.0, ge=0, description="To forecast, predict and inject.")
    predictable_interval_iterations: int | None = Field(
        default=None, ge=1, description="Longest interval from which the state can be predicted."
    )
    end_cost: EndCostSpec | None = Field(default=None)
    watch_iterations: int = Field(
        default=WATCH_ITERATIONS,
        ge=0,
        description="After a predicted restart, in which no checkpoint is begun.",
    )
    lead_after_iterations: int = Field(
        default=LEAD_AFTER_ITERATIONS,
        ge=0,
        description="Of training after a predicted restart, before an end cost below zero is had; a failure before "
        "loses it.",
    )


class PhaseSpec(_Section):
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


class LimitSpec(_Section):
    """What no policy may overstep."""

    interval_min_iterations: int = Field(default=1, ge=1, le=ITERATIONS_MAX)
    interval_max_iterations: int = Field(default=10_000, ge=1, le=ITERATIONS_MAX)

    @model_validator(mode="after")
    def _in_order(self) -> "LimitSpec":
        if self.interval_min_iterations > self.interval_max_iterations:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


class RankSpec(_Section):
    """Ranks that differ from the job's description."""

    count: int = Field(default=1, ge=1)
    state_bytes: float | None = Field(default=None, gt=0)
    parameters: int | None = Field(default=None, ge=1, description="For the phase's curve.")


class PlanSpec(_Section):
    """A job that is to be planned."""

    iteration_seconds: float = Field(gt=0)
    checkpoint: CheckpointSpec
    failures: FailureSpec
    memory: MemorySpec | None = Field(default=None, description="null: every failure goes back to the disk.")
    recovery: RecoverySpec | None = Field(default=None, description="null: nothing is predicted.")
    phase: PhaseSpec | None = None
    limits: LimitSpec = LimitSpec()
    ranks: tuple[RankSpec, ...] = Field(default=(RankSpec(),), min_length=1)
    mode: Literal["auto", "predict", "exact"] = Field(default="auto", description="As in the configuration.")
    fixed_interval_iterations: int | None = Field(default=None, ge=1, description="For the policy fixed.")
    tolerance_fraction: float = Field(
        default=TOLERANCE_FRACTION, gt=0, lt=1, description="Overhead that CheckFreq and PCcheck may take."
    )

    @model_validator(mode="after")
    def _can_be_planned(self) -> "PlanSpec":
        if self.recovery is not None and self.recovery.end_cost is None and self.phase is None:
            raise ValueError("recovery needs an end_cost, or a phase with the paper's curves")
        if self.checkpoint.state_bytes is None and any(rank.state_bytes is not None for rank in self.ranks):
            raise ValueError("ranks with their own state_bytes need checkpoint.state_bytes and bandwidths")
        return self

    def inputs(self) -> list[PlannerInputs]:
        """The planner's inputs for each rank."""
        line = self._line()
        return [inputs for rank in self.ranks for inputs in [self._inputs(rank, line)] * rank.count]

    def bounds(self) -> Limits:
        """The limits of every plan."""
        longest = None if self.recovery is None else self.recovery.predictable_interval_iterations
        return Limits(self.limits.interval_min_iterations, self.limits.interval_max_iterations, longest)

    def baselines(self) -> Mapping[str, Baseline]:
        """The baselines that the plan is compared with."""
        return baselines(self.fixed_interval_iterations, self.tolerance_fraction)

    def _line(self) -> EndCostCurve | None:
        if self.recovery is None or self.recovery.end_cost is None:
            return None
        cost = self.recovery.end_cost
        mean = (cost.constant_iterations, cost.per_horizon_iteration, cost.per_interval_iteration)
        return EndCostCurve.with_independent_prior(mean, CERTAIN, CERTAIN_SCATTER_ITERATIONS, "the job's description")

    def _inputs(self, rank: RankSpec, line: EndCostCurve | None) -> PlannerInputs:
        phase = None
        if self.phase is not None:
            own = {} if rank.parameters is None else {"parameters": rank.parameters}
            phase = PhaseInputs(**(self.phase.model_dump() | own))
        recovery: RecoveryCost | None = line
        if self.recovery is not None and line is None and phase is not None:
            recovery = PaperCurve(phase)
        stall_seconds, persist_seconds = self.checkpoint.seconds(rank.state_bytes)
        names = ("iteration_seconds", "stall_seconds", "persist_seconds", "failures_per_second", "restart_seconds")
        return PlannerInputs(
            iteration_seconds=self.iteration_seconds,
            stall_seconds=stall_seconds,
            persist_seconds=persist_seconds,
            failures_per_second=1 / (self.failures.mtbf_hours * SECONDS_PER_HOUR),
            recovery=recovery,
            restart_seconds=self.failures.restart_seconds,
            predict_seconds=0.0 if self.recovery is None else self.recovery.predict_seconds,
            watch_iterations=0 if self.recovery is None else self.recovery.watch_iterations,
            lead_after_iterations=0 if self.recovery is None else self.recovery.lead_after_iterations,
            phase=phase,
            classes=self.failures.classes(),
            memory=self._memory(stall_seconds),
            origins=dict.fromkeys(names, Origin("configured")),
        )

    def _memory(self, stall_seconds: float) -> MemoryTier | None:
        memory = self.memory
        if memory is None:
            return None
        own = stall_seconds if memory.stall_seconds is None else memory.stall_seconds
        return MemoryTier(own, memory.interval_iterations, memory.replica_seconds)


def read_plan_spec(path: Path) -> PlanSpec:
    """The description of a job in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value does not fit; the message names
            each.
    """
    return read_model(PlanSpec, path)


def _seconds(seconds: float | None, state_bytes: float | None, bytes_per_second: float | None) -> float:
    if seconds is not None:
        return seconds
    # The description was checked for it.
    assert state_bytes is not None
    assert bytes_per_second is not None
    return state_bytes / bytes_per_second
