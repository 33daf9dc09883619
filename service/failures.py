"""Failures: those that the job detected, and those that people report."""

import math
import time
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.errors import TooManyReportsError
from cpsr.journal import FailureRow, FailureScope, ReportedFailure, report_failure, reported_failures
from cpsr.service.access import MayWrite
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.problems import Problem
from cpsr.service.rows import open_journal

__all__ = ["Failure", "FailureList", "FailureReport", "router"]

CLOCKS_SECONDS = 60.0  # by which a reporter's clock may be ahead

router = APIRouter(tags=["failures"])


class Failure(BaseModel):
    """A failure of the run."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "iteration": 4321,
                    "checkpoint_iteration": 4200,
                    "description": "rank 1 was killed (SIGKILL)",
                    "failed_unix_seconds": 1764000000.0,
                    "reported": False,
                    "scope": "process",
                }
            ]
        }
    )

    iteration: int | None = Field(description="null where it was reported and no restart shows it.")
    checkpoint_iteration: int | None
    description: str
    failed_unix_seconds: float
    reported: bool = Field(description="Whether it was reported, or the job detected it.")
    scope: FailureScope | None = Field(
        default=None,
        description="What it left: `process`: the memory of every machine; `machine`: replicas of what was lost with "
        "one; `everything`: the disk alone. null where it was not recorded, or was reported.",
    )


class FailureReport(BaseModel):
    """Body of `POST /failures`: a failure without a restart of this job."""

    model_config = ConfigDict(extra="forbid", strict=True)  # true is no number

    description: str = Field(min_length=1, max_length=1000, examples=["node 17 lost two GPUs; the spare took over"])
    failed_unix_seconds: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="When; by default now."
    )


class FailureList(BaseModel):
    """The newest failures, newest first."""

    failures: list[Failure]
    total: int = Field(description="In the range of time.")


@router.get("/failures", operation_id="list_failures")
def list_failures(run_dir: RunDir, window: WindowQuery) -> FailureList:
    """Failures that the job detected, and reported ones, newest first."""
    listed = [one for one in _all(run_dir) if window.holds(one.failed_unix_seconds)]
    listed.sort(key=lambda failure: failure.failed_unix_seconds, reverse=True)
    return FailureList(failures=listed[: window.limit], total=len(listed))


@router.post("/failures", operation_id="report_failure", status_code=HTTPStatus.CREATED, dependencies=[MayWrite])
def post_failure(run_dir: RunDir, report: FailureReport) -> Failure:
    """Report a failure without a restart of this job; the failure rate counts it at the next phase's end."""
    now = time.time()
    failed = now if report.failed_unix_seconds is None else report.failed_unix_seconds
    if failed > now + CLOCKS_SECONDS:
        raise Problem(422, "bad_request", f"failed_unix_seconds {failed:g} lies in the future", "leave it out")
    try:
        report_failure(run_dir, ReportedFailure(description=report.description, failed_unix_seconds=failed))
    except TooManyReportsError as error:
        raise _too_many(error) from error
    return _reported(report.description, failed)


def _too_many(error: TooManyReportsError) -> Problem:
    hint = "does something report the same failure over and over?"
    if error.retry_seconds is None:
        return Problem(409, "reports_full", str(error), hint)
    again = math.ceil(error.retry_seconds)
    return Problem(429, "too_many_reports", str(error), f"{hint} Ask again in {again} s", {"Retry-After": str(again)})


def _all(run_dir: Path) -> list[Failure]:
    with open_journal(run_dir) as reader:
        seen = reader.failures()
    return [_seen(row) for row in seen] + [
        _reported(one.description, one.failed_unix_seconds) for one in reported_failures(run_dir)
    ]


def _seen(row: FailureRow) -> Failure:
    return Failure(
        iteration=row.iteration,
        checkpoint_iteration=row.checkpoint_iteration,
        description=row.description,
        failed_unix_seconds=row.detected_unix_seconds,
        reported=False,
        scope=row.scope,
    )


def _reported(description: str, failed_unix_seconds: float) -> Failure:
    return Failure(
        iteration=None,
        checkpoint_iteration=None,
        description=description,
        failed_unix_seconds=failed_unix_seconds,
        reported=True,
    )
