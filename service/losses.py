"""The loss curve of the run's present course, thinned to the resolution of a plot."""

import math

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import JournalReader, StepRow
from cpsr.service.parameters import LIMIT_MAX, RunDir
from cpsr.service.problems import Problem
from cpsr.service.rows import open_journal

__all__ = ["LossCurve", "router"]

ITERATION_MAX = 2**53  # the largest that JavaScript counts to

router = APIRouter(tags=["losses"])


class LossCurve(BaseModel):
    """Losses by iteration, oldest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"iterations": [1, 1001, 2001], "losses": [8.1, 3.2, None], "total": 2600}]}
    )

    iterations: list[int] = Field(description="Increasing; without iterations that a roll-back undid.")
    losses: list[float | None] = Field(
        description="Of these single iterations, not means (nats for a language model); null where there was none, or "
        "it was not finite."
    )
    total: int = Field(description="Number of the newest recorded step: more than are listed where they were thinned.")


@router.get("/losses", operation_id="get_losses")
def get_losses(
    run_dir: RunDir,
    limit: int = Query(default=LIMIT_MAX, ge=2, le=LIMIT_MAX, description="At most so many, evenly spaced."),
    first_iteration: int | None = Query(default=None, ge=0, le=ITERATION_MAX, description="None before; the first."),
    last_iteration: int | None = Query(default=None, ge=0, le=ITERATION_MAX, description="None after; the newest."),
) -> LossCurve:
    """The loss curve of the run or of a part of it, thinned evenly to at most `limit` iterations."""
    first, last = first_iteration or 0, ITERATION_MAX if last_iteration is None else last_iteration
    if first > last:
        message = f"first_iteration ({first}) is later than last_iteration ({last})"
        raise Problem(422, "bad_request", message, "exchange the two")
    with open_journal(run_dir) as reader:
        total = reader.last_row(StepRow)
        whole = first_iteration is None and last_iteration is None
        steps = _present(_thinned(reader, total, limit)) if whole else _between(reader, first, last, limit)
    losses = [None if step.loss is None or not math.isfinite(step.loss) else step.loss for step in steps]
    return LossCurve(iterations=[step.iteration for step in steps], losses=losses, total=total)


def _thinned(reader: JournalReader, total: int, limit: int) -> list[StepRow]:
    """Steps evenly spaced in the order of their recording, the first and the newest among them."""
    if total <= limit:
        return [step for _, step in reader.after(StepRow, 0, limit)]
    # A look-up for each of them: their number does not grow with the run's, which reading all the steps would.
    found: list[tuple[int, StepRow]] = []
    for place in range(limit):
        wanted = 1 + round(place * (total - 1) / (limit - 1))
        if not found or wanted > found[-1][0]:  # else rows that are no longer kept were passed over
            found += reader.after(StepRow, wanted - 1, 1)
    return [step for _, step in found]


def _between(reader: JournalReader, first: int, last: int, limit: int) -> list[StepRow]:
    """Steps of the present course in a range of iterations, evenly spaced, with the first and the last of it."""
    newest = reader.recent_steps(1)
    last = min(last, newest[0].iteration) if newest else -1  # a roll-back undid later ones
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


def _present(steps: list[StepRow]) -> list[StepRow]:
    """Those of the course that the run is on now, of steps in the order of their recording."""
    kept: list[StepRow] = []
    for step in reversed(steps):
        if not kept or step.iteration < kept[-1].iteration:
            kept.append(step)
    return kept[::-1]
