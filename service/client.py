"""A client of the HTTP service (`cpsr serve`), for programs."""

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import httpx

from cpsr.errors import ServiceError

__all__ = ["Client"]

TIMEOUT_SECONDS = 10.0


class Client:
    """Asks one service. Answers are the service's JSON, as `GET /openapi.json` describes it.

    Every method raises `ServiceError` where the service cannot be reached or refuses.

    Args:
        url: of the service.
        token: of the service; None where it has none.
        run: name of the run, where the service is over several.
        transport: of httpx, for a service in this process.

    Example::

        with Client("http://127.0.0.1:8712") as client:
            print(client.plan()["interval_iterations"])
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8712",
        token: str | None = None,
        run: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._url = url
        self._run = {} if run is None else {"run": run}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{url!r} is no address of a service: {error}") from error

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def plan(self) -> dict[str, Any]:
        """The current interval, and why."""
        return self._ask("GET", "/plan")

    def preview(self, **changes: float) -> dict[str, Any]:
        """The plan for other inputs; nothing of the job is changed.

        Args:
            changes: `mtbf_hours`, `state_bytes` (of a rank's checkpoint), `snapshot_bytes_per_second`,
                `persist_bytes_per_second`.
        """
        return self._ask("POST", "/plan/preview", body=changes)

    def override(
        self,
        reason: str,
        *,
        interval_iterations: int | None = None,
        interval_min_iterations: int | None = None,
        interval_max_iterations: int | None = None,
        expires_in_seconds: float = 3600.0,
    ) -> dict[str, Any]:
        """Pin or bound the interval for a while; rank 0 reads it within a second.

        Args:
            reason: one sentence, for the journal.
            interval_iterations: between checkpoints; alone, or else both bounds.
            interval_min_iterations: the planner chooses no shorter one.
            interval_max_iterations: nor a longer one.
            expires_in_seconds: from now.
        """
        bounds = {
            "interval_iterations": interval_iterations,
            "interval_min_iterations": interval_min_iterations,
            "interval_max_iterations": interval_max_iterations,
        }
        body = {"reason": reason, "expires_in_seconds": expires_in_seconds}
        return self._ask(
            "PUT", "/plan/override", body=body | {name: at for name, at in bounds.items() if at is not None}
        )

    def withdraw_override(self) -> dict[str, Any]:
        """End the current override."""
        return self._ask("DELETE", "/plan/override")

    def history(self, kind: str, limit: int = 100) -> dict[str, Any]:
        """The newest rows of one kind in the journal.

        Args:
            kind: `life`, `checkpoint`, `failure`, `recovery`, `plan`, `phase`, `fit` or `bubble`.
            limit: at most 1000.
        """
        return self._ask("GET", "/history", {"kind": kind, "limit": limit})

    def failures(self, limit: int = 100) -> dict[str, Any]:
        """Failures that the job detected, and reported ones, newest first."""
        return self._ask("GET", "/failures", {"limit": limit})

    def report_failure(self, description: str, failed_unix_seconds: float | None = None) -> dict[str, Any]:
        """Report a failure that no restart of the job shows, for the failure rate of the planner.

        Args:
            description: one sentence, for the journal.
            failed_unix_seconds: when; now by default, and not later than now.

        Raises:
            ServiceError: also where more than 1000 were reported within an hour.
        """
        when = {} if failed_unix_seconds is None else {"failed_unix_seconds": failed_unix_seconds}
        return self._ask("POST", "/failures", body={"description": description, **when})

    def runs(self) -> dict[str, Any]:
        """The runs of the service."""
        return self._ask("GET", "/runs")

    def health(self) -> dict[str, Any]:
        """Health of the run; an unhealthy run raises no error."""
        return self._ask("GET", "/healthz", accepted=503)

    def metrics(self) -> str:
        """The figures of all runs, in Prometheus' text form."""
        return self._send("GET", "/metrics").text

    def events(self, after: str | None = None) -> dict[str, Any]:
        """New rows of the journal behind an id, at most 1000, and in `after` the id to ask again with.

        Args:
            after: `start` for everything; by default no rows, and the id behind the newest.
        """
        return self._ask("GET", "/events", {} if after is None else {"after": after})

    def _ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        accepted: int | None = None,
    ) -> dict[str, Any]:
        reply = self._send(method, path, parameters, body, accepted)
        with suppress(ValueError):
            content = reply.json()
            if isinstance(content, dict):
                return content
        raise ServiceError(f"{self._url}{path} did not answer with a JSON object; is it the address of `cpsr serve`?")

    def _send(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        accepted: int | None = None,
    ) -> httpx.Response:
        try:
            reply = self._http.request(method, path, params={**self._run, **(parameters or {})}, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not reply.is_success and reply.status_code != accepted:
            raise self._refused(reply)
        return reply

    def _unreachable(self, error: httpx.HTTPError) -> ServiceError:
        what = str(error) or type(error).__name__
        return ServiceError(f"the service at {self._url} cannot be reached: {what}; start it with `cpsr serve`")

    def _refused(self, reply: httpx.Response) -> ServiceError:
        refusal: dict[str, Any] = {}
        with suppress(ValueError):
            refusal = reply.json()
        if not isinstance(refusal, dict) or "code" not in refusal:
            return ServiceError(f"{self._url} answered with status {reply.status_code}", status=reply.status_code)
        message = f"{self._url} refuses: {refusal.get('message')}; {refusal.get('hint')}"
        return ServiceError(message, str(refusal["code"]), reply.status_code)
