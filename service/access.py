"""Who may ask, and what is refused before any handler: loopback needs no token, every other client does."""

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpsr.errors import ConfigError
from cpsr.service.problems import Problem

__all__ = ["STATIC", "TOKEN_VARIABLE", "Access", "Gate", "MayWrite", "is_loopback", "read_token"]

TOKEN_VARIABLE = "CPSR_SERVICE_TOKEN"  # noqa: S105 - the name of a variable
# A random token of this length cannot be guessed: 16 characters of base64 are 96 bits.
TOKEN_CHARACTERS_MIN = 16
SCHEME = "Bearer"
STATIC = "/static"  # the page's files, which a browser requests before it can send a token
BODY_BYTES = 1 << 14  # of a request; the largest that can be asked for is a description of 1000 characters
BODY_SECONDS = 10.0  # until it must be here


@dataclass(frozen=True)
class Access:
    """Conditions for a request.

    Without a token every client may read, and may write if writes are allowed. Requests must then arrive on loopback,
    with a host name of loopback: a browser page could send requests under its own name (DNS rebinding). With a token
    every request needs it, and may write.

    Attributes:
        token: None for none; never shown.
        allow_writes: without a token.

    Raises:
        ConfigError: both are given.
    """

    token: str | None = field(default=None, repr=False)
    allow_writes: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and self.allow_writes:
            raise ConfigError(
                "with a token, whoever has it may write; leave --allow-writes (service.allow_writes) out, or the token"
            )

    def refusal(self, host: str, authorization: str | None) -> Problem | None:
        """Why a request is refused; None where it is allowed.

        Args:
            host: what the request calls this machine, with or without a port.
            authorization: the header.
        """
        if self.token is None:
            name = _without_port(host)
            if is_loopback(name):
                return None
            return Problem(403, "foreign_host", f"{name!r} is not this machine", "ask 127.0.0.1 or localhost")
        scheme, _, given = (authorization or "").partition(" ")
        # In constant time; bytes, since a header may hold what is no ASCII.
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.token.encode())
        if same and scheme.lower() == SCHEME.lower():
            return None
        return Problem(
            401,
            "token_needed",
            "the request brings no token, or another one",
            f"send the header 'Authorization: {SCHEME} <the token that the service was started with>'",
            {"WWW-Authenticate": SCHEME},
        )


class Gate:
    """Refuses disallowed requests before it reads their body, and bodies that are too large or too slow.

    Args:
        app: what answers.
        access: who may ask.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

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
            waiting = [await _body(scope, receive)]
        except Problem as problem:
            await problem.response()(scope, receive, send_marked)
            return

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replayed, send_marked)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        # A browser sends another site's POST requests to this service, and only hides the answer from the page.
        reads = scope["method"] in ("GET", "HEAD", "OPTIONS")
        if not reads and origin is not None and origin.partition("://")[2] != host:
            raise Problem(403, "foreign_origin", f"a page of {origin[:100]!r} asks", "ask from the service's own page")
        refusal = self._access.refusal(host, headers.get("authorization"))
        # The page contains no data of a run, and a browser needs it before it can send a token.
        is_page = scope["path"] == "/" or scope["path"].startswith(f"{STATIC}/")
        if refusal is not None and not (refusal.status == 401 and is_page):
            raise refusal


async def _body(scope: Scope, receive: Receive) -> Message:
    """The whole body in one message, or the client's disconnect."""
    body = b""
    too_large = Problem(413, "body_too_large", f"the body has more than {BODY_BYTES} bytes", "send less")
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdecimal() and int(length) > BODY_BYTES:
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                body += message.get("body", b"")
                if len(body) > BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return {"type": "http.request", "body": body, "more_body": False}
    except TimeoutError as error:
        late = f"the body was not complete after {BODY_SECONDS:g} s"
        raise Problem(408, "body_too_slow", late, f"send it within {BODY_SECONDS:g} s") from error


def _may_write(request: Request) -> None:
    access: Access = request.app.state.access
    if access.token is None and not access.allow_writes:
        raise Problem(
            403, "writes_off", "this service only reads", "start it with --allow-writes, or with a token (--token-file)"
        )


# In a path operation's `dependencies`.
MayWrite = Depends(_may_write)


def read_token(path: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token in a file, or in the environment variable `CPSR_SERVICE_TOKEN`; None where there is neither.

    Raises:
        ConfigError: the file cannot be read, or the token could be guessed or not be sent; it is not in the message.
    """
    if path is None:
        where, token = f"the environment variable {TOKEN_VARIABLE}", environment.get(TOKEN_VARIABLE)
    else:
        where = f"the token file {path}"
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read ({type(error).__name__}); nothing is served") from error
    if token is None:
        return None
    token = token.strip()
    if len(token) < TOKEN_CHARACTERS_MIN or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{where} must hold at least {TOKEN_CHARACTERS_MIN} ASCII characters without a blank, for example of "
            "`openssl rand -base64 32`; nothing is served"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, which no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
