"""The run of a service: its journal, its identity and its health."""

import json
import math
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from cpsr.errors import JournalError
from cpsr.journal import CheckpointRow, JournalReader, LifeRow, StepRow, json_ready
from cpsr.ranks.slow_ranks import Pace, read_paces

__all__ = [
    "LIMIT_MAX",
    "RECENT_STEPS",
    "Health",
    "RunDir",
    "health_of",
    "iteration_seconds",
    "open_journal",
    "paces_of",
    "plain_row",
    "router",
    "run_id_of",
]

LIMIT_MAX = 1000
RECENT_STEPS = 101  # enough that the median ignores the steps that a checkpoint or a cold start made slow
# A journal that is written every few dozen iterations is late after this many, or after two minutes for fast steps.
STALE_ITERATIONS = 200
STALE_SECONDS = 120.0

LifeState = Literal["running", "silent", "killed", "clean", "sigterm", "error"]

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """Whether the run is visible, and its health as its journal shows it."""

    status: Literal["ok", "degraded"]
    reason: str | None = Field(description="Why it is degraded.")
    life: LifeState | None = Field(
        description="Of the newest life: `running`; `silent`, not heard of for too long; `killed`; or how it "
        "ended: `clean`, `sigterm`, `error`. null where there is none."
    )
    journal_age_seconds: float | None = Field(description="Since the journal was last written; null without one.")
    last_iteration: int | None


def _run_dir(request: Request) -> Path:
    run_dir: Path = request.app.state.run_dir
    return run_dir


RunDir = Annotated[Path, Depends(_run_dir)]


@router.get("/healthz", operation_id="get_health", response_model=Health, responses={503: {"model": Health}})
def get_health(run_dir: RunDir) -> JSONResponse:
    """Health of the run: 200, or 503 with the reason."""
    health = health_of(run_dir)
    status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(health.model_dump(mode="json"), status)


def open_journal(run_dir: Path) -> JournalReader:
    """The journal of a run, for reading alone; close it, or use it as a context manager.

    Raises:
        JournalError: it cannot be read.
    """
    return JournalReader(run_dir / "journal.db")


def plain_row(row: Any) -> dict[str, Any]:
    """A row as data that JSON takes; numbers that are not finite are given by their names."""
    plain: dict[str, Any] = json_ready(asdict(row))
    return plain


def run_id_of(run_dir: Path) -> str | None:
    """The run's name of itself in `run.json`; None where it cannot be read."""
    try:
        return str(json.loads((run_dir / "run.json").read_bytes())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def health_of(run_dir: Path) -> Health:
    """Judge the run by its journal; never raises for a journal that cannot be read."""
    path = run_dir / "journal.db"
    try:
        age_seconds = _age_seconds(path)
        with JournalReader(path) as reader:
            lives, steps, checkpoints = (
                reader.lives(),
                reader.recent_steps(RECENT_STEPS),
                reader.newest(CheckpointRow, 1),
            )
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


def paces_of(run_dir: Path, lives: Sequence[LifeRow]) -> list[Pace]:
    """The newest own times of all ranks; empty where the newest life has ended, or has compared none."""
    return read_paces(run_dir, lives[-1].life) if lives and lives[-1].ending == "running" else []


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
