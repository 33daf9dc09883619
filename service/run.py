"""The runs of a service, and what each of them is: its identity, its journal and its health."""

import json
import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from cpsr.errors import JournalError
from cpsr.journal import CheckpointRow, JournalReader, LifeRow, StepRow, json_ready
from cpsr.service.problems import Problem

__all__ = [
    "LIMIT_MAX",
    "RECENT_STEPS",
    "Health",
    "LifeState",
    "RunDir",
    "Runs",
    "health_of",
    "identity_of",
    "iteration_seconds",
    "life_state",
    "open_journal",
    "plain_row",
    "router",
]

LIMIT_MAX = 1000
RUN_FILES = ("run.json", "journal.db")  # either of them shows that a directory is a run's
NAMES_LISTED = 5
NAME_BYTES = 255  # longer ones are no entry of any directory, and asking for them is an error
WORLD_SIZE_MAX = 1_000_000  # more than any job has; a damaged run.json must not fill the memory with ranks
RECENT_STEPS = 101  # enough that the median ignores the steps that a checkpoint or a cold start made slow
# A journal that is written every few dozen iterations is late after this many, or after two minutes for fast steps.
STALE_ITERATIONS = 200
STALE_SECONDS = 120.0

LifeState = Literal["running", "silent", "killed", "clean", "sigterm", "error"]

router = APIRouter(tags=["runs"])


class Health(BaseModel):
    """Whether the run is visible, and its health as its journal shows it."""

    status: Literal["ok", "degraded"]
    reason: str | None = Field(description="Why it is degraded.")
    life: LifeState | None = Field(
        description="Of the newest life: `running`; `silent`, not heard of for too long; `killed`; or how it "
        "ended: `clean`, `sigterm`, `error`. null where there is none."
    )
    journal_age_seconds: float | None = Field(description="Since the journal was last written; null without one.")
    last_iteration: int | None


class RunSummary(Health):
    """One run, and its health."""

    name: str = Field(description="For the parameter `run` of every other operation.")
    run_id: str | None
    world_size: int | None


class RunList(BaseModel):
    """The runs of this service, by name."""

    runs: list[RunSummary]
    total: int


