"""Totals of the run's time, kept by the writer beside the rows that they are of, so that no reader adds up steps.

A step counts when it is recorded. It is a repeated one if its iteration was completed before, by any life. Rows of
steps are about one a minute and only of the last hours; the others, a few for each life, stay.
"""

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from cpsr.journal.rows import CheckpointRow, FailureRow, LifeRow, StepRow, TotalsRow, from_sql, to_sql
from cpsr.journal.schema import insert_sql, select_sql

__all__ = ["IN_ORDER", "add_checkpoint_stall", "add_memory_stalls", "add_steps", "begin_life", "end_failed"]

ROW_SECONDS = 60.0  # between two rows of steps; the newest one is written again until then
KEPT_SECONDS = 7200.0  # of rows of steps: twice what the service looks back
PACE_STEPS = 20  # the newest steps before a failure, whose mean is that of the steps that it kept from the journal
IN_ORDER = ("clean", "sigterm")  # endings of a life after which no restart is due


def begin_life(connection: sqlite3.Connection, life: LifeRow) -> None:
    """A life begins: the time since the one before it, if that ended in good order, is a pause."""
    last = _newest(connection)
    if last is None:
        _insert(connection, _origin(connection, life.life, life.started_unix_seconds))
        return
    found = connection.execute(
        "SELECT life, ending, ended_unix_seconds FROM lives WHERE life < ? ORDER BY life DESC LIMIT 1", (life.life,)
    ).fetchone()
    if found is None or found[1] not in IN_ORDER or found[2] is None:
        return  # the restart lasts until the first step
    ended = max(last.created_unix_seconds, found[2])
    end = replace(last, life=found[0], moment="end", created_unix_seconds=ended)
    started = max(ended, life.started_unix_seconds)
    paused = last.paused_seconds + started - ended
    start = replace(end, life=life.life, moment="start", paused_seconds=paused, created_unix_seconds=started)
    _insert(connection, end)
    _insert(connection, start)


def add_steps(connection: sqlite3.Connection, steps: Sequence[StepRow], at: float) -> None:
    """Count steps of one life, before they are recorded.

    Args:
        connection: of the writer, inside a transaction.
        steps: in their order.
        at: seconds since 1970 at which they were reported, at the end of the last one.
    """
    life, seconds = steps[-1].life, sum(_finite(step.seconds) for step in steps)
    last = _newest(connection)
    if last is None:
        last = _origin(connection, life, at - seconds)
        _insert(connection, last)
    at = max(at, last.created_unix_seconds)  # the clock may go back
    if last.life != life or last.moment != "step":
        last = _first(connection, last, life, max(last.created_unix_seconds, at - seconds))
    for step in steps:
        last = _stepped(last, step.iteration, _finite(step.seconds))
    _put(connection, replace(last, moment="step", created_unix_seconds=at))


def end_failed(connection: sqlite3.Connection, failure: FailureRow) -> None:
    """A life has failed: steps that it took and could not report count as long as its last ones, up to the restart."""
    last = _newest(connection)
    if last is None:
        return
    if last.life == failure.life and last.moment == "step" and failure.iteration > last.iteration:
        began = "SELECT MIN(started_unix_seconds) FROM lives WHERE life > ?"
        (until,) = connection.execute(began, (last.life,)).fetchone()
        newest = "SELECT seconds FROM steps WHERE life = ? ORDER BY row DESC LIMIT ?"
        paces = [_finite(seconds) for (seconds,) in connection.execute(newest, (last.life, PACE_STEPS))]
        if until is not None and paces:
            missing = failure.iteration - last.iteration
            seconds = min(missing * sum(paces) / len(paces), max(0.0, until - last.created_unix_seconds))
            again = min(missing, max(0, last.reached_iteration - last.iteration))
            _insert(
                connection,
                replace(
                    last,
                    moment="failure",
                    iteration=failure.iteration,
                    reached_iteration=max(last.reached_iteration, failure.iteration),
                    step_seconds=last.step_seconds + seconds,
                    repeated_seconds=last.repeated_seconds + seconds * again / missing,
                    created_unix_seconds=last.created_unix_seconds + seconds,
                ),
            )
            return
    if failure.iteration > last.reached_iteration:
        _update(connection, replace(last, reached_iteration=failure.iteration))


