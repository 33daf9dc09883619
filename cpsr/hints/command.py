"""`cpsr plan --hints`: which hints of a described program should be checkpoints, as a table or JSON."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpsr.config import read_model
from cpsr.hints.placement import Placement, Task, hints_of, place
from cpsr.planner.inputs import SECONDS_PER_HOUR
from cpsr.tables import print_table

__all__ = ["HintsSpec", "read_hints_spec", "run_hints"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TaskSpec(_Section):
    """A task, or a loop over tasks, with a hint after each repetition."""

    name: str = Field(min_length=1)
    seconds: float | None = Field(default=None, ge=0, description="Of one repetition of a task without tasks in it.")
    tasks: tuple["TaskSpec", ...] = Field(default=(), description="The body, in place of seconds.")
    repetitions: int = Field(default=1, ge=1)
    hint: bool = Field(default=True, description="false: no checkpoint can be taken after it.")
    checkpoint_seconds: float | None = Field(default=None, gt=0, description="null: that of the description.")

    @model_validator(mode="after")
    def _has_a_time(self) -> "TaskSpec":
        if (self.seconds is None) == (not self.tasks):
            raise ValueError(f"{self.name}: give either seconds or tasks")
        if not self.hint and self.checkpoint_seconds is not None:
            raise ValueError(f"{self.name}: checkpoint_seconds needs a hint")
        return self

    def task(self, checkpoint_seconds: float) -> Task:
        """For the placement; the argument is the cost of a checkpoint where none is given."""
        return Task(
            self.name,
            self.seconds or 0.0,
            (self.checkpoint_seconds or checkpoint_seconds) if self.hint else None,
            self.repetitions,
            tuple(one.task(checkpoint_seconds) for one in self.tasks),
        )


class HintsSpec(_Section):
    """A program as a list of tasks, and what its checkpoints may cost; docs/hints.md has an example."""

    allowance_fraction: float = Field(ge=0, le=1, description="For checkpoints, of the time of all tasks.")
    mtbf_hours: float = Field(gt=0, description="Mean time between failures of the whole job.")
    checkpoint_seconds: float = Field(gt=0, description="What a checkpoint takes.")
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)

    def placement_tasks(self) -> list[Task]:
        """For the placement."""
        return [task.task(self.checkpoint_seconds) for task in self.tasks]


def read_hints_spec(path: Path) -> HintsSpec:
    """The description in a YAML or JSON file; ConfigError names a key or value that does not fit."""
    return read_model(HintsSpec, path)


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
    print_table(console, _hints_table(tasks, hints, placement), _costs_table(placement))
    saved = placement.unprotected_recovery_seconds - placement.recovery_seconds
    if saved < placement.cost_seconds:
        console.print(f"The checkpoints cost {placement.cost_seconds:.4g} s and save {saved:.4g} s: allow less.")


def _hints_table(tasks: list[Task], hints: list[tuple[str, Task]], placement: Placement) -> Table:
    table = Table("hint after", "arrivals", "cost s", "checkpoints", "every", title="Hints")
    taken = Counter(hint for hint, _ in placement.checkpoints)
    arrivals = _arrivals(tasks)
    for index, (name, task) in enumerate(hints):
        count = taken[index]
        every = f"{arrivals[index] / count:.3g}" if count else "-"
        table.add_row(escape(name), str(arrivals[index]), f"{task.cost_seconds:.4g}", str(count), every)
    return table


def _arrivals(tasks: list[Task] | tuple[Task, ...], times: int = 1) -> list[int]:
    """How often the program comes to each of `hints_of` the tasks."""
    found = []
    for task in tasks:
        found += _arrivals(task.body, times * task.repetitions)
        if task.cost_seconds is not None:
            found.append(times * task.repetitions)
    return found


def _costs_table(placement: Placement) -> Table:
    """The expected costs; the allowance is in the title."""
    title = f"Expected, of {placement.program_seconds:.4g} s; {placement.allowed_seconds:.4g} s allowed"
    table = Table("placement", "recovery s", title=title)
    chosen = f"{len(placement.checkpoints)} chosen, for {placement.cost_seconds:.4g} s"
    table.add_row(chosen, f"{placement.recovery_seconds:.4g}")
    table.add_row("none", f"{placement.unprotected_recovery_seconds:.4g}")
    table.add_row("no schedule is below", f"{placement.least_recovery_seconds:.4g}")
    return table
