"""Checkpoints: the result of each due checkpoint, and where it is now."""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import CheckpointRow
from cpsr.service.copies import Copies, Copy, OnDisk, kept_on_disk
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, open_journal

__all__ = ["Checkpoint", "CheckpointList", "ListedCheckpoint", "checkpoint_of", "router"]

router = APIRouter(tags=["checkpoints"])

_EXAMPLE: dict[str, Any] = {
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
_DISK: dict[str, Any] = {"tier": "disk", "holds": "whole", "bytes": 4_200_000_000, "verified": True}
_DISK |= {"ranks": None, "copied_unix_seconds": None}
_MEMORY: dict[str, Any] = {
    "tier": "memory",
    "holds": "whole",
    "bytes": 2_100_000_000,
    "verified": False,
    "ranks": [0, 1],
}
_MEMORY |= {"copied_unix_seconds": None}


class Checkpoint(BaseModel):
    """One checkpoint that was due."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    life: int
    iteration: int
    status: Literal["committed", "skipped", "failed"]
    reason: str
    bytes: int | None = Field(description="Of all ranks' files together.")
    stall_seconds: float | None
    write_seconds: float | None
    commit_seconds: float | None
    origin: Literal["trained", "predicted"] = Field(
        description="`predicted`: its state, or one that it was trained from, was predicted, or restored with "
        "older experts or from weights alone."
    )
    verified: bool = Field(description="Whether every file was read back and compared when it was written.")
    on_disk: OnDisk = Field(
        description="Of a checkpoint of this iteration in the run directory now: `whole`, training can restart from "
        "it; `weights`, kept for the predictor, and for a restart without any whole one; `none`.",
    )
    created_unix_seconds: float


class ListedCheckpoint(Checkpoint):
    """One checkpoint that was due, and where it is now."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE | {"copies": [_DISK, _MEMORY]}]})

    copies: list[Copy] = Field(description="Every place where it is known to be.")


class CheckpointList(BaseModel):
    """The newest checkpoints, newest first."""

    checkpoints: list[ListedCheckpoint]
    total: int = Field(description="In the range of time.")
    memory_seen: bool = Field(
        description="Whether host memory was looked into: that of one machine, where rank 0 and the service both run."
    )


@router.get("/checkpoints", operation_id="list_checkpoints")
def list_checkpoints(run_dir: RunDir, window: WindowQuery) -> CheckpointList:
    """Checkpoints that were due: sizes, times, and where they are."""
    since, until = window.since_unix_seconds, window.until_unix_seconds
    with open_journal(run_dir) as reader:
        rows = reader.newest(CheckpointRow, window.limit, since, until)
        copies = Copies(run_dir, reader, rows)
        return CheckpointList(
            checkpoints=[_listed(row, copies) for row in rows],
            total=reader.count(CheckpointRow, since, until),
            memory_seen=copies.memory_seen,
        )


def checkpoint_of(row: CheckpointRow, run_dir: Path) -> Checkpoint:
    """A checkpoint, with its present content in the run directory."""
    kept = kept_on_disk(run_dir, row.iteration) if row.status == "committed" else "none"
    return answered(Checkpoint, row, verified=_verified(row), on_disk=kept)


def _listed(row: CheckpointRow, copies: Copies) -> ListedCheckpoint:
    return answered(ListedCheckpoint, row, verified=_verified(row), on_disk=copies.on_disk(row), copies=copies.of(row))


def _verified(row: CheckpointRow) -> bool:
    return row.status == "committed"  # a checkpoint is verified once every file was read back
