"""Rehearsals: recoveries that the running job tested."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import RehearsalRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["Rehearsal", "RehearsalList", "router"]

router = APIRouter(tags=["rehearsals"])


class Rehearsal(BaseModel):
    """A recovery that was rehearsed in the running job."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "7c1d2e",
                    "life": 0,
                    "iteration": 4260,
                    "failure_iteration": 4200,
                    "checkpoint_iteration": 4140,
                    "outcome": "measured",
                    "reason": "",
                    "method": "line",
                    "settings": {"window_iterations": 100},
                    "guard": {},
                    "lag_iterations": -8.0,
                    "lag_standard_error_iterations": 5.0,
                    "cost_seconds": 9.5,
                    "cost_iterations": 61.0,
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    id: str
    life: int
    iteration: int
    failure_iteration: int
    checkpoint_iteration: int
    outcome: Literal["running", "measured", "refused", "diverged", "failed"]
    reason: str
    method: str
    settings: dict[str, Any]
    guard: dict[str, Any]
    lag_iterations: float | None = Field(
        description="How far behind the rehearsed run was over the second half of its iterations; negative: ahead."
    )
    lag_standard_error_iterations: float | None
    cost_seconds: float | None = Field(description="How long training waited for it.")
    cost_iterations: float | None
    created_unix_seconds: float


class RehearsalList(BaseModel):
    """The newest rehearsals, newest first."""

    rehearsals: list[Rehearsal]
    total: int = Field(description="In the range of time.")


@router.get("/rehearsals", operation_id="list_rehearsals")
def list_rehearsals(run_dir: RunDir, window: WindowQuery) -> RehearsalList:
    """Recoveries that were rehearsed, with the lag that they showed."""
    rows, total = newest(run_dir, RehearsalRow, lambda row: answered(Rehearsal, row), window)
    return RehearsalList(rehearsals=rows, total=total)
