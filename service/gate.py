"""Checks before any handler: the request rate of an address, access, and the body's size."""

import asyncio
import math
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpsr.service.access import Access, foreign_origin
from cpsr.service.dashboard import is_page
from cpsr.service.problems import Problem
from cpsr.service.rates import Rates

__all__ = ["Gate", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Limits of one client.

    Attributes:
        requests_per_second: of one address, for good: dozens of pages that poll each second are fewer.
        requests_burst: of one address, at once.
        body_bytes: of a request; the largest that can be asked for is a description of 1000 characters.
        body_seconds: until it must be here.
        streams: of events, open at a time; each reads the journal once a second.
        send_seconds: until a client must have taken what was sent before.
        poll_seconds: between two looks into the journal for a stream.
        quiet_seconds: after which a stream shows that it is alive.
    """

    requests_per_second: float = 200.0
    requests_burst: int = 400
    body_bytes: int = 1 << 14
    body_seconds: float = 10.0
    streams: int = 32
    send_seconds: float = 30.0
    poll_seconds: float = 1.0
    quiet_seconds: float = 15.0


class Gate:
    """Refuses disallowed requests before it reads their body.

    Args:
        app: what answers.
        access: who may ask.
        limits: of one client.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._rates = Rates(limits.requests_per_second, limits.requests_burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's start and end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Cache-Control"] = "no-store"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            self._check(scope)
            first = await self._body(scope, receive)
        except Problem as problem:
            await problem.response()(scope, receive, send_marked)
            return
        await self._app(scope, _replayed(first, receive), send_marked)

    def _check(self, scope: Scope) -> None:
        address = scope["client"][0] if scope.get("client") else ""
        wait = self._rates.wait_seconds(address, time.monotonic())
        if wait:
            hint = f"ask again in {wait:.2g} s, and at most {self._limits.requests_per_second:g} times a second"
            again = {"Retry-After": str(math.ceil(wait))}
            raise Problem(429, "too_many_requests", f"{address} asks too often", hint, again)
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        foreign = foreign_origin(scope["method"], host, headers.get("origin"))
        if foreign is not None:
            raise foreign
        refusal = self._access.refusal(host, headers.get("authorization"))
        # The page contains no data of a run, and a browser needs it before it can send a token.
        if refusal is not None and not (refusal.status == 401 and is_page(scope["path"])):
            raise refusal

    async def _body(self, scope: Scope, receive: Receive) -> Message:
        """The whole body in one message, or the client's disconnect."""
        limit, body = self._limits.body_bytes, b""
        too_large = Problem(413, "body_too_large", f"the body has more than {limit} bytes", "send less")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return message
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return {"type": "http.request", "body": body, "more_body": False}
        except TimeoutError as error:
            seconds = f"{self._limits.body_seconds:g} s"
            late = f"the body was not complete after {seconds}"
            raise Problem(408, "body_too_slow", late, f"send it within {seconds}") from error


def _replayed(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
