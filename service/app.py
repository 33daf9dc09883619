"""The HTTP service over a run directory: it reads the journal, and training never needs it."""

import ipaddress
import signal
import socket
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cpsr.errors import ConfigError, JournalError
from cpsr.journal import ReportedFailure, report_failure
from cpsr.service import view
from cpsr.service.schema import Error, Failure, FailureList, FailureReport, Health, PlanReply

__all__ = ["bind", "create_app", "serve"]

LIMIT_DEFAULT, LIMIT_MAX = 100, 1000
CLOCKS_SECONDS = 60.0  # by which the clock of whoever reports a failure may be ahead


def create_app(run_dir: Path, allow_writes: bool = False) -> FastAPI:
    """The service over `run_dir`, which need not exist yet: its absence is answered with 503.

    Args:
        run_dir: of the run.
        allow_writes: whether failures can be reported; everybody who reaches the service then can.
    """
    # The interactive pages load scripts from elsewhere; this service works without a network.
    app = FastAPI(title="CPSR", docs_url=None, redoc_url=None)
    app.add_exception_handler(JournalError, _journal_unavailable)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(Exception, _internal_error)
    unavailable: dict[int | str, dict[str, Any]] = {
        404: {"model": Error, "description": "The run has not planned yet."},
        503: {"model": Error, "description": "The journal is absent, locked, truncated or newer."},
    }

    @app.get("/plan", operation_id="get_plan", response_model=PlanReply, responses=unavailable)
    def get_plan() -> PlanReply | JSONResponse:
        """The current checkpoint interval of every rank, and why."""
        return view.plan(run_dir) or _no_plan(run_dir)

    @app.get("/healthz", operation_id="get_health", response_model=Health, responses={503: {"model": Health}})
    def get_health() -> JSONResponse:
        """Whether the run is well: 200, or 503 with the reason."""
        health = view.health(run_dir)
        status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(health.model_dump(mode="json"), status)

    @app.get(
        "/failures",
        operation_id="list_failures",
        response_model=FailureList,
        responses={503: {"model": Error}, 422: {"model": Error}},
    )
    def list_failures(limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT) -> FailureList:
        """Failures that the job saw, and those that were reported, newest first."""
        return view.failures(run_dir, limit)

    @app.post(
        "/failures",
        operation_id="report_failure",
        status_code=HTTPStatus.CREATED,
        response_model=Failure,
        responses={403: {"model": Error}, 503: {"model": Error}, 422: {"model": Error}},
    )
    def post_failure(request: Request, report: FailureReport) -> Failure | JSONResponse:
        """Report a failure that no restart of this job shows; the failure rate counts it at the next phase's end."""
        refusal = _write_refused(request, allow_writes)
        if refusal is not None:
            return refusal
        now = time.time()
        failed = now if report.failed_unix_seconds is None else report.failed_unix_seconds
        if failed > now + CLOCKS_SECONDS:
            return _reply(422, "bad_request", f"failed_unix_seconds {failed:g} lies in the future", "leave it out")
        report_failure(run_dir, ReportedFailure(description=report.description, failed_unix_seconds=failed))
        return Failure(
            iteration=None,
            checkpoint_iteration=None,
            description=report.description,
            failed_unix_seconds=failed,
            reported=True,
        )

    return app


def _write_refused(request: Request, allow_writes: bool) -> JSONResponse | None:
    """Why this request may not write; None where it may."""
    if not allow_writes:
        return _reply(403, "writes_off", "this service only reads", "start it with --allow-writes")
    # A page in a browser can be made to reach loopback under a name of its own.
    host = request.url.hostname or ""
    if not _is_loopback(host):
        return _reply(403, "foreign_host", f"{host!r} is not this machine", "ask 127.0.0.1 or localhost")
    return None


def bind(host: str, port: int, *, allow_remote: bool = False) -> socket.socket:
    """Open the listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the host is not this machine's loopback and `allow_remote` is off, or the address cannot be used.
    """
    if not allow_remote and not _is_loopback(host):
        raise ConfigError(
            f"host {host!r} would let other machines read this run, and the service asks for no password yet; use "
            "127.0.0.1 (and an SSH tunnel), or add --allow-remote on a network that you trust"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot serve on {host} port {port}: {error}; choose another with --host or --port"
        ) from error


def serve(run_dir: Path, listener: socket.socket, allow_writes: bool = False) -> None:
    """Answer on `listener` until SIGTERM or SIGINT; requests under way are finished first."""
    server = uvicorn.Server(uvicorn.Config(create_app(run_dir, allow_writes), log_level="warning", access_log=False))

    # uvicorn raises the signal once more after its own clean shutdown; that second one must not end us by signal.
    def stop(*_: object) -> None:
        server.should_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reply(status: int, code: str, message: str, hint: str) -> JSONResponse:
    return JSONResponse(Error(code=code, message=message, hint=hint).model_dump(), status)


def _journal_unavailable(_: Request, error: Exception) -> JSONResponse:
    hint = "training does not depend on this; ask again once the journal can be read"
    return _reply(503, "journal_unavailable", str(error), hint)


def _no_plan(run_dir: Path) -> JSONResponse:
    message = f"the run in {run_dir} has not planned yet"
    return _reply(404, "no_plan_yet", message, "the first plan is made when training starts; ask again then")


def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    reply = _reply(error.status_code, code, str(error.detail), "GET /openapi.json lists what can be asked")
    reply.headers.update(error.headers or {})
    return reply


def _bad_request(_: Request, error: Exception) -> JSONResponse:
    return _reply(422, "bad_request", str(error), "GET /openapi.json lists the parameters and their types")


def _internal_error(_: Request, error: Exception) -> JSONResponse:
    return _reply(
        500, "internal_error", f"{type(error).__name__}: {error}", "this is a defect; the service's log has it"
    )
