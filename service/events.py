"""`GET /events`: new rows of the journal, for clients that ask again behind the last id that they have."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import xxhash
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from cpsr.journal import JournalReader, PlanRow, Recorded
from cpsr.service.run import RunDir, open_journal, plain_row

__all__ = ["router"]

ROWS_AT_ONCE = 1000  # a client that was away for long gets pieces

router = APIRouter(tags=["events"])


class Event(BaseModel):
    """A row of the journal."""

    event: str = Field(
        description="`life`, `checkpoint`, `failure`, `recovery`, `plan`, `phase`, `fit`, `bubble`, or "
        "`event` for any other."
    )
    row: int = Field(description="Its number.")
    data: dict[str, Any] = Field(description="As docs/journal_rows.md describes it; a plan without its explanation.")


class Events(BaseModel):
    """Rows of the journal behind an id, oldest first."""

    events: list[Event]
    after: str = Field(description="Ask again with this id.")
    more: bool = Field(description="Whether there are more rows now.")
    reset: bool = Field(
        description="The journal is another one, or has lost the row of the given id: forget all rows, these are the "
        "first ones."
    )


@dataclass(frozen=True)
class _Place:
    """How far a journal was read: the number of the last row, and the hash of that row.

    If another row has this number now, the journal was begun anew, or a power cut took its last rows and their numbers
    were used again.
    """

    number: int = 0
    row_hash: str = ""

    def __str__(self) -> str:
        return f"{self.number}-{self.row_hash}"

    @classmethod
    def behind(cls, recorded: Recorded) -> "_Place":
        """The place behind a row."""
        # A row is never changed once it is recorded.
        content = json.dumps([recorded.kind, plain_row(recorded.row)], sort_keys=True)
        return cls(recorded.number, xxhash.xxh3_64_hexdigest(content.encode()))

    @classmethod
    def named(cls, text: str, reader: JournalReader) -> "_Place | None":
        """The place that an id names; None where the journal has no such row."""
        found = re.fullmatch(r"(\d{1,18})-([0-9a-f]{0,16})", text)
        if found is None:
            return cls() if text == "start" else None
        place = cls(int(found[1]), found[2])
        holds = place == cls() or any(place == cls.behind(row) for row in reader.after(place.number - 1, 1))
        return place if holds else None


@router.get("/events", operation_id="list_events")
def list_events(
    run_dir: RunDir,
    after: Annotated[
        str | None,
        Query(
            max_length=40,
            description="An id; `start` is before the first row. Absent: no rows, and the id behind the newest.",
        ),
    ] = None,
) -> Events:
    """Rows of the journal behind an id, in the order of recording."""
    with open_journal(run_dir) as reader:
        if after is None:
            newest = reader.after(reader.last_event() - 1, 1)
            place = _Place.behind(newest[0]) if newest else _Place()
            return Events(events=[], after=str(place), more=False, reset=False)
        known = _Place.named(after, reader)
        place = known or _Place()
        rows = reader.after(place.number, ROWS_AT_ONCE)
    return Events(
        events=[Event(event=getattr(one.row, "KIND", "event"), row=one.number, data=_content(one)) for one in rows],
        after=str(_Place.behind(rows[-1]) if rows else place),
        more=len(rows) == ROWS_AT_ONCE,
        reset=known is None,
    )


def _content(recorded: Recorded) -> dict[str, Any]:
    content = plain_row(recorded.row)
    if isinstance(recorded.row, PlanRow):
        del content["explanation"]  # kilobytes, which `GET /plan` has
    return content
