"""Parameters that many operations share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query, Request

from cpsr.service.problems import Problem
from cpsr.service.runs import Runs

__all__ = ["LIMIT_DEFAULT", "LIMIT_MAX", "RunDir", "Window", "WindowQuery"]

LIMIT_DEFAULT, LIMIT_MAX = 100, 1000


@dataclass(frozen=True)
class Window:
    """Which part of a list is asked for: the newest in a range of time.

    Attributes:
        limit: of the number.
        since_unix_seconds: only those of then and later; None for all.
        until_unix_seconds: only those of before; None for all.
    """

    limit: int = LIMIT_DEFAULT
    since_unix_seconds: float | None = None
    until_unix_seconds: float | None = None

    def holds(self, unix_seconds: float) -> bool:
        """Whether a time lies inside."""
        since, until = self.since_unix_seconds, self.until_unix_seconds
        return (since is None or unix_seconds >= since) and (until is None or unix_seconds < until)


TIME_EXAMPLE = 1764000000.0


def _window(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="At most so many, the newest first.")] = LIMIT_DEFAULT,
    since_unix_seconds: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Only of then and later.", examples=[TIME_EXAMPLE]),
    ] = None,
    until_unix_seconds: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Only of before.", examples=[TIME_EXAMPLE]),
    ] = None,
) -> Window:
    since, until = since_unix_seconds, until_unix_seconds
    if since is not None and until is not None and since > until:
        message = f"since_unix_seconds ({since:g}) is later than until_unix_seconds ({until:g})"
        raise Problem(422, "bad_request", message, "exchange the two")
    return Window(limit, since, until)


def _run_dir(
    request: Request,
    run: Annotated[
        str | None,
        Query(
            max_length=255,
            description="Name of a run, as `GET /runs` lists it; needed where the service is over several.",
        ),
    ] = None,
) -> Path:
    runs: Runs = request.app.state.runs
    return runs.find(run)


WindowQuery = Annotated[Window, Depends(_window)]
RunDir = Annotated[Path, Depends(_run_dir)]
