"""The plan: how often checkpoints are taken now and why, what-if previews, and overrides."""

import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cpsr.errors import JournalError
from cpsr.journal import (
    CheckpointRow,
    JournalReader,
    PhaseRow,
    PlanOverride,
    PlanRow,
    RecoveryRow,
    json_ready,
    latest_override,
    override_plan,
)
from cpsr.planner.planning import RecoveryMode, preview
from cpsr.service.access import MayWrite
from cpsr.service.problems import Problem
from cpsr.service.run import (
    RECENT_STEPS,
    RunDir,
    iteration_seconds,
    open_journal,
    paces_of,
    plain_row,
    run_id_of,
)
from cpsr.state.witness import ARITHMETIC, CHECKED, NOT_RESTORED

__all__ = ["PlanReply", "plan_of", "router"]

PLANS_LOOKED_AT = 50
VERDICTS = (CHECKED, ARITHMETIC, NOT_RESTORED)
# Beyond it no job is; and within it nothing that is computed overflows.
LARGEST_HOURS = 1e9
INTERVAL_MAX_ITERATIONS = 2**31  # as the planner's
HOUR_SECONDS = 3600.0
LONGEST_SECONDS = 30 * 24 * HOUR_SECONDS  # a longer override belongs into the configuration

router = APIRouter(tags=["plan"])


class CurrentPhase(BaseModel):
    """The phase that the training is in."""

    phase: int = Field(description="Its number, from 0.")
    first_iteration: int


class RepeatedSteps(BaseModel):
    """How the steps that a restart has repeated compare with their first execution."""

    rank: int
    life: int
    result: Literal["checked", "arithmetic", "not restored"] = Field(
        description="`checked`: equal; `arithmetic`: different by rounding, from this iteration on; `not restored`: "
        "different."
    )
    iteration: int | None
    message: str


class SlowRank(BaseModel):
    """A rank whose own time for a step, without its waits for other ranks, exceeds the median's by 15%."""

    rank: int
    host: str
    device: str
    own_seconds: float = Field(description="For a step: compute and data.")
    compute_seconds: float
    data_seconds: float
    expected_own_seconds: float = Field(description="Of the median rank.")
    cause: Literal["compute", "data"]
    message: str


class Override(BaseModel):
    """The requested interval, and whether the current plan uses it."""

    id: int
    interval_iterations: int
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float
    taken_up: bool = Field(
        description="Whether the job applies it, at a step boundary about a second after the request; a job that has "
        "measured neither a checkpoint nor snapshots beside a fixed interval, after it has."
    )


class PlanReply(BaseModel):
    """The current plan, why it is so, and what the current state is made of."""

    run_id: str | None
    mode: str | None = Field(description="Recovery mode of the newest life.")
    ranks: int | None = Field(description="Of the newest life.")
    last_iteration: int | None
    iteration_seconds: float | None = Field(description="Median of the recent steps.")
    phase: CurrentPhase | None = Field(
        description="null where the interval is fixed or nothing was recorded of phases."
    )
    interval_iterations: int = Field(description="Between checkpoints.")
    interval_seconds: float | None = Field(description="At the median of the recent steps; null before the first step.")
    memory_interval_iterations: int | None = Field(
        description="Between snapshots in host memory, of which a checkpoint is one, or the length of windows; null: "
        "there are none."
    )
    from_iteration: int = Field(description="Where the plan began.")
    origin: str = Field(
        description="`fixed`: the configuration's; `override`: pinned for a while; else the rule that chose it."
    )
    recovery_mode: Literal["predict", "recompute"] | None = Field(
        description="The mode with the lower expected cost of a failure; null where the plan did not choose."
    )
    explanation: dict[str, Any] = Field(
        description="Why: the `rule`; the `inputs`; the active `bound`; what `rivals` would choose from the same "
        "inputs, and what that would cost; failures by what they leave and what they go back to in `classes`; `notes`."
    )
    override: Override | None = Field(description="The current override of the interval.")
    planned_unix_seconds: float
    newest_checkpoint: dict[str, Any] | None = Field(description="The row that the journal has of it.")
    last_recovery: dict[str, Any] | None = Field(description="The row that the journal has of it.")
    descends_from_predicted: bool = Field(
        description="Whether the current state is labelled: it was predicted, or restored with older experts, "
        "or was trained on from such a state."
    )
    repeated_steps: list[RepeatedSteps] = Field(
        description="How the steps that the newest exact restart has repeated compare with their first execution, by "
        "rank as its comparison ended; empty where none was compared."
    )
    slow_ranks: list[SlowRank] = Field(description="Of the newest life, while it runs; see docs/slow_ranks.md.")
    warnings: list[str] = Field(
        description="Steps that differ from their first execution, and what could not be read and is missing above."
    )


