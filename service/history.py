"""What the journal holds of the past: rows of each kind, failures, and the loss curve."""

import math
import time
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import FailureScope, JournalReader, ReportedFailure, StepRow, report_failure, reported_failures
from cpsr.journal.rows import row_type_of
from cpsr.service.access import MayWrite
from cpsr.service.problems import Problem
from cpsr.service.run import LIMIT_MAX, RunDir, open_journal, plain_row

__all__ = ["Failure", "FailureList", "FailureReport", "History", "LossCurve", "router"]

LIMIT_DEFAULT = 100
BRIEFLY = ("bound", "rivals", "override")
CLOCKS_SECONDS = 60.0  # by which a reporter's clock may be ahead

router = APIRouter(tags=["history"])

Kind = Literal["life", "checkpoint", "failure", "recovery", "plan", "phase", "fit"]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="At most so many, the newest first.")]


class History(BaseModel):
    """The newest rows of one kind, newest first."""

    rows: list[dict[str, Any]] = Field(description="As docs/journal_rows.md describes them.")
    total: int = Field(description="Number of recorded rows of this kind.")


class Failure(BaseModel):
    """A failure of the run."""

    iteration: int | None = Field(description="null where it was reported and no restart shows it.")
    checkpoint_iteration: int | None
    description: str
    failed_unix_seconds: float
    reported: bool = Field(description="Whether it was reported, or the job detected it.")
    scope: FailureScope | None = Field(
        description="What it left: `process`: the memory of every machine; `machine`: replicas of what was lost with "
        "one; `everything`: the disk alone. null where it was not recorded, or was reported."
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
    total: int


class LossCurve(BaseModel):
    """Losses by iteration, oldest first."""

    iterations: list[int] = Field(description="Increasing; without iterations that a roll-back undid.")
    losses: list[float | None] = Field(
        description="Of these single iterations, not means (nats for a language model); null where there was none, or "
        "it was not finite."
    )


@router.get("/history", operation_id="list_history")
def list_history(
    run_dir: RunDir, kind: Annotated[Kind, Query(description="Of the rows.")], limit: Limit = LIMIT_DEFAULT
) -> History:
    """Rows of the journal as they were recorded; of a life and a recovery also what they were before they ended.

    Of the explanation of a plan only `bound`, `rivals` and `override` are given: it is kilobytes.
    """
    row_type = row_type_of(kind)
    with open_journal(run_dir) as reader:
        rows = [plain_row(row) for row in reader.newest(row_type, limit)]
        total = reader.count(row_type)
    for row in rows if kind == "plan" else ():
        row["explanation"] = {name: value for name, value in row["explanation"].items() if name in BRIEFLY}
    return History(rows=rows, total=total)


@router.get("/failures", operation_id="list_failures")
def list_failures(run_dir: RunDir, limit: Limit = LIMIT_DEFAULT) -> FailureList:
    """Failures that the job detected, and reported ones, newest first."""
    with open_journal(run_dir) as reader:
        found = [
            Failure(
                iteration=row.iteration,
                checkpoint_iteration=row.checkpoint_iteration,
                description=row.description,
                failed_unix_seconds=row.created_unix_seconds,
                reported=False,
                scope=row.scope,
            )
            for row in reader.failures()
        ]
    found += [_reported(one) for one in reported_failures(run_dir)]
    found.sort(key=lambda failure: failure.failed_unix_seconds, reverse=True)
    return FailureList(failures=found[:limit], total=len(found))


@router.post("/failures", operation_id="report_failure", status_code=HTTPStatus.CREATED, dependencies=[MayWrite])
def post_failure(run_dir: RunDir, report: FailureReport) -> Failure:
    """Report a failure without a restart of this job; the failure rate counts it at the next phase's end."""
    now = time.time()
    failed = now if report.failed_unix_seconds is None else report.failed_unix_seconds
    if failed > now + CLOCKS_SECONDS:
        raise Problem(422, "bad_request", f"failed_unix_seconds {failed:g} lies in the future", "leave it out")
    failure = ReportedFailure(description=report.description, failed_unix_seconds=failed)
    report_failure(run_dir, failure)
    return _reported(failure)


def _reported(failure: ReportedFailure) -> Failure:
    return Failure(
        iteration=None,
        checkpoint_iteration=None,
        description=failure.description,
        failed_unix_seconds=failure.failed_unix_seconds,
        reported=True,
        scope=None,
    )


@router.get("/losses", operation_id="get_losses")
def get_losses(
    run_dir: RunDir,
    limit: int = Query(default=LIMIT_MAX, ge=2, le=LIMIT_MAX, description="At most so many, evenly spaced."),
) -> LossCurve:
    """The loss curve of the run, thinned evenly to at most `limit` iterations."""
    with open_journal(run_dir) as reader:
        steps = _evenly(reader, limit)
    losses = [None if step.loss is None or not math.isfinite(step.loss) else step.loss for step in steps]
    return LossCurve(iterations=[step.iteration for step in steps], losses=losses)


def _evenly(reader: JournalReader, limit: int) -> list[StepRow]:
    """Steps of the present course, evenly spaced, with the first and the newest.

    A look-up for each of them: their number does not grow with the run's, which reading all the steps would.
    """
    newest, oldest = reader.recent_steps(1), reader.step_from(0)
    if not newest or oldest is None:
        return []
    first, last = oldest.iteration, newest[0].iteration  # a roll-back undid later ones
    count = min(limit, last - first + 1)
    found: list[StepRow] = []
    for place in range(count):
        wanted = first + round(place * (last - first) / max(1, count - 1))
        if not found or wanted > found[-1].iteration:  # else iterations that are no longer kept were passed over
            step = reader.step_from(wanted)
            if step is None or step.iteration > last:
                break
            found.append(step)
    return found
