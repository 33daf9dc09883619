"""The common form of every refusal: what happened, and what to do."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from cpsr.errors import JournalError

__all__ = ["PROBLEMS", "Error", "Problem", "answer_problems"]


class Error(BaseModel):
    """The one form of every answer that is not 2xx, `/healthz` apart."""

    code: str = Field(description="Stable word for programs, for example `journal_unavailable`.")
    message: str = Field(description="What happened and where, for people.")
    hint: str = Field(description="What to do.")


class Problem(Exception):  # noqa: N818 - what is answered, and nothing that went wrong here
    """A refusal that is the answer to a request.

    Args:
        status: of HTTP.
        code: stable word for programs.
        message: what happened and where.
        hint: what to do.
        headers: of the answer.
    """

    def __init__(
        self, status: int, code: str, message: str, hint: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = Error(code=code, message=message, hint=hint)
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        """The answer itself."""
        return JSONResponse(self.error.model_dump(), self.status, self.headers)


# For OpenAPI: what every operation may answer.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": description}
    for status, description in {
        400: "The body cannot be read.",
        401: "The service has a token, and the request has not.",
        403: "The request is not allowed, or not under this host name.",
        404: "There is nothing of the kind yet.",
        408: "The body did not arrive in time.",
        409: "The state of the run does not allow an answer.",
        413: "The body is too large.",
        422: "A parameter or the body does not fit.",
        503: "The journal is absent, locked, truncated or of another version.",
    }.items()
}


def answer_problems(app: FastAPI) -> None:
    """Give every refusal and every error of `app` the one form."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(JournalError, _journal_unavailable)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(Exception, _internal_error)


def _problem(_: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, Problem)
    return problem.response()


def _journal_unavailable(_: Request, error: Exception) -> JSONResponse:
    hint = "training does not depend on this; ask again once the journal can be read"
    return Problem(503, "journal_unavailable", str(error), hint).response()


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    hint = "GET /openapi.json lists the operations"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The router knows the methods of one operation; others may lie under the same path.
        described = request.app.openapi()["paths"].get(request.scope["path"])
        headers |= {"Allow": ", ".join(sorted(map(str.upper, described)))} if described else {}
    return Problem(error.status_code, code, str(error.detail), hint, headers).response()


def _bad_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Without the sent values: they may be long, and need not be text.
    problems = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()]
    hint = "GET /openapi.json lists the parameters and their types"
    return Problem(422, "bad_request", "; ".join(problems), hint).response()


def _internal_error(_: Request, error: Exception) -> JSONResponse:
    hint = "this is a defect; the service's log has it"
    return Problem(500, "internal_error", f"{type(error).__name__}: {error}", hint).response()
