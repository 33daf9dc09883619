"""`GET /events`: new rows of the journal, as server-sent events that a client can resume."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive, Scope, Send

from cpsr.errors import JournalError
from cpsr.service.follow import FOLLOWED, ROWS_AT_ONCE, Place, Recorded, end_of, recorded_after, start_of
from cpsr.service.gate import Limits
from cpsr.service.parameters import RunDir
from cpsr.service.problems import Problem

__all__ = ["Streams", "router"]

ID_CHARACTERS_MAX = 300  # of any place that was ever sent

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
        limits: of one service.
        open: how many there are.
        closing: the service ends; every stream then does.
    """

    limits: Limits
    open: int = 0
    closing: bool = False


@router.get(
    "/events",
    operation_id="follow_events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"itemSchema": _MESSAGE_SCHEMA}},
            "description": "Server-sent events, each with JSON data. `hello` comes first. `event`, `checkpoint`, "
            "`plan`, `failure`, `recovery`, `phase`, `fit`, `backtest` and `bubble` are rows of the "
            "journal, have an id to go on from, and `row`, their number within their kind. `progress` is the newest "
            "step, at most once a second. `reset`: the journal is another one, or has lost rows that were sent; `kept` "
            "is the number of the last row of each kind that stays. Forget the rows behind these, and everything where "
            "all are 0; what follows is every row behind them. `unavailable`: the journal cannot be read now.",
        }
    },
)
async def follow_events(
    request: Request,
    run_dir: RunDir,
    after: Annotated[
        str | None,
        Query(max_length=ID_CHARACTERS_MAX, description="Go on behind this id; `start` is everything there is."),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="As `after`, which it goes before: what a browser sends when it comes back.")
    ] = None,
) -> StreamingResponse:
    """Rows of the journal as they are recorded, from now on or behind an id."""
    streams: Streams = request.app.state.streams
    if streams.open >= streams.limits.streams:
        message = f"{streams.open} clients follow the events already"
        raise Problem(503, "too_many_streams", message, "close one, or ask GET /plan once a second")
    asked = last_event_id if last_event_id is not None else after
    streams.open += 1  # before the first await, or many simultaneous requests would all pass
    try:
        here = await run_in_threadpool(end_of, run_dir)
    except BaseException:
        streams.open -= 1
        raise
    return _EventStream(_Follower(run_dir, here).messages(asked, streams), streams)


class _Follower:
    """The stream of one client. Nothing is queued: it reads on when the client has received the last messages.

    Args:
        run_dir: of the run.
        here: the end of its journal now.
    """

    def __init__(self, run_dir: Path, here: Place) -> None:
        self._run_dir = run_dir
        self._place = here
        self._step: dict[str, Any] | None = None
        self._failure = ""

    async def messages(self, asked: str | None, streams: Streams) -> AsyncIterator[str]:
        """All messages, until the service ends.

        Args:
            asked: where to begin.
            streams: of the service.
        """
        begin = _begin(asked, self._place)
        self._place = begin or start_of(self._place)
        yield _message("hello", {"run": self._run_dir.name}, self._place)
        if begin is None:
            yield self._reset("the id is none of this service's")
        sent_at = time.monotonic()
        while not streams.closing:
            messages, more = await self._look()
            for message in messages:
                yield message
            if messages:
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > streams.limits.quiet_seconds:
                sent_at = time.monotonic()
                yield ": still here\n\n"
            if not more:
                await asyncio.sleep(streams.limits.poll_seconds)

    async def _look(self) -> tuple[list[str], bool]:
        """New messages, and whether there may be more already."""
        try:
            news = await run_in_threadpool(recorded_after, self._run_dir, self._place)
        except JournalError as error:
            known, self._failure = self._failure, str(error)
            return [] if known == self._failure else [_message("unavailable", {"message": self._failure})], False
        self._failure = ""
        self._place = news.begin
        messages = [self._reset(news.reset)] if news.reset else []
        messages += [_message(row.name, {**row.content, "row": _number(row)}, row.place) for row in news.rows]
        if news.rows:
            self._place = news.rows[-1].place
        if news.step != self._step and news.step is not None:
            messages.append(_message("progress", news.step))
        self._step = news.step
        return messages, len(news.rows) >= ROWS_AT_ONCE

    def _reset(self, why: str) -> str:
        kept = dict(zip(FOLLOWED, self._place.rows, strict=True))
        reason = f"{why}; forget the rows behind `kept`: what follows is every row behind them"
        return _message("reset", {"reason": reason, "kept": kept}, self._place)


def _begin(asked: str | None, here: Place) -> Place | None:
    """Where a stream begins; None where the id is invalid."""
    if asked is None:
        return here
    return start_of(here) if asked == "start" else Place.parse(asked)


def _number(row: Recorded) -> int:
    return row.place.rows[list(FOLLOWED).index(row.name)]


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
            async with asyncio.timeout(self._streams.limits.send_seconds):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            return  # the server closes the connection; the client may come back with the last id that it has
