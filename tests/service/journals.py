"""Journals for the service's tests, written by the job's own writer."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cpsr.journal import (
    CheckpointRow,
    EventRow,
    FailureRow,
    FailureScope,
    FitRow,
    Journal,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
)
from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, PlannerInputs
from cpsr.planner.plan import Plan
from cpsr.planner.planning import make_plan
from cpsr.planner.recovery_curve import EndCostCurve

FLUSH_SECONDS = 20.0
LIMITS = Limits(10, 500)
YOUNG = make_plan(PlannerInputs(1.5, 0.5, 3.0, 1 / 43200), LIMITS, policy="young")
LINE = EndCostCurve(-20.0, 0.5, 0.1, 10.0, "the offline prior")


def measured_inputs(mtbf_seconds: float = 43200.0, stall_seconds: float = 0.5, persist_seconds: float = 3.0) -> Any:
    """Of a job that has measured itself and can predict."""
    return PlannerInputs(1.5, stall_seconds, persist_seconds, 1 / mtbf_seconds, LINE)


def measured_plan() -> Plan:
    return make_plan(measured_inputs(), LIMITS)


def two_tier_plan() -> Plan:
    """Of a job with snapshots in host memory, and with replicas of them, that has failed once."""
    classes: dict[FailureScope, FailureClass] = {
        "process": FailureClass(0.6, 0.3, 1),
        "machine": FailureClass(0.35, 0.6),
        "everything": FailureClass(0.05, 0.1),
    }
    memory = MemoryTier(0.004, None, 2.0)
    return make_plan(replace(measured_inputs(), recovery=None, classes=classes, memory=memory), LIMITS)


def plan_row(plan: Plan = YOUNG, **changes: Any) -> PlanRow:
    values: dict[str, Any] = {
        "life": 0,
        "from_iteration": 20,
        "interval_iterations": plan.interval_iterations,
        "origin": plan.origin,
        "memory_interval_iterations": plan.memory_interval_iterations,
        "mode": plan.mode,
        "explanation": plan.explanation,
    }
    return PlanRow(**(values | changes))


def record_steps(journal: Journal, seconds: float = 1.5, last: int = 7) -> None:
    journal.record(
        *[StepRow(life=0, iteration=i, loss=2.0, learning_rate=1e-3, seconds=seconds) for i in range(1, last + 1)]
    )


def recovery_row(**changes: Any) -> RecoveryRow:
    values: dict[str, Any] = {
        "id": f"recovery-{time.monotonic_ns()}",
        "life": 0,
        "failure_iteration": 92,
        "checkpoint_iteration": 50,
        "restored_iteration": 92,
        "method": "line",
        "requested_mode": "predict",
        "guard": {"probe_loss_nats": math.nan},
        "sources": (RecoverySource(rank=1, source="disk", iteration=50),),
    }
    return RecoveryRow(**(values | changes))


# One row of each kind that has a type of its own, but lives.
ROWS: tuple[Any, ...] = (
    CheckpointRow(life=0, iteration=50, status="committed", bytes=100),
    FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed", created_unix_seconds=100.0),
    recovery_row(),
    PhaseRow(life=0, phase=0, first_iteration=0, last_iteration=100, xi=1.0, last_xi=math.nan, ended_by="change"),
    FitRow(life=0, iteration=100, kind="loss", result={"alpha2": math.inf}),
    plan_row(),
)


def record_event(journal: Journal, message: str) -> None:
    journal.record(EventRow(life=0, rank=0, kind="test", message=message))


class Answer(Protocol):
    """A response of httpx, or of its successor, with which Starlette's TestClient asks where that is installed."""

    @property
    def status_code(self) -> int: ...

    @property
    def text(self) -> str: ...

    def json(self) -> Any: ...


def error_of(response: Answer, status: int) -> dict[str, str]:
    """The answer, where it is the one form of a refusal."""
    assert response.status_code == status, response.text
    body: dict[str, str] = response.json()
    assert set(body) == {"code", "message", "hint"}
    assert all(body.values())
    return body


def flushed(journal: Journal) -> None:
    assert journal.flush(FLUSH_SECONDS)


def new_run(directory: Path) -> Path:
    """A run of which nothing but a plan is recorded."""
    journal = Journal.open(directory / "journal.db")
    journal.start_life("auto")
    journal.record(plan_row())
    journal.close()
    return directory
