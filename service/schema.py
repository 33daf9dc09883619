"""What the service answers: every body as a typed model, units in the names."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Checkpoint",
    "Error",
    "Failure",
    "FailureList",
    "FailureReport",
    "Health",
    "PlanReply",
    "RankPlan",
    "Recovery",
    "Rehearsal",
]


class Error(BaseModel):
    """The one form of every answer that is not 2xx, `/healthz` apart."""

    code: str = Field(description="Stable word for programs, for example `journal_unavailable`.")
    message: str = Field(description="What happened and where, for people.")
    hint: str = Field(description="What to do.")


class RankPlan(BaseModel):
    """The interval that one rank keeps."""

    rank: int
    interval_iterations: int
    interval_seconds: float | None = Field(description="At the median of the recent steps; null before the first step.")
    origin: str = Field(description="`fixed`: the user's; else the rule that chose it.")
    from_iteration: int


class Checkpoint(BaseModel):
    """The checkpoint that was committed last."""

    iteration: int
    bytes: int | None
    origin: Literal["trained", "predicted"] = Field(
        description="`predicted`: its state, or one that it was trained from, was predicted."
    )
    created_unix_seconds: float


class Recovery(BaseModel):
    """The restoration that happened last."""

    id: str
    failure_iteration: int | None = Field(description="null where the run continued without a failure.")
    checkpoint_iteration: int | None
    restored_iteration: int
    method: str = Field(description="`scratch`, `exact`; anything else is a predicted state.")
    requested_mode: str
    outcome: Literal["kept", "vetoed", "rolled_back", "watching"]
    expected_lag_iterations: float | None
    reason: str
    settings: dict[str, Any]
    guard: dict[str, Any]
    sources: list[dict[str, Any]]
    created_unix_seconds: float


class Failure(BaseModel):
    """A failure of the run."""

    iteration: int | None = Field(description="null where it was reported and no restart shows it.")
    checkpoint_iteration: int | None
    description: str
    failed_unix_seconds: float
    reported: bool = Field(description="Whether somebody reported it, or the job saw it by itself.")


class FailureReport(BaseModel):
    """What `POST /failures` takes: a failure that no restart of this job shows."""

    model_config = ConfigDict(extra="forbid")

    description: str = Field(min_length=1, max_length=1000, examples=["node 17 lost two GPUs; the spare took over"])
    failed_unix_seconds: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="When; by default now."
    )


class FailureList(BaseModel):
    """The newest failures, newest first."""

    failures: list[Failure]
    total: int


class Rehearsal(BaseModel):
    """A recovery that was rehearsed in the running job."""

    iteration: int
    failure_iteration: int
    checkpoint_iteration: int
    outcome: Literal["running", "measured", "refused", "diverged", "failed"]
    lag_iterations: float | None
    lag_standard_error_iterations: float | None
    reason: str
    cost_seconds: float
    created_unix_seconds: float


class PlanReply(BaseModel):
    """The current plan, why it is so, and what the current state is made of."""

    run_id: str | None
    mode: str | None = Field(description="Recovery mode of the newest life.")
    world_size: int | None = Field(description="null where the run directory does not say; `ranks` then has rank 0.")
    last_iteration: int | None
    ranks: list[RankPlan]
    recovery_mode: Literal["predict", "recompute"] | None = Field(
        description="How a failure costs less, as far as is known; null where the plan did not choose."
    )
    explanation: dict[str, Any] = Field(
        description="Inputs with units and age, the rule, what other rules would choose and cost, the active bound."
    )
    planned_unix_seconds: float
    newest_checkpoint: Checkpoint | None
    last_recovery: Recovery | None
    last_rehearsal: Rehearsal | None = Field(description="The newest rehearsed recovery.")
    descends_from_predicted: bool | None = Field(
        description="Whether the current state was predicted, or trained on from one; null where it is not known."
    )
    warnings: list[str] = Field(description="What could not be read and is missing above.")


class Health(BaseModel):
    """Whether the run can be seen, and whether it is well as far as its journal shows."""

    status: Literal["ok", "degraded"]
    reason: str | None = Field(description="Why it is degraded.")
    journal_age_seconds: float | None = Field(description="Since the journal was last written; null without one.")
    last_iteration: int | None
