"""The description of a simulation: a job as it is planned for, and how it fails.

For example, what a plan needs and then what only a simulation does:

    iteration_seconds: 3.0
    checkpoint: {stall_seconds: 4, persist_seconds: 60}
    failures: {mtbf_hours: 3, restart_seconds: 120, detection_seconds: 30, process: weibull, weibull_shape: 0.7}
    recovery: {end_cost: {per_horizon_iteration: 0.5}, predict_seconds: 10, predictable_interval_iterations: 300}
    wall_days: 54
    policies: [young, checkfreq, cpsr]
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cpsr.config import read_mapping, read_model
from cpsr.errors import ConfigError
from cpsr.planner.plan import policy_names
from cpsr.planner.spec import FailureSpec, PlanSpec
from cpsr.planner.units import SECONDS_PER_HOUR
from cpsr.simulate.iteration import Collective, Pipeline, iteration_seconds

__all__ = ["ArrivalSpec", "SimulationSpec", "SystemSpec", "read_spec", "require_no_simulation"]

SECONDS_PER_DAY = 86400.0


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CollectiveSpec(_Section):
    """A collective operation with the time `alpha + beta m`."""

    alpha_seconds: float = Field(ge=0)
    beta_seconds_per_byte: float = Field(ge=0)
    message_bytes: float = Field(ge=0)
    overlap_fraction: float = Field(default=0.0, ge=0, le=1, description="Part that computation hides.")


class PipelineSpec(_Section):
    """An iteration that was not measured: `(M + S - 1) max t_s`, synchronisation and update."""

    micro_batches: int = Field(ge=1, description="M, of one pipeline in one iteration.")
    stage_seconds: tuple[float, ...] = Field(min_length=1, description="t_s of each stage, for one micro-batch.")
    synchronisation: tuple[CollectiveSpec, ...] = ()
    update_seconds: float = Field(default=0.0, ge=0)

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        collectives = [Collective(**collective.model_dump()) for collective in self.synchronisation]
        return iteration_seconds([Pipeline(self.micro_batches, self.stage_seconds)], collectives, self.update_seconds)


class ArrivalSpec(FailureSpec):
    """When failures come, and what each costs whoever recovers it."""

    process: Literal["poisson", "weibull", "trace"] = "poisson"
    weibull_shape: float = Field(default=1.0, gt=0, description="Below 1 failures come in bursts.")
    trace: Path | None = Field(default=None, description="Its rate takes the place of mtbf_hours.")
    trace_nodes: int | None = Field(
        default=None, ge=1, description="Nodes the job needs; null: every removal meets it."
    )
    detection_seconds: float = Field(default=0.0, ge=0, description="From the failure until it is known.")
    replacement_seconds: float = Field(default=0.0, ge=0, description="From then until a replacement is there.")

    @model_validator(mode="after")
    def _trace_is_named(self) -> "ArrivalSpec":
        if self.process == "trace" and self.trace is None:
            raise ValueError("the process trace needs failures.trace")
        return self


class SystemSpec(_Section):
    """A system with its own checkpoints and recovery, beside the policies.

    One slot is a system that persists one checkpoint at a time. A running job has host buffers for three, but persists
    them one after the other, and its planned interval is never shorter than that takes: one slot is its model too.
    """

    name: str
    interval_iterations: int = Field(ge=1)
    stall_seconds: float = Field(ge=0)
    persist_seconds: float = Field(default=0.0, ge=0)
    slots: int = Field(default=1, ge=1, description="Checkpoints on their way to the storage at once.")
    contention: Literal["wait", "skip"] = Field(
        default="wait", description="One that is due while all slots are taken."
    )
    recovery: Literal["rollback", "replay", "predict"] = "rollback"
    conversion_iterations: int = Field(default=0, ge=0, description="replay: repeated to make a dense state.")
    replay_time_fraction: float = Field(default=1.0, gt=0, description="replay: time of a repeated iteration.")

    @model_validator(mode="after")
    def _skips_with_one_slot(self) -> "SystemSpec":
        if self.contention == "skip" and self.slots != 1:
            raise ValueError("contention: skip is simulated for one slot only")
        return self


class SimulationSpec(PlanSpec):
    """A job that is to be planned for, and simulated."""

    failures: ArrivalSpec
    pipeline: PipelineSpec | None = Field(default=None, description="In place of iteration_seconds.")
    samples_per_iteration: float = Field(default=1.0, gt=0, description="For goodput; 1 gives it in iterations.")
    wall_days: float = Field(default=54.0, gt=0, description="Length of a simulated run.")
    policies: tuple[str, ...] = ("young", "daly", "checkfreq", "pccheck", "gemini", "cpsr")
    systems: tuple[SystemSpec, ...] = ()
    runs: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _estimate_the_iteration(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("pipeline") is None:
            return data
        if "iteration_seconds" in data:
            raise ValueError("give either iteration_seconds or pipeline")
        return data | {"iteration_seconds": PipelineSpec.model_validate(data["pipeline"]).seconds}

    @model_validator(mode="after")
    def _can_be_simulated(self) -> "SimulationSpec":
        known = policy_names(self.baselines())
        unknown = [name for name in self.policies if name not in known]
        if unknown:
            raise ValueError(f"unknown policies {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if self.memory is not None:
            raise ValueError("memory is not simulated: every failure goes back to the disk; leave it out")
        if self.recovery is None and any(system.recovery == "predict" for system in self.systems):
            raise ValueError("a system that predicts needs the section recovery")
        return self

    @property
    def mtbf_seconds(self) -> float:
        """Of the job, if no trace gives it."""
        return self.failures.mtbf_hours * SECONDS_PER_HOUR


def read_spec(path: Path) -> SimulationSpec:
    """The description of a simulation in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value does not fit; the message names
            each.
    """
    return read_model(SimulationSpec, path)


def require_no_simulation(path: Path) -> None:
    """Refuse a simulation's description where a job's is wanted, by the keys that only a simulation knows.

    Raises:
        ConfigError: it has such keys, which the message names with the command that takes them; or it cannot be read.
    """
    data = read_mapping(path)
    failures = data.get("failures")
    found = [key for key in data if key in SimulationSpec.model_fields.keys() - PlanSpec.model_fields.keys()]
    if isinstance(failures, Mapping):
        only = ArrivalSpec.model_fields.keys() - FailureSpec.model_fields.keys()
        found += [f"failures.{key}" for key in failures if key in only]
    if found:
        raise ConfigError(
            f"{path} describes a simulation: {', '.join(found)} {'are keys' if len(found) > 1 else 'is a key'} of "
            f"`cpsr simulate`, which a plan does not take. Run `cpsr simulate --spec {shlex.quote(str(path))}`, or "
            f"leave {'them' if len(found) > 1 else 'it'} out for a plan"
        )
