"""`cpsr plan --hints`: which hints should be checkpoints, as a table or JSON."""

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpsr.hints.placement import Checkpoint, Placement, Task, hints_of, place
from cpsr.hints.spec import read_hints_spec
from cpsr.planner.units import SECONDS_PER_HOUR
from cpsr.tables import print_table

__all__ = ["run_hints"]


def run_hints(path: Path, as_json: bool) -> None:
    """Place the checkpoints of a described program, and print them.

    Args:
        path: the description.
        as_json: print one JSON object.

    Raises:
        ConfigError: the description is not usable, or the program would never end.
    """
    spec = read_hints_spec(path)
    tasks = spec.placement_tasks()
    placement = place(tasks, spec.allowance_fraction, spec.mtbf_hours * SECONDS_PER_HOUR)
    hints = hints_of(tasks)
    if as_json:
        names = [name for name, _ in hints]
        print(json.dumps({"hints": names, **dataclasses.asdict(placement)}, allow_nan=False))  # noqa: T201
        return
    console = Console()
    print_table(console, _hints_table(hints, placement), _costs_table(placement))
    saved = placement.unprotected_recovery_seconds - placement.recovery_seconds
    if saved < placement.cost_seconds:
        console.print(f"The checkpoints cost {placement.cost_seconds:.4g} s and save {saved:.4g} s: allow less.")


def _hints_table(hints: list[tuple[str, Task]], placement: Placement) -> Table:
    chosen: dict[int, list[Checkpoint]] = {}
    for checkpoint in placement.checkpoints:
        chosen.setdefault(checkpoint.hint, []).append(checkpoint)
    table = Table("hint after", "repetitions", "cost s", "checkpoint", "times", title="Hints")
    for index, (name, task) in enumerate(hints):
        found = chosen.get(index, [])
        table.add_row(
            escape(name),
            str(task.repetitions),
            f"{task.cost_seconds:.4g}",
            ", ".join(_rule(one, task) for one in found) or "-",
            str(sum(one.count for one in found)) if found else "-",
        )
    return table


def _rule(checkpoint: Checkpoint, task: Task) -> str:
    return "yes" if task.repetitions == 1 and checkpoint.every == 1 else f"every {checkpoint.every}"


def _costs_table(placement: Placement) -> Table:
    """The expected costs; the allowance is in the title."""
    title = f"Expected, of {placement.program_seconds:.4g} s; {placement.allowed_seconds:.4g} s allowed"
    table = Table("placement", "checkpoints", "cost s", "recovery s", title=title)
    count = sum(one.count for one in placement.checkpoints)
    table.add_row("chosen", str(count), f"{placement.cost_seconds:.4g}", f"{placement.recovery_seconds:.4g}")
    if placement.even is not None:
        even = placement.even
        table.add_row("evenly spaced", str(even.count), f"{even.cost_seconds:.4g}", f"{even.recovery_seconds:.4g}")
    table.add_row("none", "0", "0", f"{placement.unprotected_recovery_seconds:.4g}")
    table.add_row("no schedule is below", "", "", f"{placement.least_recovery_seconds:.4g}")
    return table
