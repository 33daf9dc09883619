"""The loss curve: losses of the run's present course, thinned out to what a plot can show."""

import math

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import JournalReader, StepRow
from cpsr.service.parameters import LIMIT_MAX, RunDir
from cpsr.service.rows import open_journal

__all__ = ["LossCurve", "router"]

router = APIRouter(tags=["losses"])


class LossCurve(BaseModel):
    """Losses by iteration, oldest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"iterations": [1, 1001, 2001], "losses": [8.1, 3.2, None], "total": 2600}]}
    )

    iterations: list[int] = Field(
        description="Increasing; what was given up by going back to a checkpoint is left out."
    )
    losses: list[float | None] = Field(
        description="Of these single iterations, not means (nats for a language model); null where there was none, or "
        "it was not finite."
    )
    total: int = Field(description="Number of the newest recorded step: more than are listed where they were thinned.")


@router.get("/losses", operation_id="get_losses")
def get_losses(
    run_dir: RunDir,
    limit: int = Query(default=LIMIT_MAX, ge=2, le=LIMIT_MAX, description="At most so many, over the whole run."),
) -> LossCurve:
    """The loss curve of the run, thinned evenly to at most `limit` iterations."""
    with open_journal(run_dir) as reader:
        total = reader.last_row(StepRow)
        steps = _present(_thinned(reader, total, limit))
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


def _present(steps: list[StepRow]) -> list[StepRow]:
    """Those of the course that the run is on now, of steps in the order of their recording."""
    kept: list[StepRow] = []
    for step in reversed(steps):
        if not kept or step.iteration < kept[-1].iteration:
            kept.append(step)
    return kept[::-1]
