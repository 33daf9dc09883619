"""`GET /runs`: the runs of the service."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from cpsr.service.health import LifeState, health_of
from cpsr.service.identity import identity_of
from cpsr.service.parameters import LIMIT_DEFAULT, LIMIT_MAX
from cpsr.service.runs import Runs

__all__ = ["RunList", "RunSummary", "router"]

router = APIRouter(tags=["runs"])


class RunSummary(BaseModel):
    """One run, and its health."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "gpt",
                    "run_id": "5f0c2a7e",
                    "world_size": 8,
                    "status": "ok",
                    "reason": None,
                    "life": "running",
                    "journal_age_seconds": 1.5,
                    "last_iteration": 4200,
                }
            ]
        }
    )

    name: str = Field(description="For the parameter `run` of every other operation.")
    run_id: str | None
    world_size: int | None
    status: str = Field(description="As in `/healthz`.")
    reason: str | None
    life: LifeState | None
    journal_age_seconds: float | None
    last_iteration: int | None


class RunList(BaseModel):
    """The runs of this service, by name."""

    runs: list[RunSummary]
    total: int


@router.get("/runs", operation_id="list_runs")
def list_runs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="At most so many.")] = LIMIT_DEFAULT,
) -> RunList:
    """The runs that can be asked about."""
    runs: Runs = request.app.state.runs
    names = runs.names()
    return RunList(runs=[_summary(name, runs.find(name)) for name in names[:limit]], total=len(names))


def _summary(name: str, run_dir: Path) -> RunSummary:
    identity, _ = identity_of(run_dir)
    health = health_of(run_dir)
    return RunSummary(
        name=name,
        run_id=identity.get("run_id"),
        world_size=identity.get("world_size"),
        **health.model_dump(),
    )
