"""Access control: loopback needs no token, every other client does."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Depends, Request

from cpsr.errors import ConfigError
from cpsr.service.problems import Problem

__all__ = ["TOKEN_VARIABLE", "Access", "MayWrite", "foreign_origin", "is_loopback", "read_token"]

TOKEN_VARIABLE = "CPSR_SERVICE_TOKEN"  # noqa: S105 - the name of a variable
# A random token of this length cannot be guessed: 16 characters of base64 are 96 bits.
TOKEN_CHARACTERS_MIN = 16
SCHEME = "Bearer"


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


def foreign_origin(method: str, host: str, origin: str | None) -> Problem | None:
    """Why a browser page may not write; None where it may, or where no page asks.

    A browser sends another site's POST requests to this service, and only hides the answer from the page.

    Args:
        method: of the request.
        host: what the request calls this machine.
        origin: of the page, as its browser sends it.
    """
    if method in ("GET", "HEAD", "OPTIONS") or origin is None or origin.partition("://")[2] == host:
        return None
    return Problem(403, "foreign_origin", f"a page of {origin[:100]!r} asks", "ask from the service's own page")


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