class Runs:
    """Finds run directories by name, only inside its own directory.

    A directory that is a run itself, or does not hold any, is the only one: it need not exist yet.

    Args:
        root: a run directory, or one that holds several.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        """The names of all runs, in order; at least one."""
        runs = [] if _is_run(self.root) else self._children()
        return runs or [self._own_name]

    def find(self, name: str | None) -> Path:
        """The directory of a run.

        Args:
            name: None where there is only one.

        Raises:
            Problem: there is no run of this name (404), or several and none is named (409).
        """
        if name is not None and not _is_run(self.root):
            path = self.root / name
            # Only a name of one entry of this directory, which is no link, so that it cannot lead anywhere else.
            if _is_entry(name) and len(os.fsencode(name)) <= NAME_BYTES and not path.is_symlink() and _is_run(path):
                return path
        names = self.names()
        if name is None and len(names) > 1:
            listed = ", ".join(names[:NAMES_LISTED])
            raise Problem(409, "run_needed", f"there are {len(names)} runs: {listed}", "name one of them with ?run=")
        if names == [self._own_name] and name in (None, self._own_name):
            return self.root
        if name is None:
            return self.root / names[0]
        raise Problem(404, "no_such_run", f"there is no run {name[:100]!r} here", "GET /runs lists those there are")

    @property
    def _own_name(self) -> str:
        return self.root.absolute().name or "run"

    def _children(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []  # reported with the journal, which cannot be read either
        return sorted(name for name in folders if _is_run(self.root / name))


def _is_entry(name: str) -> bool:
    return "\0" not in name and "/" not in name and os.sep not in name and name not in ("", os.curdir, os.pardir)


def _is_run(directory: Path) -> bool:
    try:
        return any((directory / name).exists() for name in RUN_FILES)
    except OSError:
        return False


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


RunDir = Annotated[Path, Depends(_run_dir)]


@router.get("/runs", operation_id="list_runs")
def list_runs(request: Request) -> RunList:
    """The runs that can be asked about."""
    runs: Runs = request.app.state.runs
    names = runs.names()
    return RunList(runs=[_summary(name, runs.find(name)) for name in names[:LIMIT_MAX]], total=len(names))


@router.get("/healthz", operation_id="get_health", response_model=Health, responses={503: {"model": Health}})
def get_health(run_dir: RunDir) -> JSONResponse:
    """Health of the run: 200, or 503 with the reason."""
    health = health_of(run_dir)
    status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(health.model_dump(mode="json"), status)


def open_journal(run_dir: Path) -> JournalReader:
    """The journal of a run, for reading alone; close it, or use it as a context manager.

    Raises:
        JournalError: it cannot be read.
    """
    return JournalReader(run_dir / "journal.db")


def plain_row(row: Any) -> dict[str, Any]:
    """A row as data that JSON takes; numbers that are not finite are given by their names."""
    plain: dict[str, Any] = json_ready(asdict(row))
    return plain


def identity_of(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """`run_id`, `world_size` and `mode`, as far as `run.json` has them, and what was wrong with the others."""
    path = run_dir / "run.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, [f"{path} is absent: run_id and world_size are unknown"]
    except (OSError, ValueError) as error:
        return {}, [f"{path} cannot be read: {error}"]
    if not isinstance(data, dict):
        return {}, [f"{path} holds no object: run_id and world_size are unknown"]
    expected: dict[str, type] = {"run_id": str, "world_size": int, "mode": str}
    wrong = [key for key, kind in expected.items() if type(data.get(key)) is not kind]
    if "world_size" not in wrong and not 1 <= data["world_size"] <= WORLD_SIZE_MAX:
        wrong.append("world_size")
    identity = {key: data[key] for key in expected if key not in wrong}
    return identity, [f"{path}: {key!r} is missing or not usable" for key in wrong]


def health_of(run_dir: Path) -> Health:
    """Judge the run by its journal; never raises for a journal that cannot be read."""
    path = run_dir / "journal.db"
    try:
        age_seconds = _age_seconds(path)
        with JournalReader(path) as reader:
            lives, steps, checkpoints = (
                reader.lives(),
                reader.recent_steps(RECENT_STEPS),
                reader.newest(CheckpointRow, 1),
            )
    except (JournalError, OSError) as error:
        return Health(status="degraded", reason=str(error), life=None, journal_age_seconds=None, last_iteration=None)
    stale_seconds = _stale_seconds(steps)
    state = _state(lives[-1], age_seconds > stale_seconds) if lives else None
    reason = _trouble(lives, state, checkpoints, f"{age_seconds:.0f} s ago, more than {stale_seconds:.0f} s")
    return Health(
        status="degraded" if reason else "ok",
        reason=reason,
        life=state,
        journal_age_seconds=age_seconds,
        last_iteration=steps[0].iteration if steps else None,
    )


def life_state(path: Path, lives: Sequence[LifeRow], steps: Sequence[StepRow]) -> LifeState | None:
    """How the newest life stands; None where there is none.

    Args:
        path: of the journal.
        lives: oldest first.
        steps: the recent ones.

    Raises:
        OSError: the file cannot be reached.
    """
    return _state(lives[-1], _age_seconds(path) > _stale_seconds(steps)) if lives else None


def iteration_seconds(steps: Sequence[StepRow]) -> float | None:
    """Median of some steps; None where there are none, or it is not known."""
    median = statistics.median(step.seconds for step in steps) if steps else math.nan
    return median if math.isfinite(median) else None


def _summary(name: str, run_dir: Path) -> RunSummary:
    identity, _ = identity_of(run_dir)
    health = health_of(run_dir).model_dump()
    return RunSummary(name=name, run_id=identity.get("run_id"), world_size=identity.get("world_size"), **health)


def _stale_seconds(steps: Sequence[StepRow]) -> float:
    return max(STALE_SECONDS, STALE_ITERATIONS * (iteration_seconds(steps) or 0.0))


def _state(life: LifeRow, stale: bool) -> LifeState:
    if life.ending != "running":
        return life.ending
    if life.host == socket.gethostname() and not psutil.pid_exists(life.pid):
        return "killed"
    return "silent" if stale else "running"


def _trouble(
    lives: list[LifeRow], state: LifeState | None, checkpoints: list[CheckpointRow], written: str
) -> str | None:
    if state is None:
        return "the journal holds no life of the run yet"
    life = lives[-1]
    if state == "error":
        return f"life {life.life} ended with an error"
    if state == "killed":
        return f"life {life.life} was killed: its process {life.pid} is gone and no later life has started"
    if state == "silent":
        return f"the journal was last written {written}"
    if checkpoints and checkpoints[0].status == "failed":
        return f"the checkpoint at iteration {checkpoints[0].iteration} failed: {checkpoints[0].reason}"
    return None


def _age_seconds(path: Path) -> float:
    written = path.stat().st_mtime
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        written = max(written, wal.stat().st_mtime)
    # Another host's clock may be ahead.
    return max(0.0, time.time() - written)
