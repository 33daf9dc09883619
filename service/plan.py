"""The plan: how often checkpoints are taken now, why, and the plans before it."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.errors import JournalError
from cpsr.journal import (
    Beginning,
    CheckpointRow,
    JournalReader,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    json_ready,
)
from cpsr.planner.inputs import Origin
from cpsr.service.checkpoints import Checkpoint, checkpoint_of
from cpsr.service.ettr import ETTR_EXAMPLE, Ettr, ettr_of
from cpsr.service.health import RECENT_STEPS, iteration_seconds, life_state
from cpsr.service.identity import identity_of
from cpsr.service.network import NETWORK_EXAMPLE, Network, network_of
from cpsr.service.override import Override, override_of
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.problems import Problem
from cpsr.service.recoveries import Recovery, recovery_of
from cpsr.service.rows import answered, open_journal
from cpsr.service.sizes import SIZES_EXAMPLE, RunSize, sizes_of
from cpsr.service.tiers import CLASSES_EXAMPLE, ClassPlan, classes_of
from cpsr.state.witness import ARITHMETIC, CHECKED, NOT_RESTORED

__all__ = ["PlanHistory", "PlanReply", "plan_of", "router"]

VERDICTS = (CHECKED, ARITHMETIC, NOT_RESTORED)
# By the end of an input's name; the first that fits.
UNITS = {"_per_second": "1/s", "_seconds": "s", "_iterations": "iterations", "_hours": "h"}

_EXAMPLE: dict[str, Any] = {
    "run_id": "5f0c2a7e",
    "mode": "auto",
    "world_size": 3,
    "sizes": SIZES_EXAMPLE,
    "last_iteration": 4321,
    "iteration_seconds": 0.6,
    "phase": {"phase": 4, "first_iteration": 4000},
    "ranks": [
        {
            "rank": 0,
            "interval_iterations": 110,
            "interval_seconds": 66.0,
            "origin": "cpsr",
            "from_iteration": 4001,
        }
    ],
    "memory_interval_iterations": 5,
    "classes": CLASSES_EXAMPLE,
    "recovery_mode": "predict",
    "bound": "none",
    "inputs": [
        {
            "name": "stall_seconds",
            "value": 0.12,
            "unit": "s",
            "source": "measured",
            "samples": 8,
            "age_iterations": 331,
        }
    ],
    "rivals": [{"name": "young", "interval_iterations": 170, "cost_per_second": 0.0071, "note": ""}],
    "override": None,
    "explanation": {"rule": "least expected cost: stalls per second + failures_per_second * mean recovery"},
    "planned_unix_seconds": 1764000000.0,
    "age_seconds": 200.0,
    "newest_checkpoint": None,
    "last_recovery": None,
    "network": NETWORK_EXAMPLE,
    "ettr": ETTR_EXAMPLE,
    "descends_from_predicted": False,
    "repeated_steps": [
        {
            "rank": 0,
            "life": 1,
            "result": "checked",
            "iteration": 434,
            "message": "exact, checked over 14 repeated steps",
        }
    ],
    "warnings": [],
}

router = APIRouter(tags=["plan"])


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


class RankPlan(BaseModel):
    """The interval that one rank keeps."""

    rank: int
    interval_iterations: int
    interval_seconds: float | None = Field(description="At the median of the recent steps; null before the first step.")
    origin: str = Field(
        description="`fixed`: the configuration's; `override`: pinned for a while; else the rule that chose it."
    )
    from_iteration: int


class CurrentPhase(BaseModel):
    """The phase that the training is in."""

    phase: int = Field(description="Its number, from 0.")
    first_iteration: int


class PlanInput(BaseModel):
    """One figure that the plan was made from."""

    name: str
    value: float | str | None = Field(description="A number that is not finite is given by its name.")
    unit: str | None
    source: str | None = Field(
        description="`measured`, `prior` (nothing was measured yet) or `configured`; null: unknown."
    )
    samples: int | None = Field(description="Measurements behind it.")
    age_iterations: int | None = Field(description="Since the newest of them, now; null where it was not measured.")


class Alternative(BaseModel):
    """What another rule would choose, and what that is expected to cost by its own recovery."""

    name: str
    interval_iterations: int
    cost_per_second: float | str = Field(description="Seconds lost per second of wall time, restarts apart.")
    note: str


class PlanReply(BaseModel):
    """The current plan, why it is so, and what the current state is made of."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    run_id: str | None
    mode: str | None = Field(description="Recovery mode of the newest life.")
    world_size: int | None = Field(description="null where the run directory lacks it; `ranks` then has rank 0.")
    sizes: list[RunSize] = Field(
        description="Numbers of ranks in turn, the present one last; empty where only an older version has trained."
    )
    last_iteration: int | None
    iteration_seconds: float | None = Field(description="Median of the recent steps.")
    phase: CurrentPhase | None = Field(
        description="null where the interval is fixed or nothing was recorded of phases."
    )
    ranks: list[RankPlan]
    memory_interval_iterations: int | None = Field(
        description="Between snapshots in host memory, of which a checkpoint is one, or the length of windows; null: "
        "there are none."
    )
    classes: list[ClassPlan] = Field(description="Failures by what they leave; empty where the plan does not say.")
    recovery_mode: Literal["predict", "recompute"] | None = Field(
        description="The mode with the lower expected cost of a failure; null where the plan did not choose."
    )
    bound: str | None = Field(
        description="The bound without which another interval would have been chosen: `minimum`, `maximum` (the "
        "user's), `persist` (the disk's), `predictor`; `none`; null where the plan does not record it."
    )
    inputs: list[PlanInput]
    rivals: list[Alternative]
    override: Override | None = Field(description="The current override of the interval.")
    explanation: dict[str, Any] = Field(description="The planner's complete explanation of the plan, as recorded.")
    planned_unix_seconds: float
    age_seconds: float = Field(description="Of the plan.")
    newest_checkpoint: Checkpoint | None
    last_recovery: Recovery | None
    network: Network | None = Field(
        description="How far the predictor's network keeps pace; null where this life does not learn."
    )
    ettr: Ettr | None = Field(
        description="Effective training time ratio, and where the rest went; null in a journal of an older version."
    )
    descends_from_predicted: bool | None = Field(
        description="Whether the current state is labelled: it was predicted, or restored with older experts or from "
        "weights alone, or was trained on from such a state; null where it is not known."
    )
    repeated_steps: list[RepeatedSteps] = Field(
        description="How the steps that the newest exact restart has repeated compare with their first execution, by "
        "rank as its comparison ended; empty where none was compared."
    )
    warnings: list[str] = Field(
        description="Steps that differ from their first execution, and what could not be read and is missing above."
    )


