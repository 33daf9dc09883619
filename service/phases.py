"""Phases of the training that have ended."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, open_journal

__all__ = ["Phase", "PhaseList", "router"]

router = APIRouter(tags=["phases"])


class Phase(BaseModel):
    """One phase that has ended."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "phase": 3,
                    "first_iteration": 3000,
                    "last_iteration": 4000,
                    "xi": 1.2e-9,
                    "last_xi": 1.1e-9,
                    "ended_by": "change",
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    phase: int = Field(description="Its number, from 0.")
    first_iteration: int
    last_iteration: int
    xi: float | None = Field(description="Mean second moment of the gradients at its beginning.")
    last_xi: float | None
    ended_by: Literal["change", "length"]
    created_unix_seconds: float


class PhaseList(BaseModel):
    """The newest phases, newest first."""

    phases: list[Phase]
    total: int = Field(description="In the range of time.")


@router.get("/phases", operation_id="list_phases")
def list_phases(run_dir: RunDir, window: WindowQuery) -> PhaseList:
    """Phases that have ended; one that ended again after a restart is listed once, as it ended last."""
    with open_journal(run_dir) as reader:
        listed = [answered(Phase, row) for row in reversed(reader.phases()) if window.holds(row.created_unix_seconds)]
    return PhaseList(phases=listed[: window.limit], total=len(listed))
