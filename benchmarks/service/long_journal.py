"""The journal of a run of many months, as its job would have left it."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from cpsr.journal import CheckpointRow, Journal, PhaseRow, PlanRow, StepRow
from cpsr.journal.schema import TABLES, prepare
from cpsr.journal.thinning import thin
from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.plan import make_plan
from cpsr.planner.recovery_curve import EndCostCurve

__all__ = ["copied", "journal_of", "thin_out"]

ROWS_AT_ONCE = 200_000
PHASE_ITERATIONS = 1_000  # the longest that a phase may be: the most phases that a run can have
PHASES_MAX = 1_000
ITERATION_SECONDS = 0.6
CURVE = EndCostCurve.with_independent_prior((-40.0, 0.6, 0.05), (20.0, 0.3, 0.1), 15.0)
JOB = PlannerInputs(ITERATION_SECONDS, 0.9, 5.0, 1 / 43200, CURVE)


def journal_of(cache: Path, steps: int, checkpoints: int, on_rows: Callable[[int], None]) -> Path:
    """A journal with so many steps and checkpoints, every one of them kept; built where the cache has none.

    Args:
        cache: directory that keeps it.
        steps: number of rows.
        checkpoints: number of rows, evenly among the steps.
        on_rows: called with the number of rows that are there.
    """
    path = cache / f"journal-{steps}-{checkpoints}.db"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            _record_plans(unfinished, steps)
            _fill(unfinished, steps, checkpoints, on_rows)
            unfinished.replace(path)
        finally:
            for part in cache.glob(f"{unfinished.name}*"):  # with what SQLite keeps beside it
                part.unlink()
    on_rows(steps)
    return path


def copied(journal: Path, run_dir: Path) -> Path:
    """The journal as that of a run, which may write on."""
    run_dir.mkdir(parents=True)
    return Path(shutil.copyfile(journal, run_dir / "journal.db"))


def thin_out(path: Path, full_steps: int, on_slice: Callable[[], None]) -> int:
    """Thin out the old steps, as the job's writer does beside training; returns how many steps are left.

    The file is then as small as it would be if that had been done from its beginning.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        prepare(connection, path)
        while thin(connection, full_steps):
            on_slice()
        connection.execute("VACUUM")
        (left,) = connection.execute("SELECT COUNT(*) FROM steps").fetchone()
        return int(left)
    finally:
        connection.close()


def _record_plans(path: Path, steps: int) -> None:
    journal = Journal.open(path)
    life = journal.start_life("auto")
    plan = make_plan([JOB], Limits(10, 500))
    for phase in range(min(PHASES_MAX, steps // PHASE_ITERATIONS)):
        first, last = phase * PHASE_ITERATIONS, (phase + 1) * PHASE_ITERATIONS
        journal.record(
            PhaseRow(
                life=life,
                phase=phase,
                first_iteration=first,
                last_iteration=last,
                xi=1.0,
                last_xi=0.9,
                ended_by="length",
            )
        )
        journal.record(
            PlanRow(
                life=life,
                from_iteration=last,
                interval_iterations=plan.interval_iterations,
                origin=plan.origin,
                mode=plan.mode,
                explanation=plan.explanation,
            )
        )
    journal.end_life("sigterm")
    journal.close()


def _fill(path: Path, steps: int, checkpoints: int, on_rows: Callable[[int], None]) -> None:
    """Rows made inside SQLite: ten million of them from here would take minutes."""
    connection = sqlite3.connect(path, isolation_level=None)
    numbers = "WITH RECURSIVE numbers(i) AS (SELECT ? UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)"
    step = f"{TABLES[StepRow]} (life, iteration, loss, learning_rate, seconds, applied)"
    step_values = "SELECT 0, i, 2.0 + 6.0 / (1.0 + i * 1e-3), 3e-4, ?, 1 FROM numbers"
    checkpoint = (
        f"{TABLES[CheckpointRow]} (life, iteration, status, reason, bytes, stall_seconds, write_seconds, "
        "commit_seconds, origin, created_unix_seconds)"
    )
    checkpoint_values = (
        "SELECT 0, i * ?, 'committed', '', 4200000000, 0.9, 5.0, 0.4, 'trained', 1764000000.0 + i FROM numbers"
    )
    try:
        prepare(connection, path)
        for first in range(1, steps + 1, ROWS_AT_ONCE):
            last = min(steps, first + ROWS_AT_ONCE - 1)
            connection.execute(f"INSERT INTO {step} {numbers} {step_values}", (first, last, ITERATION_SECONDS))
            on_rows(last)
        apart = steps // checkpoints
        connection.execute(f"INSERT INTO {checkpoint} {numbers} {checkpoint_values}", (1, checkpoints, apart))
    finally:
        connection.close()  # which takes the WAL into the file
