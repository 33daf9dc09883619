"""The answers themselves: what the journal and `run.json` say, put together without HTTP."""

import dataclasses
import json
import math
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from cpsr.errors import JournalError
from cpsr.journal import (
    CheckpointRow,
    JournalReader,
    LifeRow,
    PlanRow,
    RecoveryRow,
    RehearsalRow,
    StepRow,
    json_ready,
    reported_failures,
)
from cpsr.service.schema import Checkpoint, Failure, FailureList, Health, PlanReply, RankPlan, Recovery, Rehearsal

__all__ = ["failures", "health", "plan"]

RECENT_STEPS = 101  # enough that the median ignores the steps that a checkpoint or a cold start made slow
# A journal that is written every few dozen iterations is late after this many, or after two minutes for fast steps.
STALE_ITERATIONS = 200
STALE_SECONDS = 120.0
WORLD_SIZE_MAX = 1_000_000  # more than any job has; a damaged run.json must not fill the memory with ranks


def plan(run_dir: Path) -> PlanReply | None:
    """The current plan; None where the run has not planned yet.

    Raises:
        JournalError: the journal cannot be read, or holds what this version does not know.
    """
    try:
        return _plan(run_dir)
    except ValidationError as error:
        raise JournalError(f"the journal in {run_dir} holds values that this version does not know: {error}") from error


def _plan(run_dir: Path) -> PlanReply | None:
    identity, warnings = _identity(run_dir)
    with JournalReader(run_dir / "journal.db") as reader:
        current = reader.latest_plan()
        if current is None:
            return None
        steps = reader.recent_steps(RECENT_STEPS)
        lives = reader.lives()
        checkpoint, recovery = reader.latest_checkpoint(), reader.latest_recovery()
        descends = _descends_from_predicted(reader, recovery)
        rehearsals = reader.rehearsals()
    world_size = identity.get("world_size")
    return PlanReply(
        run_id=identity.get("run_id"),
        mode=lives[-1].mode if lives else identity.get("mode"),
        world_size=world_size,
        last_iteration=steps[0].iteration if steps else None,
        ranks=_ranks(current, world_size or 1, steps),
        recovery_mode=current.mode,
        explanation=json_ready(current.explanation),
        planned_unix_seconds=current.created_unix_seconds,
        newest_checkpoint=_checkpoint(checkpoint),
        last_recovery=_recovery(recovery),
        last_rehearsal=_rehearsal(rehearsals),
        descends_from_predicted=descends,
        warnings=warnings,
    )


def failures(run_dir: Path, limit: int) -> FailureList:
    """Failures that the job saw and that were reported, newest first.

    Raises:
        JournalError: the journal or the reports cannot be read.
    """
    with JournalReader(run_dir / "journal.db") as reader:
        seen = [
            Failure(
                iteration=row.iteration,
                checkpoint_iteration=row.checkpoint_iteration,
                description=row.description,
                failed_unix_seconds=row.detected_unix_seconds,
                reported=False,
            )
            for row in reader.failures()
        ]
    told = [
        Failure(
            iteration=None,
            checkpoint_iteration=None,
            description=one.description,
            failed_unix_seconds=one.failed_unix_seconds,
            reported=True,
        )
        for one in reported_failures(run_dir)
    ]
    newest = sorted(seen + told, key=lambda failure: failure.failed_unix_seconds, reverse=True)
    return FailureList(failures=newest[:limit], total=len(newest))


def health(run_dir: Path) -> Health:
    """Judge the run by its journal; never raises for a journal that cannot be read."""
    path = run_dir / "journal.db"
    try:
        age_seconds = _age_seconds(path)
        with JournalReader(path) as reader:
            lives, steps = reader.lives(), reader.recent_steps(RECENT_STEPS)
            checkpoints = reader.recent_checkpoints(1)
    except (JournalError, OSError) as error:
        return Health(status="degraded", reason=str(error), journal_age_seconds=None, last_iteration=None)
    reason = _trouble(lives, steps, checkpoints, age_seconds)
    return Health(
        status="degraded" if reason else "ok",
        reason=reason,
        journal_age_seconds=age_seconds,
        last_iteration=steps[0].iteration if steps else None,
    )


def _trouble(
    lives: list[LifeRow], steps: list[StepRow], checkpoints: list[CheckpointRow], age_seconds: float
) -> str | None:
    if not lives:
        return "the journal holds no life of the run yet"
    life = lives[-1]
    if life.ending == "error":
        return f"life {life.life} ended with an error"
    if life.ending == "running":
        if life.host == socket.gethostname() and not psutil.pid_exists(life.pid):
            return f"life {life.life} was killed: its process {life.pid} is gone and no later life has started"
        stale_seconds = max(STALE_SECONDS, STALE_ITERATIONS * (_iteration_seconds(steps) or 0.0))
        if age_seconds > stale_seconds:
            return f"the journal was last written {age_seconds:.0f} s ago, more than {stale_seconds:.0f} s"
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


def _iteration_seconds(steps: list[StepRow]) -> float | None:
    return statistics.median(step.seconds for step in steps) if steps else None


def _ranks(current: PlanRow, world_size: int, steps: list[StepRow]) -> list[RankPlan]:
    iteration_seconds = _iteration_seconds(steps)
    interval_seconds = None if iteration_seconds is None else current.interval_iterations * iteration_seconds
    return [
        RankPlan(
            rank=rank,
            interval_iterations=current.interval_iterations,
            interval_seconds=interval_seconds if interval_seconds is None or math.isfinite(interval_seconds) else None,
            origin=current.origin,
            from_iteration=current.from_iteration,
        )
        for rank in range(world_size)
    ]


def _descends_from_predicted(reader: JournalReader, recovery: RecoveryRow | None) -> bool | None:
    """Whether the state that is being trained now goes back to a predicted one."""
    if recovery is None:
        return False
    if recovery.method == "scratch":
        return False
    exact_iteration: int | None = recovery.restored_iteration
    if recovery.predicted:
        if recovery.outcome in ("kept", "watching"):
            return True
        exact_iteration = recovery.checkpoint_iteration  # the exact state there took the place of the refused one
    checkpoint = None if exact_iteration is None else reader.latest_checkpoint(exact_iteration)
    return None if checkpoint is None else checkpoint.origin == "predicted"


def _checkpoint(row: CheckpointRow | None) -> Checkpoint | None:
    if row is None:
        return None
    return Checkpoint(
        iteration=row.iteration, bytes=row.bytes, origin=row.origin, created_unix_seconds=row.created_unix_seconds
    )


def _recovery(row: RecoveryRow | None) -> Recovery | None:
    return None if row is None else Recovery.model_validate(json_ready(dataclasses.asdict(row)), extra="ignore")


def _rehearsal(rows: list[RehearsalRow]) -> Rehearsal | None:
    if not rows:
        return None
    return Rehearsal.model_validate(json_ready(dataclasses.asdict(rows[-1])), extra="ignore")


def _identity(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """`run_id`, `world_size` and `mode` from `run.json`, and what was wrong with it."""
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
