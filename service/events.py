"""`GET /events`: new rows of the journal, for clients that ask again behind the last row that they have."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from cpsr.journal import PlanRow, Recorded
from cpsr.service.run import LIMIT_MAX, RunDir, open_journal, plain_row

__all__ = ["router"]

ROW_MAX = 2**63 - 1  # SQLite's

router = APIRouter(tags=["events"])


class Event(BaseModel):
    """A row of the journal."""

    event: str = Field(
        description="`life`, `checkpoint`, `failure`, `recovery`, `plan`, `phase`, `fit`, or `event` for any other."
    )
    row: int = Field(description="Its number: ask again with the largest. A power cut may take the last rows with it.")
    data: dict[str, Any] = Field(description="As docs/journal_rows.md describes it; a plan without its explanation.")


class Events(BaseModel):
    """At most 1000 rows of the journal behind a number, oldest first."""

    events: list[Event]


@router.get("/events", operation_id="list_events")
def list_events(
    run_dir: RunDir, after: Annotated[int, Query(ge=0, le=ROW_MAX, description="Only rows behind this number.")] = 0
) -> Events:
    """Rows of the journal in the order of recording."""
    with open_journal(run_dir) as reader:
        rows = reader.after(after, LIMIT_MAX)
    return Events(
        events=[Event(event=getattr(one.row, "KIND", "event"), row=one.number, data=_content(one)) for one in rows]
    )


def _content(recorded: Recorded) -> dict[str, Any]:
    content = plain_row(recorded.row)
    if isinstance(recorded.row, PlanRow):
        del content["explanation"]  # kilobytes, which `GET /plan` has
    return content
