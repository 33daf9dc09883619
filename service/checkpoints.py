"""Checkpoints: what became of each that was due, and what of it is on the disk now."""

from pathlib import Path
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.checkpoint.manifest import COMMIT, THINNED, step_name
from cpsr.journal import CheckpointRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["Checkpoint", "CheckpointList", "checkpoint_of", "router"]

router = APIRouter(tags=["checkpoints"])

Held = Literal["whole", "weights", "none"]


class Checkpoint(BaseModel):
    """One checkpoint that was due."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "iteration": 4200,
                    "status": "committed",
                    "reason": "",
                    "bytes": 4_200_000_000,
                    "stall_seconds": 0.12,
                    "write_seconds": 3.1,
                    "commit_seconds": 0.4,
                    "origin": "trained",
                    "verified": True,
                    "on_disk": "whole",
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    iteration: int
    status: Literal["committed", "skipped", "failed"]
    reason: str
    bytes: int | None = Field(description="Of all ranks' files together.")
    stall_seconds: float | None
    write_seconds: float | None
    commit_seconds: float | None
    origin: Literal["trained", "predicted"] = Field(
        description="`predicted`: its state, or one that it was trained from, was predicted."
    )
    verified: bool = Field(description="Whether every file was read back and compared when it was written.")
    on_disk: Held = Field(
        description="Of a checkpoint of this iteration in the run directory now: `whole`, training can restart from "
        "it; `weights`, kept for the predictor alone; `none`. Copies in host memory and at a target are not seen here.",
    )
    created_unix_seconds: float


class CheckpointList(BaseModel):
    """The newest checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    total: int = Field(description="In the range of time.")


@router.get("/checkpoints", operation_id="list_checkpoints")
def list_checkpoints(run_dir: RunDir, window: WindowQuery) -> CheckpointList:
    """Checkpoints that were due: sizes, times, and what is left of them."""
    rows, total = newest(run_dir, CheckpointRow, lambda row: checkpoint_of(row, run_dir), window)
    return CheckpointList(checkpoints=rows, total=total)


def checkpoint_of(row: CheckpointRow, run_dir: Path) -> Checkpoint:
    """A checkpoint, with what the run directory holds of it."""
    committed = row.status == "committed"
    # Nothing is committed before every file was read back.
    held = _held(run_dir, row.iteration) if committed else "none"
    return answered(Checkpoint, row, verified=committed, on_disk=held)


def _held(run_dir: Path, iteration: int) -> Held:
    step = run_dir / "checkpoints" / step_name(iteration)
    if step.is_symlink() or not (step / COMMIT).is_file():
        return "none"
    return "weights" if (step / THINNED).exists() else "whole"
