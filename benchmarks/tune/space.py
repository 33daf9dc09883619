"""What is tuned: tasks, optimizers, schedules and lengths; and the rates that are tried."""

from dataclasses import dataclass

from cpsr.benchmarks.recovery.optimizers import OPTIMIZERS, OptimizerName
from cpsr.benchmarks.recovery.schedule import SCHEDULES, Schedule
from cpsr.benchmarks.recovery.workload import RATE_STEP, TASKS, Workload, trained_with
from cpsr.errors import ConfigError

__all__ = ["Setting", "rate_of", "settings"]

RATE_OF_STEP_0: dict[OptimizerName, float] = {"adamw": 1e-3, "sgd": 0.1, "muon": 1e-3}


@dataclass(frozen=True)
class Setting:
    """What has one best rate.

    Attributes:
        task: its name.
        schedule: of the learning rate.
        iterations: length of the training.
        optimizer: its name.
    """

    task: str
    schedule: Schedule
    iterations: int
    optimizer: OptimizerName = "adamw"

    @property
    def name(self) -> str:
        """In one word, as in `gpt-0.4M-cosine-1200` or `gpt-0.4M-sgd-cosine-1200`."""
        return f"{trained_with(self.task, self.optimizer)}-{self.schedule}-{self.iterations}"

    def workload(self, step: int) -> Workload:
        """The training at the rate of that step."""
        name = f"{self.name}-rate{step:+d}"
        rate = rate_of(step, self.optimizer)
        return Workload(name, TASKS[self.task], self.schedule, rate, self.iterations, optimizer=self.optimizer)


def rate_of(step: int, optimizer: OptimizerName) -> float:
    """The peak learning rate of a step; every one is 1.4 times the one before."""
    return RATE_OF_STEP_0[optimizer] * RATE_STEP**step


def settings(tasks: str | None, schedules: str, lengths: str, optimizers: str = "adamw") -> list[Setting]:
    """Every combination of comma-separated names and lengths; no tasks are all.

    Raises:
        ConfigError: a name is unknown, or a length is no number of iterations.
    """
    names = list(TASKS) if tasks is None else tasks.split(",")
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"no task is called '{name}'; there are {', '.join(TASKS)}")
    chosen = [schedule for schedule in SCHEDULES if schedule in schedules.split(",")]
    if len(chosen) != len(schedules.split(",")):
        raise ConfigError(f"--schedules {schedules}: there are {', '.join(SCHEDULES)}")
    updates = [optimizer for optimizer in OPTIMIZERS if optimizer in optimizers.split(",")]
    if len(updates) != len(optimizers.split(",")):
        raise ConfigError(f"--optimizers {optimizers}: there are {', '.join(OPTIMIZERS)}")
    if not all(length.isdecimal() and int(length) > 0 for length in lengths.split(",")):
        raise ConfigError(f"--lengths {lengths}: expected iterations, comma-separated")
    return [
        Setting(task, schedule, int(length), optimizer)
        for task in names
        for optimizer in updates
        for schedule in chosen
        for length in lengths.split(",")
    ]
