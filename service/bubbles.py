"""Bubbles: how long the ranks' training threads waited, and the work done meanwhile."""

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import BubbleRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["BubbleList", "BubbleUse", "router"]

router = APIRouter(tags=["bubbles"])


class BubbleUse(BaseModel):
    """One rank's waits since its row before."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "rank": 1,
                    "iteration": 4200,
                    "iterations": 100,
                    "seconds": 62.1,
                    "bubble_seconds": 21.4,
                    "used_seconds": 9.8,
                    "late_seconds": 0.02,
                    "outside_seconds": 0.0,
                    "slices": 2100,
                    "late_slices": 4,
                    "copied_seconds": 1.3,
                    "copied_bytes": 3_900_000_000,
                    "copied_beside_bytes": 300_000_000,
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    rank: int
    iteration: int
    iterations: int = Field(description="Step boundaries that the row covers.")
    seconds: float = Field(description="Wall time that it covers.")
    bubble_seconds: float = Field(description="Time for which the training thread waited.")
    used_seconds: float = Field(description="The predictor's work inside of waits.")
    late_seconds: float = Field(description="From the end of a wait to the end of work that was let into it.")
    outside_seconds: float = Field(description="Work that began outside.")
    slices: int = Field(description="Pieces of work.")
    late_slices: int = Field(description="Those that ran past the end of their wait.")
    copied_seconds: float | None = Field(
        description="Copying of snapshots inside of waits; null where this rank's copies do not use waits."
    )
    copied_bytes: int | None = Field(description="Copied in that time.")
    copied_beside_bytes: int | None = Field(description="Of the same, copied beside the training's work.")
    created_unix_seconds: float


class BubbleList(BaseModel):
    """The newest rows of all ranks, newest first."""

    bubbles: list[BubbleUse]
    total: int = Field(description="In the range of time.")


@router.get("/bubbles", operation_id="list_bubbles")
def list_bubbles(run_dir: RunDir, window: WindowQuery) -> BubbleList:
    """Waits of the training threads of all ranks, and the work done in them; empty where none waited."""
    rows, total = newest(run_dir, BubbleRow, lambda row: answered(BubbleUse, row), window)
    return BubbleList(bubbles=rows, total=total)
