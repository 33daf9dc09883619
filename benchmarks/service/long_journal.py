"""The journal of a run of many months, as its job would have left it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from cpsr.journal import CheckpointRow, Journal, PhaseRow, PlanRow
from cpsr.journal.database import prepare
from cpsr.journal.rows import encode
from cpsr.journal.writer import thin
from cpsr.planner.inputs import Limits, PlannerInputs
from cpsr.planner.planning import make_plan
from cpsr.planner.recovery_curve import EndCostCurve

__all__ = ["fill", "thin_out"]

ROWS_AT_ONCE = 200_000
PHASE_ITERATIONS = 1_000  # the longest that a phase may be: the most phases that a run can have
PHASES_MAX = 1_000
ITERATION_SECONDS = 0.6
BEGAN_UNIX_SECONDS = 1764000000.0
CURVE = EndCostCurve(-40.0, 0.6, 0.05, 15.0)
JOB = PlannerInputs(ITERATION_SECONDS, 0.9, 5.0, 1 / 43200, CURVE)


def fill(run_dir: Path, steps: int, checkpoints: int, on_rows: Callable[[int], None]) -> None:
    """Write a run's journal with so many steps and checkpoints, every one of them kept."""
    run_dir.mkdir(parents=True)
    _record_plans(run_dir / "journal.db", steps)
    _fill(run_dir / "journal.db", steps, checkpoints, on_rows)


def thin_out(path: Path, full_steps: int) -> int:
    """Thin out the old steps, as the job's writer does beside training; returns how many steps are left.

    The file is then as small as it would be if that had been done from its beginning.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        prepare(connection, path)
        thin(connection, full_steps)
        connection.execute("VACUUM")
        (left,) = connection.execute("SELECT COUNT(*) FROM steps").fetchone()
        return int(left)
    finally:
        connection.close()


def _record_plans(path: Path, steps: int) -> None:
    journal = Journal.open(path)
    life = journal.start_life("auto")
    plan = make_plan(JOB, Limits(10, 500))
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
    steps_ = "steps (life, iteration, loss, learning_rate, seconds, applied)"
    step_values = "SELECT 0, i, 2.0 + 6.0 / (1.0 + i * 1e-3), 3e-4, ?, 1 FROM numbers"
    checkpoint = CheckpointRow(
        life=0,
        iteration=0,
        status="committed",
        bytes=4_200_000_000,
        stall_seconds=0.9,
        write_seconds=5.0,
        commit_seconds=0.4,
        created_unix_seconds=BEGAN_UNIX_SECONDS,
    )
    events = "events (kind, life, iteration, unix_seconds, content)"
    event_values = (
        "SELECT 'checkpoint', 0, i * :apart, :began + i, json_set(:content, '$.iteration', i * :apart, "
        "'$.created_unix_seconds', :began + i) FROM numbers"
    )
    try:
        prepare(connection, path)
        for first in range(1, steps + 1, ROWS_AT_ONCE):
            last = min(steps, first + ROWS_AT_ONCE - 1)
            connection.execute(f"INSERT INTO {steps_} {numbers} {step_values}", (first, last, ITERATION_SECONDS))
            on_rows(last)
        apart = steps // checkpoints
        values = {"apart": apart, "began": BEGAN_UNIX_SECONDS, "content": encode(checkpoint), "last": checkpoints}
        counted = numbers.replace("SELECT ?", "SELECT 1").replace("?", ":last")
        connection.execute(f"INSERT INTO {events} {counted} {event_values}", values)
    finally:
        connection.close()  # which takes the WAL into the file
