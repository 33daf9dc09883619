"""The HTTP service over a run directory: it reads the journal, and training does not depend on it."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from cpsr.service import events, history, metrics, plan, run
from cpsr.service.access import STATIC, Access, Gate
from cpsr.service.problems import PROBLEMS, answer_problems

__all__ = ["PAGE", "create_app"]

PAGE = Path(__file__).parent / "static"  # the dashboard: one page and its files, which fetch all data from this service
# The page loads only this service's files, and no other page may frame it: markup in a journal's text cannot make a
# browser execute it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Referrer-Policy": "no-referrer",
}


class _Files(StaticFiles):
    """Files with the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file; raises HTTPException where there is none."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def create_app(run_dir: Path, access: Access | None = None) -> FastAPI:
    """The service over `run_dir`, which need not exist yet: its absence is answered with 503.

    Args:
        run_dir: of the run.
        access: who may ask; by default this machine may read.
    """
    access = access or Access()
    # The interactive pages load scripts from elsewhere; this service works without a network.
    app = FastAPI(title="CPSR", docs_url=None, redoc_url=None)
    app.state.run_dir = run_dir
    app.state.access = access
    answer_problems(app)
    for noun in (plan, history, events, metrics, run):
        app.include_router(noun.router, responses=PROBLEMS)

    @app.get("/", include_in_schema=False)
    def get_page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=_HEADERS)

    app.mount(STATIC, _Files(directory=PAGE))
    app.add_middleware(Gate, access=access)
    return app
