"""`cpsr inspect`: lives, checkpoints and recoveries in the journal of a run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpsr.journal import CheckpointRow, EventRow, JournalReader, LifeRow, RecoveryRow, json_ready
from cpsr.ranks.exits import BEGAN, FAILED
from cpsr.tables import print_table

__all__ = ["print_run", "run_json"]

TABLE_ROWS_MAX = 20  # newest checkpoints in a table; --json has all


def run_json(directory: Path) -> str:
    """Everything in the journal of a run directory but losses and events, as JSON.

    Raises:
        CPSRError: there is no journal that can be read.
    """
    with JournalReader(directory / "journal.db") as reader:
        plan = reader.latest_plan()
        rows: dict[str, Sequence[Any]] = {
            "lives": reader.lives(),
            "checkpoints": reader.checkpoints(),
            "failures": reader.failures(),
            "recoveries": reader.recoveries(),
            "phases": reader.phases(),
            "plans": [] if plan is None else [plan],
        }
    # NaN has no number in JSON; a reader that gets its name cannot take it for one.
    return json.dumps(json_ready({name: [dataclasses.asdict(one) for one in found] for name, found in rows.items()}))


def print_run(directory: Path) -> None:
    """Print tables of lives and checkpoints, and what was said of each recovery.

    Raises:
        CPSRError: there is no journal that can be read.
    """
    with JournalReader(directory / "journal.db") as reader:
        lives = _lives_table(reader.lives(), reader.restored_iterations(), reader.events(FAILED))
        checkpoints, recoveries = reader.checkpoints(), reader.recoveries()
        began = {event.life: event.message for event in reader.events(BEGAN)}
        plan, phases = reader.latest_plan(), len(reader.phases())
    console = Console()
    print_table(console, lives, _checkpoints_table(checkpoints))
    if recoveries:
        print_table(console, _recoveries_table(recoveries))
        for row in recoveries:
            console.print(f"Life {row.life}: {escape(began.get(row.life, ''))} ({escape(row.reason)})", highlight=False)
    else:
        console.print("No recovery so far.")
    if plan is not None:
        console.print(
            f"From iteration {plan.from_iteration} on a checkpoint every {plan.interval_iterations} iterations"
            f"{_in_memory(plan.memory_interval_iterations)} ({plan.origin}); phases so far: {phases}"
        )


def _in_memory(every_iterations: int | None) -> str:
    return "" if every_iterations is None else f", in memory every {every_iterations}"


def _lives_table(lives: Sequence[LifeRow], restored: Mapping[int, int], failed: Sequence[EventRow]) -> Table:
    # The next life records how one ended: it reads the notes that launcher and ranks have left.
    causes = {event.life - 1: event.message for event in failed}
    table = Table("life", "ranks", "restored at", "ending", "seconds", "process", title="Lives")
    for life in lives:
        killed = life.ending == "running" and life.life < lives[-1].life
        seconds = None if life.ended_unix_seconds is None else life.ended_unix_seconds - life.started_unix_seconds
        table.add_row(
            str(life.life),
            "-" if life.ranks is None else str(life.ranks),
            str(restored.get(life.life, "scratch")),
            escape(causes.get(life.life, "killed" if killed else life.ending)),
            _number(seconds),
            f"{life.pid} on {life.host}",
        )
    return table


def _checkpoints_table(checkpoints: Sequence[CheckpointRow]) -> Table:
    shown = checkpoints[-TABLE_ROWS_MAX:]
    title = (
        "Checkpoints" if len(shown) == len(checkpoints) else f"Newest {len(shown)} of {len(checkpoints)} checkpoints"
    )
    table = Table("iteration", "status", "bytes", "origin", "stall s", "reason", title=title)
    for row in shown:
        bytes_ = "-" if row.bytes is None else f"{row.bytes:,}"
        table.add_row(
            str(row.iteration), row.status, bytes_, row.origin, _number(row.stall_seconds), escape(row.reason)
        )
    return table


def _recoveries_table(recoveries: Sequence[RecoveryRow]) -> Table:
    table = Table("life", "failed at", "checkpoint", "restored at", "method", "outcome", title="Recoveries")
    for row in recoveries:
        iterations = (row.failure_iteration, row.checkpoint_iteration, row.restored_iteration)
        table.add_row(str(row.life), *("-" if at is None else str(at) for at in iterations), row.method, row.outcome)
    return table


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
