"""Health of a run, and whether the service can answer about it."""

import math
import socket
import statistics
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import psutil
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from cpsr.errors import JournalError
from cpsr.journal import CheckpointRow, JournalReader, LifeRow, StepRow
from cpsr.service.parameters import RunDir

__all__ = ["RECENT_STEPS", "Health", "LifeState", "Readiness", "health_of", "iteration_seconds", "life_state", "router"]

RECENT_STEPS = 101  # enough that the median ignores the steps that a checkpoint or a cold start made slow
# A journal that is written every few dozen iterations is late after this many, or after two minutes for fast steps.
STALE_ITERATIONS = 200
STALE_SECONDS = 120.0

LifeState = Literal["running", "silent", "killed", "clean", "sigterm", "error"]

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """Whether the run is visible, and its health as its journal shows it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "status": "ok",
                    "reason": None,
                    "life": "running",
                    "journal_age_seconds": 1.5,
                    "last_iteration": 4200,
                }
            ]
        }
    )

    status: Literal["ok", "degraded"]
    reason: str | None = Field(description="Why it is degraded.")
    life: LifeState | None = Field(
        description="Of the newest life: `running`; `silent`, not heard of for too long; `killed`; or how it "
        "ended: `clean`, `sigterm`, `error`. null where there is none."
    )
    journal_age_seconds: float | None = Field(description="Since the journal was last written; null without one.")
    last_iteration: int | None


class Readiness(BaseModel):
    """Whether the service can answer about the run, healthy or not."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ready": True, "reason": None}]})

    ready: bool
    reason: str | None = Field(description="Why it cannot.")


@router.get("/healthz", operation_id="get_health", response_model=Health, responses={503: {"model": Health}})
def get_health(run_dir: RunDir) -> JSONResponse:
    """Health of the run: 200, or 503 with the reason."""
    health = health_of(run_dir)
    status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(health.model_dump(mode="json"), status)


@router.get("/readyz", operation_id="get_readiness", response_model=Readiness, responses={503: {"model": Readiness}})
def get_readiness(run_dir: RunDir) -> JSONResponse:
    """Whether the run's journal can be read: 200, or 503 with the reason."""
    try:
        with JournalReader(run_dir / "journal.db") as reader:
            reader.meta()
    except JournalError as error:
        unready = Readiness(ready=False, reason=str(error))
        return JSONResponse(unready.model_dump(), HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse(Readiness(ready=True, reason=None).model_dump())


def health_of(run_dir: Path) -> Health:
    """Judge the run by its journal; never raises for a journal that cannot be read."""
    path = run_dir / "journal.db"
    try:
        age_seconds = _age_seconds(path)
        with JournalReader(path) as reader:
            lives, steps = reader.lives(), reader.recent_steps(RECENT_STEPS)
            checkpoints = reader.recent_checkpoints(1)
    except (JournalError, OSError) as error:
        return Health(status="degraded", reason=str(error), life=None, journal_age_seconds=None, last_iteration=None)
    stale_seconds = _stale_seconds(steps)
    state = _state(lives[-1], age_seconds > stale_seconds) if lives else None
    reason = _trouble(lives, state, checkpoints, f"{age_seconds:.0f} s ago, more than {stale_seconds:.0f} s")
    return Health(
        status="degraded" if reason else "ok",
        reason=reason,
        life=state,
        journal_age_seconds=age_seconds,
        last_iteration=steps[0].iteration if steps else None,
    )


def life_state(path: Path, lives: Sequence[LifeRow], steps: Sequence[StepRow]) -> LifeState | None:
    """How the newest life stands; None where there is none.

    Args:
        path: of the journal.
        lives: oldest first.
        steps: the recent ones.

    Raises:
        OSError: the file cannot be reached.
    """
    return _state(lives[-1], _age_seconds(path) > _stale_seconds(steps)) if lives else None


def iteration_seconds(steps: Sequence[StepRow]) -> float | None:
    """Median of some steps; None where there are none, or it is not known."""
    median = statistics.median(step.seconds for step in steps) if steps else math.nan
    return median if math.isfinite(median) else None


def _stale_seconds(steps: Sequence[StepRow]) -> float:
    return max(STALE_SECONDS, STALE_ITERATIONS * (iteration_seconds(steps) or 0.0))


def _state(life: LifeRow, stale: bool) -> LifeState:
    if life.ending != "running":
        return life.ending
    if life.host == socket.gethostname() and not psutil.pid_exists(life.pid):
        return "killed"
    return "silent" if stale else "running"


def _trouble(
    lives: list[LifeRow], state: LifeState | None, checkpoints: list[CheckpointRow], written: str
) -> str | None:
    if state is None:
        return "the journal holds no life of the run yet"
    life = lives[-1]
    if state == "error":
        return f"life {life.life} ended with an error"
    if state == "killed":
        return f"life {life.life} was killed: its process {life.pid} is gone and no later life has started"
    if state == "silent":
        return f"the journal was last written {written}"
    if checkpoints and checkpoints[0].status == "failed":
        return f"the checkpoint at iteration {checkpoints[0].iteration} failed: {checkpoints[0].reason}"
    return None


def _age_seconds(path: Path) -> float:
    written = path.stat().st_mtime
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        written = max(written, wal.stat().st_mtime)
    # Another host's clock may be ahead.
    return max(0.0, time.time() - written)
