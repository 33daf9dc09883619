"""What-if: the plan that the planner would make if something were different."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import JournalReader, PlanRow, json_ready
from cpsr.planner.plan import Plan
from cpsr.planner.preview import Basis, Change, basis_of, preview
from cpsr.service.parameters import RunDir
from cpsr.service.problems import Problem
from cpsr.service.rows import open_journal

__all__ = ["PreviewReply", "PreviewRequest", "router"]

# A run that was restarted, or pinned without being planned, has at most a few plans without inputs.
PLANS_LOOKED_AT = 50
# Beyond these no job is; and within them nothing that is computed from them overflows.
LARGEST_HOURS, LARGEST_BYTES = 1e9, 1e18

router = APIRouter(tags=["plan"])


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

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "interval_iterations": 55,
                    "interval_seconds": 33.0,
                    "memory_interval_iterations": 4,
                    "recovery_mode": "predict",
                    "bound": "none",
                    "cost_per_second": 0.011,
                    "held_interval_iterations": 110,
                    "planned_unix_seconds": 1764000000.0,
                    "from_iteration": 4001,
                    "explanation": {"rule": "least expected cost"},
                }
            ]
        }
    )

    interval_iterations: int = Field(description="One for all ranks.")
    interval_seconds: float
    memory_interval_iterations: int | None = Field(description="Between snapshots in host memory.")
    recovery_mode: Literal["predict", "recompute"] | None
    bound: str = Field(description="The bound without which another interval would be chosen; `none`.")
    cost_per_second: float | str = Field(description="Expected seconds lost per second of wall time.")
    held_interval_iterations: int = Field(description="Of the current plan.")
    planned_unix_seconds: float = Field(description="When the plan was made whose inputs these are.")
    from_iteration: int = Field(description="First iteration of that plan.")
    explanation: dict[str, Any] = Field(description="As of a plan; what was changed has the source `configured`.")


@router.post("/plan/preview", operation_id="preview_plan")
def post_preview(run_dir: RunDir, request: PreviewRequest) -> PreviewReply:
    """The plan for the same phase, made again by the planner from the recorded inputs with something different."""
    with open_journal(run_dir) as reader:
        current, row, basis = _basis(reader)
        lives, checkpoint = reader.lives(), reader.latest_checkpoint()
        state_bytes = None if checkpoint is None or not checkpoint.bytes else float(checkpoint.bytes)
        try:
            plan = preview(basis, Change(**request.model_dump()), state_bytes, _mode(lives[-1].mode if lives else ""))
        except ValueError as error:
            raise Problem(409, "size_unknown", str(error), "ask again once a checkpoint is committed") from error
        return _reply(plan, basis, row, current)


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
        "no plan of this run was made from measurements by this version",
        "a run that plans its interval has such a plan once its first checkpoint is durable; a run whose interval is "
        "fixed by the configuration has none: describe it to `cpsr plan`",
    )


def _mode(mode: str) -> Literal["auto", "predict", "exact"]:
    return "predict" if mode == "predict" else "exact" if mode == "exact" else "auto"


def _reply(plan: Plan, basis: Basis, row: PlanRow, current: PlanRow) -> PreviewReply:
    explanation = json_ready(plan.explanation)
    return PreviewReply(
        interval_iterations=plan.interval_iterations,
        interval_seconds=plan.interval_iterations * basis.inputs.iteration_seconds,
        memory_interval_iterations=plan.memory_interval_iterations,
        recovery_mode=plan.mode,
        bound=explanation["bound"],
        cost_per_second=explanation["expected"]["cost_per_second"],
        held_interval_iterations=current.interval_iterations,
        planned_unix_seconds=row.created_unix_seconds,
        from_iteration=row.from_iteration,
        explanation=explanation,
    )