class PastPlan(BaseModel):
    """One plan of the run, the present one included."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "from_iteration": 3000,
                    "until_iteration": 4000,
                    "phase": 3,
                    "interval_iterations": 110,
                    "memory_interval_iterations": 5,
                    "origin": "cpsr",
                    "mode": "predict",
                    "bound": "none",
                    "cost_per_second": 0.004,
                    "rival_interval_iterations": {"young": 240, "checkfreq": 61},
                    "override": None,
                    "planned_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    from_iteration: int
    until_iteration: int | None = Field(description="Where the next plan replaced it; null: it is current.")
    phase: int | None = Field(description="The phase in which it began; null where none is known.")
    interval_iterations: int
    memory_interval_iterations: int | None
    origin: str
    mode: Literal["predict", "recompute"] | None
    bound: str | None
    cost_per_second: float | str | None = Field(description="Expected seconds lost per second.")
    rival_interval_iterations: dict[str, int] = Field(description="What others would have chosen.")
    override: dict[str, Any] | None = Field(description="That it was made under.")
    planned_unix_seconds: float


class PlanHistory(BaseModel):
    """The newest plans, newest first."""

    plans: list[PastPlan]
    total: int = Field(description="In the range of time.")


@router.get("/plan", operation_id="get_plan")
def get_plan(run_dir: RunDir) -> PlanReply:
    """The current checkpoint interval of every rank, and why."""
    plan = plan_of(run_dir)
    if plan is None:
        message = f"the run in {run_dir} has not planned yet"
        raise Problem(404, "no_plan_yet", message, "the first plan is made when training starts; ask again then")
    return plan


@router.get("/plan/history", operation_id="list_plans")
def list_plans(run_dir: RunDir, window: WindowQuery) -> PlanHistory:
    """Every plan so far, with the choices of other rules at that time."""
    since, until = window.since_unix_seconds, window.until_unix_seconds
    with open_journal(run_dir) as reader:
        rows, phases = reader.newest(PlanRow, window.limit, since, until), reader.phases()
        # The next plan gives the end of a plan.
        chain = [reader.plan_after(rows[0]) if rows else None, *rows]
        plans = [_past(row, after, phases) for after, row in pairwise(chain) if row is not None]
        return PlanHistory(plans=plans, total=reader.count(PlanRow, since, until))


def plan_of(run_dir: Path) -> PlanReply | None:
    """The current plan; None where the run has not planned yet.

    Raises:
        JournalError: the journal cannot be read, or holds what this version does not know.
    """
    identity, warnings = identity_of(run_dir)
    with open_journal(run_dir) as reader:
        current = reader.latest_plan()
        if current is None:
            return None
        steps, lives, ended = reader.recent_steps(RECENT_STEPS), reader.lives(), reader.latest_phase()
        checkpoint, recovery = reader.latest_checkpoint(), reader.latest_recovery()
        repeated = [answered(RepeatedSteps, row, result=row.kind) for row in reader.newest_events(VERDICTS)]
        seconds = iteration_seconds(steps)
        last_iteration = steps[0].iteration if steps else None
        explanation = json_ready(current.explanation)
        return PlanReply(
            run_id=identity.get("run_id"),
            mode=lives[-1].mode if lives else identity.get("mode"),
            world_size=identity.get("world_size"),
            sizes=sizes_of(reader),
            last_iteration=last_iteration,
            iteration_seconds=seconds,
            phase=_current_phase(ended, explanation),
            ranks=_ranks(current, identity.get("world_size") or 1, seconds),
            memory_interval_iterations=current.memory_interval_iterations,
            classes=classes_of(explanation),
            recovery_mode=current.mode,
            bound=explanation.get("bound"),
            inputs=_inputs(explanation, max(0, (last_iteration or 0) - current.from_iteration)),
            rivals=_alternatives(explanation),
            override=_override(run_dir, current, warnings),
            explanation=explanation,
            planned_unix_seconds=current.created_unix_seconds,
            age_seconds=max(0.0, time.time() - current.created_unix_seconds),
            newest_checkpoint=None if checkpoint is None else checkpoint_of(checkpoint, run_dir),
            last_recovery=None if recovery is None else recovery_of(recovery),
            network=network_of(reader, current.life),
            ettr=ettr_of(reader, lives, life_state(reader.path, lives, steps), time.time()),
            descends_from_predicted=_descends_from_predicted(reader, recovery),
            repeated_steps=repeated,
            warnings=[one.message for one in repeated if one.result == NOT_RESTORED] + warnings,
        )


def _override(run_dir: Path, current: PlanRow, warnings: list[str]) -> Override | None:
    """The current override; an unreadable one does not prevent the answer."""
    try:
        return override_of(run_dir, current)
    except JournalError as error:
        warnings.append(f"overrides of the plan cannot be read: {error}")
        return None


def _current_phase(ended: PhaseRow | None, explanation: Mapping[str, Any]) -> CurrentPhase | None:
    if ended is not None:
        return CurrentPhase(phase=ended.phase + 1, first_iteration=ended.last_iteration)
    # A run that plans is in its first phase until that has ended.
    return CurrentPhase(phase=0, first_iteration=0) if "expected" in explanation else None


def _ranks(current: PlanRow, world_size: int, seconds: float | None) -> list[RankPlan]:
    interval = current.interval_iterations
    return [
        RankPlan(
            rank=rank,
            interval_iterations=interval,
            interval_seconds=None if seconds is None else _finite(interval * seconds),
            origin=current.origin,
            from_iteration=current.from_iteration,
        )
        for rank in range(world_size)
    ]


def _inputs(explanation: Mapping[str, Any], since_iterations: int) -> list[PlanInput]:
    """The figures of a plan that is so many iterations old."""
    origins, found = explanation.get("origins", {}), []
    for name, value in explanation.get("inputs", {}).items():
        if not isinstance(value, int | float | str):
            continue  # curves have several figures; they are in the explanation
        origin = origins.get(name, {})
        if origin.get("kind") == "measured" and not origin.get("samples"):
            origin = vars(Origin("prior"))  # as older versions wrote it
        age = origin.get("age_iterations")
        found.append(
            PlanInput(
                name=name,
                value=value,
                unit=next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), None),
                source=origin.get("kind"),
                samples=origin.get("samples"),
                age_iterations=None if age is None else age + since_iterations,
            )
        )
    return found


def _alternatives(explanation: Mapping[str, Any]) -> list[Alternative]:
    return [Alternative(name=name, **baseline) for name, baseline in explanation.get("rivals", {}).items()]


def _past(row: PlanRow, after: PlanRow | None, phases: Sequence[PhaseRow]) -> PastPlan:
    explanation = json_ready(row.explanation)
    rivals = explanation.get("rivals", {})
    return PastPlan(
        life=row.life,
        from_iteration=row.from_iteration,
        until_iteration=None if after is None else after.from_iteration,
        phase=_phase_at(row.from_iteration, phases),
        interval_iterations=row.interval_iterations,
        memory_interval_iterations=row.memory_interval_iterations,
        origin=row.origin,
        mode=row.mode,
        bound=explanation.get("bound"),
        cost_per_second=explanation.get("expected", {}).get("cost_per_second"),
        rival_interval_iterations={name: baseline["interval_iterations"] for name, baseline in rivals.items()},
        override=explanation.get("override"),
        planned_unix_seconds=row.created_unix_seconds,
    )


def _phase_at(iteration: int, phases: Sequence[PhaseRow]) -> int | None:
    if not phases:
        return None
    ended = [phase.phase for phase in phases if phase.last_iteration <= iteration]
    return ended[-1] + 1 if ended else phases[0].phase


def _descends_from_predicted(reader: JournalReader, recovery: RecoveryRow | None) -> bool | None:
    """Whether the present state descends from a predicted one."""
    if recovery is None or recovery.beginning is Beginning.SCRATCH:
        return False
    newest = reader.latest_checkpoint()
    if newest is not None and _is_of(newest, recovery):
        return newest.origin == "predicted"
    if recovery.labelled:
        return True
    if _was_in_memory(recovery):
        return _descended_before(reader, recovery)
    start = _start(recovery)
    checkpoint = None if start is None else reader.latest_checkpoint(start)
    return None if checkpoint is None else checkpoint.origin == "predicted"


def _descended_before(reader: JournalReader, recovery: RecoveryRow) -> bool:
    """Whether the state that a recovery found in memory descended from a predicted one of an earlier life."""
    for earlier in reader.recoveries_before(recovery.life):
        start = _start(earlier)
        if start is not None:
            committed = reader.committed_in(earlier.life, start + 1, recovery.restored_iteration + 1)
            if committed is not None:
                return committed.origin == "predicted"
        if earlier.labelled:
            return True
        if not _was_in_memory(earlier):
            return start is not None and reader.is_predicted(start)
    return False


def _was_in_memory(recovery: RecoveryRow) -> bool:
    """Whether the state came from memory, not from a checkpoint, and was not given up."""
    return not recovery.given_up and any(source.source in ("memory", "departure") for source in recovery.sources)


def _start(recovery: RecoveryRow) -> int | None:
    """Where training continued: at the checkpoint, if a predicted state was given up."""
    return recovery.checkpoint_iteration if recovery.given_up else recovery.restored_iteration


def _is_of(checkpoint: CheckpointRow, recovery: RecoveryRow) -> bool:
    """Whether a checkpoint was taken of a descendant of this life's first state."""
    start = _start(recovery)
    return checkpoint.life == recovery.life and start is not None and checkpoint.iteration > start


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
