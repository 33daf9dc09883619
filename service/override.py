"""Overrides: an interval that temporarily replaces the planner's."""

import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cpsr.journal import PlanOverride, PlanRow, latest_override, override_plan
from cpsr.service.access import MayWrite
from cpsr.service.parameters import RunDir
from cpsr.service.problems import Problem

__all__ = ["Override", "OverrideRequest", "override_of", "router"]

INTERVAL_MAX_ITERATIONS = 2**31  # as the planner's
HOUR_SECONDS = 3600.0
LONGEST_SECONDS = 30 * 24 * HOUR_SECONDS  # a longer override belongs into the configuration

router = APIRouter(tags=["plan"])


def _given(name: str, without: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema of an object in which one number is given, and others are not."""
    absent = {other: {"type": "null"} for other in without}
    return {"required": [name], "properties": {name: {"type": "integer"}, **absent}}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# In JSON 25.0 is an integer, too; true and "25" are not.
Iterations = Annotated[int, Field(ge=1, le=INTERVAL_MAX_ITERATIONS), BeforeValidator(_whole)]


class OverrideRequest(BaseModel):
    """What `PUT /plan/override` takes: one interval, or a bound or two."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # true is no number
        json_schema_extra={
            "examples": [
                {"interval_iterations": 50, "expires_in_seconds": 7200, "reason": "the cooling is being repaired"},
                {"interval_max_iterations": 100, "reason": "spot prices are rising"},
            ],
            "anyOf": [
                _given("interval_iterations", without=("interval_min_iterations", "interval_max_iterations")),
                _given("interval_min_iterations", without=("interval_iterations",)),
                _given("interval_max_iterations", without=("interval_iterations",)),
            ],
        },
    )

    interval_iterations: Iterations | None = Field(default=None, description="Pins it.")
    interval_min_iterations: Iterations | None = None
    interval_max_iterations: Iterations | None = None
    expires_in_seconds: float = Field(
        default=HOUR_SECONDS, gt=0, le=LONGEST_SECONDS, allow_inf_nan=False, description="It ends by itself."
    )
    reason: str = Field(min_length=1, max_length=1000, description="Explains the override to readers of the plan.")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "OverrideRequest":
        low, high = self.interval_min_iterations, self.interval_max_iterations
        bounded = low is not None or high is not None
        if bounded == (self.interval_iterations is not None):
            raise ValueError("give either interval_iterations, or interval_min_iterations and interval_max_iterations")
        if low is not None and high is not None and low > high:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


class Override(BaseModel):
    """The requested interval, and whether the current plan uses it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": 3,
                    "interval_min_iterations": 50,
                    "interval_max_iterations": 50,
                    "reason": "the cooling is being repaired",
                    "expires_unix_seconds": 1764003600.0,
                    "created_unix_seconds": 1764000000.0,
                    "taken_up": True,
                }
            ]
        }
    )

    id: int
    interval_min_iterations: int | None
    interval_max_iterations: int | None
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float
    taken_up: bool = Field(
        description="Whether the job applies it, at a step boundary about a second after the request. A job without "
        "a measured checkpoint applies it after its first one."
    )


@router.put("/plan/override", operation_id="override_plan", dependencies=[MayWrite])
def put_override(run_dir: RunDir, request: OverrideRequest) -> Override:
    """Pin or bound the interval for a while, within the configured bounds; the newest override counts."""
    pin, now = request.interval_iterations, time.time()
    override = PlanOverride(
        interval_min_iterations=request.interval_min_iterations if pin is None else pin,
        interval_max_iterations=request.interval_max_iterations if pin is None else pin,
        reason=request.reason,
        expires_unix_seconds=now + request.expires_in_seconds,
        created_unix_seconds=now,
    )
    return _answer(override, override_plan(run_dir, override), taken_up=False)


@router.delete("/plan/override", operation_id="withdraw_override", dependencies=[MayWrite])
def delete_override(run_dir: RunDir) -> Override:
    """End the current override early; answers with the one that was ended."""
    current = override_of(run_dir, None)
    if current is None:
        raise Problem(404, "no_override", "no override is in force", "GET /plan has the current plan")
    now = time.time()
    withdrawal = PlanOverride(
        interval_min_iterations=None,
        interval_max_iterations=None,
        reason="withdrawn",
        expires_unix_seconds=now,
        created_unix_seconds=now,
    )
    override_plan(run_dir, withdrawal)
    return current


def override_of(run_dir: Path, plan: PlanRow | None) -> Override | None:
    """The current override; None where there is none.

    Args:
        run_dir: of the run.
        plan: the current one.

    Raises:
        JournalError: the commands cannot be read.
    """
    override = latest_override(run_dir)
    if override is None or not override.holds(time.time()):
        return None
    applied = None if plan is None else plan.explanation.get("override")
    taken_up = isinstance(applied, dict) and applied.get("id") == override.id
    return _answer(override, override.id, taken_up)


def _answer(override: PlanOverride, number: int, taken_up: bool) -> Override:
    return Override(
        id=number,
        interval_min_iterations=override.interval_min_iterations,
        interval_max_iterations=override.interval_max_iterations,
        reason=override.reason,
        expires_unix_seconds=override.expires_unix_seconds,
        created_unix_seconds=override.created_unix_seconds,
        taken_up=taken_up,
    )
