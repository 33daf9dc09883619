"""`cpsr bench tune`: the peak rate at which each workload of the recovery benchmark ends best."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.ending import final_loss
from cpsr.benchmarks.recovery.tasks import TASKS
from cpsr.benchmarks.recovery.trajectory import Run
from cpsr.benchmarks.recovery.workload import (
    ITERATIONS,
    OPTIMIZERS,
    RATE_STEP,
    SCHEDULES,
    OptimizerName,
    Schedule,
    Workload,
    trained_with,
)
from cpsr.errors import ConfigError, CPSRError

__all__ = ["Setting", "main", "settings"]

CACHE = Path("runs/bench-tune")
RATE_OF_STEP_0: dict[OptimizerName, float] = {"adamw": 1e-3, "sgd": 0.1, "muon": 1e-3}
FIRST_STEP = 2  # twice the rate of step 0
AROUND = 2  # rates on either side of the best
LIMIT = 14  # steps away from step 0: 110 times its rate, or a 110th

Name = TypeVar("Name", bound=str)
Sweep = Mapping[int, Sequence[float | None]]
"""Final losses at the rate of each step, by seed; None where the training diverged."""


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

    def rate(self, step: int) -> float:
        """The peak learning rate of a step; every one is 1.4 times the one before."""
        return RATE_OF_STEP_0[self.optimizer] * RATE_STEP**step

    def workload(self, step: int) -> Workload:
        """The training at the rate of that step."""
        name, task = f"{self.name}-rate{step:+d}", TASKS[self.task]
        return Workload(name, task, self.schedule, self.rate(step), self.iterations, optimizer=self.optimizer)


def main(
    chosen: Sequence[Setting],
    seeds: int = 3,
    cache: Path | None = None,
    json_path: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
) -> None:
    """Sweep, print and write.

    Raises:
        CPSRError: the best rate of a setting lies at the limit of what is tried.
    """
    kept, count = cache or CACHE, workers or default_workers()
    with measuring("tune", json_path, place=kept.parent, timed=False, device=device) as call:
        call.machine.update(torch_threads=1, workers=count)
        bar = call.progress.add_task("trainings", total=None)
        with Workers(count) as pool:
            tick = lambda done, total: call.progress.update(bar, completed=done, total=total)  # noqa: E731
            found = _sweep(chosen, seeds, kept, device, pool, tick)
        call.table(
            "Final loss by peak learning rate",
            ("training", "best rate", "final loss, nats", "1.4 times lower", "1.4 times higher", "rates tried"),
            [_row(setting, tried) for setting, tried in found.items()],
            caption="neighbours: what they end above the best, in nats, with twice its standard error over seeds",
        )
        plain = [_plain(setting, tried) for setting, tried in found.items()]
        call.leave({"rate_step": RATE_STEP, "seeds": seeds, "settings": plain})


def settings(tasks: str | None, schedules: str, optimizers: str = "adamw") -> list[Setting]:
    """Every combination of comma-separated names; no tasks are all.

    Raises:
        ConfigError: a name is unknown.
    """
    return [
        Setting(task, schedule, ITERATIONS, optimizer)
        for task in (TASKS if tasks is None else _named("--tasks", tasks, tuple(TASKS)))
        for optimizer in _named("--optimizers", optimizers, OPTIMIZERS)
        for schedule in _named("--schedules", schedules, SCHEDULES)
    ]


def _named(option: str, text: str, known: Sequence[Name]) -> list[Name]:
    """Those of the known names that are asked for."""
    asked = text.split(",")
    if wrong := [name for name in asked if name not in known]:
        raise ConfigError(f"{option}: there is no '{wrong[0]}', but {', '.join(known)}")
    return [name for name in known if name in asked]


def _sweep(
    chosen: Sequence[Setting],
    seeds: int,
    cache: Path,
    device: str,
    workers: Workers,
    tick: Callable[[int, int], None],
) -> dict[Setting, Sweep]:
    """Train at more rates until there are two on either side of the best of each setting."""
    found: dict[Setting, dict[int, list[float | None]]] = {setting: {} for setting in chosen}
    finished = 0
    while needed := [(setting, step) for setting, tried in found.items() for step in _needed(setting, tried)]:
        runs = [Run(setting.workload(step), seed, cache, device) for setting, step in needed for seed in range(seeds)]
        before, total = finished, finished + len(runs)
        losses = workers.each(final_loss, runs, lambda done: tick(before + done, total))  # noqa: B023 - called at once
        for place, (setting, step) in enumerate(needed):
            found[setting][step] = losses[place * seeds : (place + 1) * seeds]
        finished = total
    return {setting: dict(sorted(tried.items())) for setting, tried in found.items()}


def _best_step(tried: Sweep) -> int:
    """The step with the lowest mean final loss."""
    return min(tried, key=lambda step: _mean(tried[step]))


def _mean(losses: Sequence[float | None]) -> float:
    """Over the seeds, in nats; infinite where one of them diverged."""
    return statistics.fmean(math.inf if loss is None else loss for loss in losses)


def _needed(setting: Setting, tried: Sweep) -> list[int]:
    """Steps around the best so far that were not tried."""
    best = _best_step(tried) if tried else FIRST_STEP
    if tried and not math.isfinite(_mean(tried[best])):
        best = min(tried)  # all diverged: look lower
    wanted = [step for step in range(best - AROUND, best + AROUND + 1) if step not in tried]
    if any(abs(step) > LIMIT for step in wanted):
        raise CPSRError(
            f"{setting.name}: the best rate lies at the end of what is tried ({setting.rate(best):.1e}); trainings are "
            "kept"
        )
    return wanted


def _row(setting: Setting, tried: Sweep) -> tuple[str, ...]:
    """The best rate, and what its neighbours lose."""
    best = _best_step(tried)
    gaps = [_gap(tried[best + side], tried[best]) for side in (-1, 1)]
    return setting.name, f"{setting.rate(best):.2e}", f"{_mean(tried[best]):.4f}", *gaps, str(len(tried))


def _gap(losses: Sequence[float | None], best: Sequence[float | None]) -> str:
    """Paired by seed."""
    gaps = [loss - other for loss, other in zip(losses, best, strict=True) if loss is not None and other is not None]
    if len(gaps) < len(losses):
        return "diverges"
    if len(gaps) == 1:
        return f"{gaps[0]:+.4f}"
    return f"{numpy.mean(gaps):+.4f} ± {2 * numpy.std(gaps, ddof=1) / len(gaps) ** 0.5:.4f}"


def _plain(setting: Setting, tried: Sweep) -> dict[str, Any]:
    """Every training's end, by rate."""
    rates = [
        {"peak_learning_rate": setting.rate(step), "step": step, "final_losses": list(losses)}
        for step, losses in tried.items()
    ]
    return {**asdict(setting), "best_peak_learning_rate": setting.rate(_best_step(tried)), "rates": rates}
