"""`GET /events`: new rows of the journal, as server-sent events that a client can resume."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive, Scope, Send

from cpsr.errors import JournalError
from cpsr.journal import JournalReader, PlanRow, Recorded
from cpsr.service.problems import Problem
from cpsr.service.run import RunDir, open_journal, plain_row

__all__ = ["Place", "Streams", "router"]

STREAMS_MAX = 32  # open at a time; each reads the journal once a second
ROWS_AT_ONCE = 100  # a reader that was away for long gets small pieces
SEND_SECONDS = 30.0  # until a client must have taken what was sent before
POLL_SECONDS = 1.0  # between two looks into the journal for a stream
QUIET_SECONDS = 15.0  # after which a stream shows that it is alive

_MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}

router = APIRouter(tags=["events"])


@dataclass
class Streams:
    """The streams of one service.

    Attributes:
        open: how many there are.
        closing: the service ends; every stream then does.
    """

    open: int = 0
    closing: bool = False


@dataclass(frozen=True)
class Place:
    """How far a journal was followed: the number of the last row that was sent, and the hash of that row.

    If another row has this number now, the journal was begun anew, or a power cut took its last rows and their numbers
    were used again.
    """

    number: int
    row_hash: str = ""

    def __str__(self) -> str:
        return f"{self.number}-{self.row_hash}"

    @classmethod
    def parse(cls, text: str) -> "Place | None":
        """The place that a text names; None where it names none."""
        found = re.fullmatch(r"(\d{1,18})-([0-9a-f]{0,16})", text)
        return None if found is None else cls(int(found[1]), found[2])

    @classmethod
    def behind(cls, recorded: Recorded) -> "Place":
        """The place behind a row."""
        # A row is never changed once it is recorded.
        content = json.dumps([recorded.kind, plain_row(recorded.row)], sort_keys=True)
        return cls(recorded.number, xxhash.xxh3_64_hexdigest(content.encode()))

    def holds(self, reader: JournalReader) -> bool:
        """Whether the journal still has what was sent."""
        return self.number == 0 or any(self == Place.behind(row) for row in reader.after(self.number - 1, 1))


@router.get(
    "/events",
    operation_id="follow_events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"itemSchema": _MESSAGE_SCHEMA}},
            "description": "Server-sent events, each with JSON data. `hello` comes first. `life`, `checkpoint`, "
            "`failure`, `recovery`, `plan`, `phase`, `fit`, `bubble` and `event` are rows of the journal, have an id "
            "to go on from, and `row`, their number. `progress` is the newest step, at most once a second. `reset`: "
            "the journal is another one, or has lost rows that were sent; forget them all: every row follows. "
            "`unavailable`: the journal cannot be read now.",
        }
    },
)
async def follow_events(
    request: Request,
    run_dir: RunDir,
    after: Annotated[
        str | None, Query(max_length=40, description="Go on behind this id; `start` is everything there is.")
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="As `after`, which it goes before: what a browser sends when it comes back.")
    ] = None,
) -> StreamingResponse:
    """Rows of the journal as they are recorded, from now on or behind an id."""
    streams: Streams = request.app.state.streams
    if streams.open >= STREAMS_MAX:
        message = f"{streams.open} clients follow the events already"
        raise Problem(503, "too_many_streams", message, "close one, or ask GET /plan once a second")
    asked = last_event_id if last_event_id is not None else after
    streams.open += 1  # before the first await, or many simultaneous requests would all pass
    try:
        begin = await run_in_threadpool(_end_of, run_dir) if asked is None else _asked(asked)
    except BaseException:
        streams.open -= 1
        raise
    return _EventStream(_Follower(run_dir, begin).messages(streams), streams)


def _asked(text: str) -> Place | None:
    return Place(0) if text == "start" else Place.parse(text)


def _end_of(run_dir: Path) -> Place:
    """The place behind everything that is recorded now."""
    with open_journal(run_dir) as reader:
        newest = reader.after(reader.last_event() - 1, 1)
        return Place.behind(newest[0]) if newest else Place(0)


class _Follower:
    """The stream of one client. Nothing is queued: it reads on when the client has received the last messages.

    Args:
        run_dir: of the run.
        begin: where to begin; None: the id is none of this service's.
    """

    def __init__(self, run_dir: Path, begin: Place | None) -> None:
        self._run_dir = run_dir
        self._place = begin
        self._step: dict[str, Any] | None = None
        self._failure = ""

    async def messages(self, streams: Streams) -> AsyncIterator[str]:
        """All messages, until the service ends."""
        yield _message("hello", {"run": self._run_dir.name}, self._place)
        sent_at = time.monotonic()
        while not streams.closing:
            messages, more = await self._look()
            for message in messages:
                yield message
            if messages:
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > QUIET_SECONDS:
                sent_at = time.monotonic()
                yield ": still here\n\n"
            if not more:
                await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> tuple[list[str], bool]:
        """New messages, and whether there may be more already."""
        try:
            return await run_in_threadpool(self._read)
        except JournalError as error:
            known, self._failure = self._failure, str(error)
            return [] if known == self._failure else [_message("unavailable", {"message": self._failure})], False

    def _read(self) -> tuple[list[str], bool]:
        messages = []
        with open_journal(self._run_dir) as reader:
            if self._place is None or not self._place.holds(reader):
                self._place = Place(0)
                reason = "the journal has not the row of this id; forget all rows: what follows is every row"
                messages.append(_message("reset", {"reason": reason}, self._place))
            rows, steps = reader.after(self._place.number, ROWS_AT_ONCE), reader.recent_steps(1)
        self._failure = ""
        for recorded in rows:
            self._place = Place.behind(recorded)
            kind = getattr(recorded.row, "KIND", "event")
            messages.append(_message(kind, _content(recorded), self._place))
        step = plain_row(steps[0]) if steps else None
        if step != self._step and step is not None:
            messages.append(_message("progress", step))
        self._step = step
        return messages, len(rows) >= ROWS_AT_ONCE


def _content(recorded: Recorded) -> dict[str, Any]:
    content = {**plain_row(recorded.row), "row": recorded.number}
    if isinstance(recorded.row, PlanRow):
        del content["explanation"]  # kilobytes, which `GET /plan` has
    return content


def _message(name: str, content: dict[str, Any], place: Place | None = None) -> str:
    identity = "" if place is None else f"id: {place}\n"
    return f"{identity}event: {name}\ndata: {json.dumps(content)}\n\n"


class _EventStream(StreamingResponse):
    """Counts itself, and ends if its client receives nothing for too long."""

    def __init__(self, content: AsyncIterator[str], streams: Streams) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then leave the open streams."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1

    async def stream_response(self, send: Send) -> None:
        """Send until the content ends or the client disconnects."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            return  # the server closes the connection; the client may come back with the last id that it has
