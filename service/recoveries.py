"""Recoveries: how lives of the run began, and roll-backs inside them."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import RecoveryRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["Recovery", "RecoveryList", "recovery_of", "router"]

router = APIRouter(tags=["recoveries"])


class Recovery(BaseModel):
    """One restoration."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "0b9f4a",
                    "life": 1,
                    "failure_iteration": 4321,
                    "checkpoint_iteration": 4200,
                    "restored_iteration": 4321,
                    "method": "line",
                    "requested_mode": "auto",
                    "feasible": ["predicted", "exact"],
                    "outcome": "kept",
                    "labelled": True,
                    "expected_end_cost_iterations": 55.0,
                    "reason": "121 iterations past the checkpoint",
                    "settings": {"window_iterations": 100, "expected_deviation_iterations": 20.0},
                    "guard": {"lag": {"lag_iterations": 12.0, "standard_error_iterations": 8.0}},
                    "sources": [{"rank": 0, "source": "disk", "iteration": 4200}],
                    "load_seconds": 1.2,
                    "predict_seconds": 0.8,
                    "inject_seconds": 0.1,
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    id: str
    life: int
    failure_iteration: int | None = Field(description="null where the run continued without a failure.")
    checkpoint_iteration: int | None
    restored_iteration: int
    method: str = Field(
        description="`exact`; `departure`: an emergency dump of all ranks; `stale`: exact but for experts "
        "that were saved before the checkpoint; `weights`: the weights of the checkpoint alone, with an optimizer that "
        "began anew; else the name of what predicted it: `line`, or `vitp` (a turned line)."
    )
    requested_mode: str
    feasible: list[str] = Field(description="Methods that could have been taken.")
    outcome: Literal["kept", "vetoed", "rolled_back", "watching"]
    labelled: bool = Field(description="Whether checkpoints taken from there on are labelled `predicted`.")
    expected_end_cost_iterations: float | None = Field(
        description="Of a prediction: the gap in the final loss, in iterations of equal worth. Recomputing costs "
        "failure_iteration - checkpoint_iteration. settings.expected_deviation_iterations is its standard deviation."
    )
    reason: str
    settings: dict[str, Any]
    guard: dict[str, Any] = Field(
        description="What the guard measured; `lag`, after 60 to 160 iterations, once the losses have given it."
    )
    sources: list[dict[str, Any]] = Field(description="Where each rank's state came from.")
    load_seconds: float | None
    predict_seconds: float | None
    inject_seconds: float | None
    created_unix_seconds: float


class RecoveryList(BaseModel):
    """The newest recoveries, newest first."""

    recoveries: list[Recovery]
    total: int = Field(description="In the range of time.")


@router.get("/recoveries", operation_id="list_recoveries")
def list_recoveries(run_dir: RunDir, window: WindowQuery) -> RecoveryList:
    """How lives began after a failure, with the source of every rank's state, the guard, and what it cost."""
    rows, total = newest(run_dir, RecoveryRow, recovery_of, window)
    return RecoveryList(recoveries=rows, total=total)


def recovery_of(row: RecoveryRow) -> Recovery:
    """The answer to a row."""
    return answered(Recovery, row, labelled=row.labelled)
