"""The plan: how often checkpoints are taken now and why, what-if previews, and overrides."""

import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cpsr.errors import JournalError
from cpsr.journal import (
    CheckpointRow,
    JournalReader,
    PhaseRow,
    PlanOverride,
    PlanRow,
    RecoveryRow,
    Size,
    json_ready,
    latest_override,
    override_plan,
)
from cpsr.planner.preview import Basis, Change, basis_of, preview
from cpsr.service.access import MayWrite
from cpsr.service.ettr import Ettr, read_ettr
from cpsr.service.problems import Problem
from cpsr.service.run import RECENT_STEPS, RunDir, identity_of, iteration_seconds, life_state, open_journal, plain_row
from cpsr.state.witness import ARITHMETIC, CHECKED, NOT_RESTORED

__all__ = ["PlanReply", "plan_of", "router"]

VERDICTS = (CHECKED, ARITHMETIC, NOT_RESTORED)
# A run that was restarted, or pinned without being planned, has at most a few plans without inputs.
PLANS_LOOKED_AT = 50
# Beyond these no job is; and within them nothing that is computed from them overflows.
LARGEST_HOURS, LARGEST_BYTES = 1e9, 1e18
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


class Override(BaseModel):
    """The requested interval, and whether the current plan uses it."""

    id: int
    interval_min_iterations: int | None
    interval_max_iterations: int | None
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float
    taken_up: bool = Field(
        description="Whether the job applies it, at a step boundary about a second after the request. A job without "
        "a measured checkpoint applies it after its first one."
    )


class PlanReply(BaseModel):
    """The current plan, why it is so, and what the current state is made of."""

    run_id: str | None
    mode: str | None = Field(description="Recovery mode of the newest life.")
    world_size: int | None = Field(description="null where the run directory lacks it.")
    sizes: list[Size] = Field(description="Numbers of ranks in turn, the present one last.")
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
        description="Why: the `rule`; the `inputs`, and of each in `origins` whether it was measured and how often; "
        "the active `bound`; what `rivals` would choose from the same inputs, and what that would cost; failures by "
        "what they leave and their ways back in `classes`; `notes`."
    )
    override: Override | None = Field(description="The current override of the interval.")
    planned_unix_seconds: float
    newest_checkpoint: dict[str, Any] | None = Field(description="The row that the journal has of it.")
    last_recovery: dict[str, Any] | None = Field(description="The row that the journal has of it.")
    ettr: Ettr | None = Field(description="Effective training time ratio, and where the rest went.")
    descends_from_predicted: bool = Field(
        description="Whether the current state is labelled: it was predicted, or restored with older experts, "
        "or was trained on from such a state."
    )
    repeated_steps: list[RepeatedSteps] = Field(
        description="How the steps that the newest exact restart has repeated compare with their first execution, by "
        "rank as its comparison ended; empty where none was compared."
    )
    warnings: list[str] = Field(
        description="Steps that differ from their first execution, and what could not be read and is missing above."
    )


class PreviewRequest(BaseModel):
    """Body of `POST /plan/preview`: the values to change; the rest is as the job measured it."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # true is no number
        json_schema_extra={"examples": [{"mtbf_hours": 3.0}, {"persist_bytes_per_second": 5e8}]},
    )

    mtbf_hours: float | None = Field(
        default=None, ge=1e-6, le=LARGEST_HOURS, description="Mean time between failures of the job."
    )
    state_bytes: float | None = Field(
        default=None,
        ge=1,
        le=LARGEST_BYTES,
        description="Of a checkpoint, all ranks together; the stall and the time to persist grow in proportion.",
    )
    snapshot_bytes_per_second: float | None = Field(
        default=None, ge=1, le=LARGEST_BYTES, description="Device to host, all ranks together, while training stalls."
    )
    persist_bytes_per_second: float | None = Field(
        default=None, ge=1, le=LARGEST_BYTES, description="Host to disk, all ranks together."
    )


class PreviewReply(BaseModel):
    """The plan for changed inputs; a preview changes nothing."""

    interval_iterations: int
    interval_seconds: float
    memory_interval_iterations: int | None = Field(description="Between snapshots in host memory.")
    recovery_mode: Literal["predict", "recompute"] | None
    held_interval_iterations: int = Field(description="Of the current plan.")
    planned_unix_seconds: float = Field(description="When the plan was made whose inputs these are.")
    from_iteration: int = Field(description="First iteration of that plan.")
    explanation: dict[str, Any] = Field(description="As of a plan; what was changed has the source `configured`.")


def _given(name: str, without: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema of an object in which one number is given, and others are not."""
    absent = {other: {"type": "null"} for other in without}
    return {"required": [name], "properties": {name: {"type": "integer"}, **absent}}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# In JSON 25.0 is an integer, too; true and "25" are not.
Iterations = Annotated[int, Field(ge=1, le=INTERVAL_MAX_ITERATIONS), BeforeValidator(_whole)]


