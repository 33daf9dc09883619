"""The description of a program with hints.

For example:

    allowance_fraction: 0.01
    mtbf_hours: 12
    checkpoint_seconds: 4
    tasks:
      - {name: load, seconds: 600}
      - name: epoch
        repetitions: 5
        tasks:
          - {name: batch, seconds: 3, repetitions: 2000}
          - {name: evaluate, seconds: 200, checkpoint_seconds: 8}
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cpsr.config import read_model
from cpsr.hints.placement import Task

__all__ = ["HintsSpec", "read_hints_spec"]

REPETITIONS_MAX = 10**9  # more is a typing error


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TaskSpec(_Section):
    """A task, or a loop over tasks, with a hint after each repetition."""

    name: str = Field(min_length=1)
    seconds: float | None = Field(default=None, ge=0, description="Of one repetition of a task without tasks in it.")
    tasks: tuple["TaskSpec", ...] = Field(default=(), description="The body, in place of seconds.")
    repetitions: int = Field(default=1, ge=1, le=REPETITIONS_MAX)
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
    """A program as a list of tasks, and what its checkpoints may cost."""

    allowance_fraction: float = Field(ge=0, le=1, description="For checkpoints, of the time of all tasks.")
    mtbf_hours: float = Field(gt=0, description="Mean time between failures of the whole job.")
    checkpoint_seconds: float = Field(gt=0, description="What a checkpoint takes.")
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)

    def placement_tasks(self) -> list[Task]:
        """For the placement."""
        return [task.task(self.checkpoint_seconds) for task in self.tasks]


def read_hints_spec(path: Path) -> HintsSpec:
    """The description in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value does not fit; the message names
            each.
    """
    return read_model(HintsSpec, path)
