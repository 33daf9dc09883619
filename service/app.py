"""The HTTP service over run directories: it reads their journals, and training does not depend on it."""

from pathlib import Path

from fastapi import FastAPI

from cpsr.service import (
    backtests,
    bubbles,
    checkpoints,
    events,
    failures,
    fits,
    health,
    losses,
    metrics,
    override,
    phases,
    plan,
    preview,
    recoveries,
    run_list,
)
from cpsr.service.access import Access
from cpsr.service.dashboard import mount_dashboard
from cpsr.service.events import Streams
from cpsr.service.gate import Gate, Limits
from cpsr.service.problems import PROBLEMS, answer_problems
from cpsr.service.runs import Runs

__all__ = ["create_app"]

NOUNS = (
    plan,
    preview,
    override,
    phases,
    losses,
    fits,
    checkpoints,
    failures,
    recoveries,
    backtests,
    bubbles,
    health,
    metrics,
    events,
    run_list,
)


def create_app(run_dir: Path, access: Access | None = None, limits: Limits | None = None) -> FastAPI:
    """The service over `run_dir`, which need not exist yet: its absence is answered with 503.

    Args:
        run_dir: of a run, or a directory that holds several.
        access: who may ask; by default this machine may read.
        limits: of one client.
    """
    access, limits = access or Access(), limits or Limits()
    # The interactive pages load scripts from elsewhere; this service works without a network.
    app = FastAPI(title="CPSR", docs_url=None, redoc_url=None)
    app.state.runs = Runs(run_dir)
    app.state.access = access
    app.state.streams = Streams(limits)
    answer_problems(app)
    for noun in NOUNS:
        app.include_router(noun.router, responses=PROBLEMS)
    mount_dashboard(app)
    app.add_middleware(Gate, access=access, limits=limits)
    return app