def add_checkpoint_stall(connection: sqlite3.Connection, checkpoint: CheckpointRow) -> None:
    """Count what a checkpoint kept training from its work; it did so in the step after it."""
    last, seconds = _newest(connection), _finite(checkpoint.stall_seconds)
    if last is None or not seconds:
        return
    until = last.repeated_until_iteration if last.life == checkpoint.life else last.reached_iteration
    again = seconds if checkpoint.iteration < until else 0.0
    stalled = last.checkpoint_stall_seconds + seconds
    repeated = last.repeated_stall_seconds + again
    _update(connection, replace(last, checkpoint_stall_seconds=stalled, repeated_stall_seconds=repeated))


def add_memory_stalls(connection: sqlite3.Connection, snapshots: int, seconds: float) -> None:
    """Count what snapshots to host memory kept training from its work, in the steps that were reported last."""
    last, seconds = _newest(connection), _finite(seconds)
    if last is None:
        return
    again = seconds if last.iteration <= last.repeated_until_iteration else 0.0
    _update(
        connection,
        replace(
            last,
            memory_stall_seconds=last.memory_stall_seconds + seconds,
            repeated_stall_seconds=last.repeated_stall_seconds + again,
            memory_snapshots=last.memory_snapshots + snapshots,
        ),
    )


def _first(connection: sqlite3.Connection, last: TotalsRow, life: int, begun: float) -> TotalsRow:
    """The row for the begin of a life's first step; after a failure, all time since the row before was the restart."""
    between = f"life >= ? AND life < ? AND ending NOT IN ({', '.join('?' * len(IN_ORDER))})"
    counted = f"SELECT COUNT(*) FROM lives WHERE {between}"  # noqa: S608 - no input in it
    (failed,) = connection.execute(counted, (last.life, life, *IN_ORDER)).fetchone()
    restart = last.restart_seconds + (begun - last.created_unix_seconds if failed else 0.0)
    first = replace(last, life=life, moment="first", restart_seconds=restart, created_unix_seconds=begun)
    _insert(connection, first)
    return first


def _stepped(last: TotalsRow, iteration: int, seconds: float) -> TotalsRow:
    if iteration > last.reached_iteration:
        return replace(last, iteration=iteration, reached_iteration=iteration, step_seconds=last.step_seconds + seconds)
    return replace(
        last,
        iteration=iteration,
        repeated_until_iteration=last.reached_iteration,
        step_seconds=last.step_seconds + seconds,
        repeated_seconds=last.repeated_seconds + seconds,
    )


def _origin(connection: sqlite3.Connection, life: int, at: float) -> TotalsRow:
    """The first row of a file."""
    (reached,) = connection.execute("SELECT COALESCE(MAX(iteration), 0) FROM steps").fetchone()
    return TotalsRow(life=life, moment="start", iteration=reached, reached_iteration=reached, created_unix_seconds=at)


def _newest(connection: sqlite3.Connection) -> TotalsRow | None:
    found = connection.execute(f"{select_sql(TotalsRow)} ORDER BY row DESC LIMIT 1").fetchone()
    return None if found is None else from_sql(TotalsRow, found)


def _put(connection: sqlite3.Connection, row: TotalsRow) -> None:
    """Write a row of steps: in place of the newest one, unless a minute has passed since the row before that."""
    rows = connection.execute("SELECT moment, created_unix_seconds FROM totals ORDER BY row DESC LIMIT 2").fetchall()
    if rows[0][0] == "step" and row.created_unix_seconds - rows[1][1] < ROW_SECONDS:
        _update(connection, row)
        return
    _insert(connection, row)
    old = row.created_unix_seconds - KEPT_SECONDS
    connection.execute("DELETE FROM totals WHERE moment = 'step' AND created_unix_seconds < ?", (old,))


def _insert(connection: sqlite3.Connection, row: TotalsRow) -> None:
    connection.execute(insert_sql(TotalsRow), to_sql(row))


def _update(connection: sqlite3.Connection, row: TotalsRow) -> None:
    """Write a row in place of the newest one."""
    (number,) = connection.execute("SELECT MAX(row) FROM totals").fetchone()
    replaced = insert_sql(TotalsRow, ("row",)).replace("INSERT", "INSERT OR REPLACE", 1)
    connection.execute(replaced, (*to_sql(row), number))


def _finite(seconds: float | str | None) -> float:
    """The seconds; 0 where they are not known, or no duration."""
    value = 0.0 if seconds is None else float(seconds)
    return value if math.isfinite(value) and value > 0 else 0.0