class OverrideRequest(BaseModel):
    """What `PUT /plan/override` takes: one interval, or a bound or two."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # true is no number
        json_schema_extra={
            "examples": [
                {"interval_iterations": 50, "expires_in_seconds": 7200, "reason": "the cooling is being repaired"},
                {"interval_max_iterations": 100, "reason": "spot prices are rising"},
            ],
            "anyOf": [
                _given("interval_iterations", without=("interval_min_iterations", "interval_max_iterations")),
                _given("interval_min_iterations", without=("interval_iterations",)),
                _given("interval_max_iterations", without=("interval_iterations",)),
            ],
        },
    )

    interval_iterations: Iterations | None = Field(default=None, description="Pins it; alone, or else both bounds.")
    interval_min_iterations: Iterations | None = None
    interval_max_iterations: Iterations | None = None
    expires_in_seconds: float = Field(
        default=HOUR_SECONDS, gt=0, le=LONGEST_SECONDS, allow_inf_nan=False, description="It ends by itself."
    )
    reason: str = Field(min_length=1, max_length=1000, description="Explains the override to readers of the plan.")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "OverrideRequest":
        low, high = self.interval_min_iterations, self.interval_max_iterations
        bounded = low is not None or high is not None
        if bounded == (self.interval_iterations is not None):
            raise ValueError("give either interval_iterations, or interval_min_iterations and interval_max_iterations")
        if low is not None and high is not None and low > high:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


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
    """The plan for the same phase, made again by the planner from the recorded inputs with something different."""
    with open_journal(run_dir) as reader:
        current, row, basis = _basis(reader)
        lives, checkpoint = reader.lives(), reader.latest_checkpoint()
    state_bytes = None if checkpoint is None or not checkpoint.bytes else float(checkpoint.bytes)
    mode = lives[-1].mode if lives else ""
    try:
        plan = preview(
            basis,
            Change(**request.model_dump()),
            state_bytes,
            "predict" if mode == "predict" else "exact" if mode == "exact" else "auto",
        )
    except ValueError as error:
        raise Problem(409, "size_unknown", str(error), "ask again once a checkpoint is committed") from error
    return PreviewReply(
        interval_iterations=plan.interval_iterations,
        interval_seconds=plan.interval_iterations * basis.inputs.iteration_seconds,
        memory_interval_iterations=plan.memory_interval_iterations,
        recovery_mode=plan.mode,
        held_interval_iterations=current.interval_iterations,
        planned_unix_seconds=row.created_unix_seconds,
        from_iteration=row.from_iteration,
        explanation=json_ready(plan.explanation),
    )


@router.put("/plan/override", operation_id="override_plan", dependencies=[MayWrite])
def put_override(run_dir: RunDir, request: OverrideRequest) -> Override:
    """Pin or bound the interval for a while, within the configured bounds; the newest override counts."""
    pin, now = request.interval_iterations, time.time()
    override = PlanOverride(
        interval_min_iterations=request.interval_min_iterations if pin is None else pin,
        interval_max_iterations=request.interval_max_iterations if pin is None else pin,
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
    withdrawal = PlanOverride(
        interval_min_iterations=None,
        interval_max_iterations=None,
        reason="withdrawn",
        expires_unix_seconds=time.time(),
    )
    override_plan(run_dir, withdrawal)
    return current


def plan_of(run_dir: Path) -> PlanReply | None:
    """The current plan; None where the run has not planned yet.

    Raises:
        JournalError: the journal cannot be read.
    """
    identity, warnings = identity_of(run_dir)
    with open_journal(run_dir) as reader:
        current = reader.latest_plan()
        if current is None:
            return None
        steps, lives = reader.recent_steps(RECENT_STEPS), reader.lives()
        checkpoint, recovery = reader.latest_checkpoint(), reader.latest_recovery()
        repeated = _repeated_steps(reader)
        seconds = iteration_seconds(steps)
        interval_seconds = None if seconds is None else current.interval_iterations * seconds
        return PlanReply(
            run_id=identity.get("run_id"),
            mode=lives[-1].mode if lives else identity.get("mode"),
            world_size=identity.get("world_size"),
            sizes=reader.sizes(),
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
            ettr=read_ettr(reader, lives, life_state(reader.path, lives, steps)),
            descends_from_predicted=_descends_from_predicted(checkpoint, recovery),
            repeated_steps=repeated,
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


def _basis(reader: JournalReader) -> tuple[PlanRow, PlanRow, Basis]:
    """The current plan, the newest plan from measurements, and its inputs."""
    for count in (1, PLANS_LOOKED_AT):  # it mostly is the newest, and explanations are kilobytes
        rows = reader.newest(PlanRow, count)
        for row in rows:
            basis = basis_of(row.explanation, row.origin)
            if basis is not None:
                return rows[0], row, basis
    raise Problem(
        409,
        "nothing_measured",
        "no plan of this run was made from measurements",
        "a run that plans its interval has such a plan once its first checkpoint is durable; a run whose interval is "
        "fixed by the configuration has none: describe it to `cpsr plan`",
    )


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