class PreviewRequest(BaseModel):
    """Body of `POST /plan/preview`."""

    model_config = ConfigDict(extra="forbid", strict=True)  # true is no number

    mtbf_hours: float = Field(
        ge=1e-6, le=LARGEST_HOURS, examples=[3.0], description="Mean time between failures of the job."
    )


class PreviewReply(BaseModel):
    """The plan for another failure rate; a preview changes nothing."""

    interval_iterations: int
    interval_seconds: float
    memory_interval_iterations: int | None = Field(description="Between snapshots in host memory.")
    recovery_mode: Literal["predict", "recompute"] | None
    explanation: dict[str, Any] = Field(description="As of a plan.")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# In JSON 25.0 is an integer, too; true and "25" are not.
Iterations = Annotated[int, Field(ge=1, le=INTERVAL_MAX_ITERATIONS), BeforeValidator(_whole)]


class OverrideRequest(BaseModel):
    """What `PUT /plan/override` takes."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # true is no number
        json_schema_extra={
            "examples": [
                {"interval_iterations": 50, "expires_in_seconds": 7200, "reason": "the cooling is being repaired"}
            ]
        },
    )

    interval_iterations: Iterations
    expires_in_seconds: float = Field(
        default=HOUR_SECONDS, gt=0, le=LONGEST_SECONDS, allow_inf_nan=False, description="It ends by itself."
    )
    reason: str = Field(min_length=1, max_length=1000, description="Explains the override to readers of the plan.")


@router.get("/plan", operation_id="get_plan")
def get_plan(run_dir: RunDir) -> PlanReply:
    """The current checkpoint interval, and why."""
    plan = plan_of(run_dir)
    if plan is None:
        message = f"the run in {run_dir} has not planned yet"
        raise Problem(404, "no_plan_yet", message, "the first plan is made when training starts; ask again then")
    return plan


@router.post("/plan/preview", operation_id="preview_plan")
def post_preview(run_dir: RunDir, request: PreviewRequest) -> PreviewReply:
    """The newest plan from measurements at another failure rate, made by the planner from the recorded inputs."""
    with open_journal(run_dir) as reader:
        # A restart begins with a plan that has no inputs.
        recorded, lives = [row.explanation for row in reader.newest(PlanRow, PLANS_LOOKED_AT)], reader.lives()
    mode = lives[-1].mode if lives else ""
    recovery: RecoveryMode = "predict" if mode == "predict" else "exact" if mode == "exact" else "auto"
    answers = ((explanation, preview(explanation, request.mtbf_hours, recovery)) for explanation in recorded)
    explanation, plan = next((one for one in answers if one[1] is not None), ({}, None))
    if plan is None:
        raise Problem(
            409,
            "nothing_measured",
            "no recent plan of this run was made from measurements",
            "a run that plans its interval has such a plan once its first checkpoint is durable; a run whose interval "
            "is fixed by the configuration has none: describe it to `cpsr plan`",
        )
    return PreviewReply(
        interval_iterations=plan.interval_iterations,
        interval_seconds=plan.interval_iterations * float(explanation["inputs"]["iteration_seconds"]),
        memory_interval_iterations=plan.memory_interval_iterations,
        recovery_mode=plan.mode,
        explanation=json_ready(plan.explanation),
    )


@router.put("/plan/override", operation_id="override_plan", dependencies=[MayWrite])
def put_override(run_dir: RunDir, request: OverrideRequest) -> Override:
    """Pin the interval for a while, within the configured bounds; the newest override counts."""
    now = time.time()
    override = PlanOverride(
        interval_iterations=request.interval_iterations,
        reason=request.reason,
        expires_unix_seconds=now + request.expires_in_seconds,
        created_unix_seconds=now,
    )
    return Override(**plain_row(override) | {"id": override_plan(run_dir, override)}, taken_up=False)


@router.delete("/plan/override", operation_id="withdraw_override", dependencies=[MayWrite])
def delete_override(run_dir: RunDir) -> Override:
    """End the current override early; answers with the one that was ended."""
    current = _override_of(run_dir, None)
    if current is None:
        raise Problem(404, "no_override", "no override is in force", "GET /plan has the current plan")
    override_plan(run_dir, PlanOverride(interval_iterations=1, reason="withdrawn", expires_unix_seconds=0.0))
    return current


def plan_of(run_dir: Path) -> PlanReply | None:
    """The current plan; None where the run has not planned yet.

    Raises:
        JournalError: the journal cannot be read.
    """
    warnings: list[str] = []
    with open_journal(run_dir) as reader:
        current = reader.latest_plan()
        if current is None:
            return None
        steps, lives = reader.recent_steps(RECENT_STEPS), reader.lives()
        checkpoint, recovery = reader.latest_checkpoint(), reader.latest_recovery()
        repeated = _repeated_steps(reader)
        slow = [one for one in paces_of(run_dir, lives) if one.slow]
        seconds = iteration_seconds(steps)
        interval_seconds = None if seconds is None else current.interval_iterations * seconds
        return PlanReply(
            run_id=run_id_of(run_dir),
            mode=lives[-1].mode if lives else None,
            ranks=lives[-1].ranks if lives else None,
            last_iteration=steps[0].iteration if steps else None,
            iteration_seconds=seconds,
            phase=_current_phase(reader, current),
            interval_iterations=current.interval_iterations,
            interval_seconds=None if interval_seconds is None or math.isinf(interval_seconds) else interval_seconds,
            memory_interval_iterations=current.memory_interval_iterations,
            from_iteration=current.from_iteration,
            origin=current.origin,
            recovery_mode=current.mode,
            explanation=json_ready(current.explanation),
            override=_readable_override(run_dir, current, warnings),
            planned_unix_seconds=current.created_unix_seconds,
            newest_checkpoint=None if checkpoint is None else plain_row(checkpoint),
            last_recovery=None if recovery is None else plain_row(recovery),
            descends_from_predicted=_descends_from_predicted(checkpoint, recovery),
            repeated_steps=repeated,
            slow_ranks=[SlowRank.model_validate(one, from_attributes=True) for one in slow],
            warnings=[one.message for one in repeated if one.result == NOT_RESTORED] + warnings,
        )


def _repeated_steps(reader: JournalReader) -> list[RepeatedSteps]:
    """The verdicts of the newest life that has any."""
    found = reader.events(*VERDICTS)
    newest = max((row.life for row in found), default=None)
    return [RepeatedSteps(**plain_row(row), result=row.kind) for row in found if row.life == newest]  # type: ignore[arg-type]


def _current_phase(reader: JournalReader, current: PlanRow) -> CurrentPhase | None:
    for ended in reader.newest(PhaseRow, 1):
        return CurrentPhase(phase=ended.phase + 1, first_iteration=ended.last_iteration)
    # A run that plans is in its first phase until that has ended.
    return CurrentPhase(phase=0, first_iteration=0) if "expected" in current.explanation else None


def _descends_from_predicted(checkpoint: CheckpointRow | None, recovery: RecoveryRow | None) -> bool:
    """Whether the newest checkpoint or recovery, which is the newer of the two, has the label."""
    if recovery is None:
        return False
    newer = checkpoint is not None and checkpoint.life >= recovery.life
    return (checkpoint.origin if checkpoint is not None and newer else recovery.origin) == "predicted"


def _readable_override(run_dir: Path, current: PlanRow, warnings: list[str]) -> Override | None:
    """The current override; an unreadable one does not prevent the answer."""
    try:
        return _override_of(run_dir, current)
    except JournalError as error:
        warnings.append(f"overrides of the plan cannot be read: {error}")
        return None


def _override_of(run_dir: Path, plan: PlanRow | None) -> Override | None:
    """The override in force; None where there is none.

    Raises:
        JournalError: the commands cannot be read.
    """
    override = latest_override(run_dir)
    if override is None or not override.holds(time.time()):
        return None
    applied = None if plan is None else plan.explanation.get("override")
    taken_up = isinstance(applied, dict) and applied.get("id") == override.id
    return Override(**plain_row(override), taken_up=taken_up)
