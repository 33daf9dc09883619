"""The dashboard: one static page and its files, which fetch all data of runs from this service."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

__all__ = ["FILES", "is_page", "mount_dashboard"]

FILES = Path(__file__).parent / "static"

# The page loads only this service's files, and no other page may frame it: markup in a journal's text cannot make a
# browser execute it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Referrer-Policy": "no-referrer",
}
_PREFIX = "/static"


class _Files(StaticFiles):
    """Files with the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file; raises HTTPException where there is none."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def is_page(path: str) -> bool:
    """Whether a path is the page or one of its files, which a browser requests before it can send a token."""
    return path == "/" or path.startswith(f"{_PREFIX}/")


def mount_dashboard(app: FastAPI) -> None:
    """Answer `/` and `/static/...`."""

    @app.get("/", include_in_schema=False)
    def get_page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=_HEADERS)

    app.mount(_PREFIX, _Files(directory=FILES))
