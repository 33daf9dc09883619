"""`cpsr bench tune`: the peak rate at which each workload of the recovery benchmark ends best."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.ending import Ended, Training
from cpsr.benchmarks.recovery.ending import ended as trained
from cpsr.benchmarks.recovery.workload import (
    OPTIMIZERS,
    RATE_STEP,
    SCHEDULES,
    TASKS,
    OptimizerName,
    Schedule,
    Workload,
    trained_with,
)
from cpsr.errors import ConfigError, CPSRError

__all__ = ["Setting", "main", "settings", "sweep"]

CACHE = Path("runs/bench-tune")
RATE_OF_STEP_0: dict[OptimizerName, float] = {"adamw": 1e-3, "sgd": 0.1, "muon": 1e-3}
FIRST_STEP = 2  # twice the rate of step 0
AROUND = 2  # rates on either side of the best
LIMIT = 14  # steps away from step 0: 110 times its rate, or a 110th


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


@dataclass(frozen=True)
class Rate:
    """Trainings at one peak rate.

    Attributes:
        step: its number; see `rate_of`.
        peak: the peak learning rate.
        ended: by seed.
    """

    step: int
    peak: float
    ended: tuple[Ended, ...]

    @property
    def loss(self) -> float:
        """Mean final loss over the seeds, in nats; infinite where one of them diverged."""
        return statistics.fmean(math.inf if one.loss is None else one.loss for one in self.ended)


@dataclass(frozen=True)
class Sweep:
    """The curve of one setting.

    Attributes:
        setting: what was trained.
        rates: ascending.
    """

    setting: Setting
    rates: tuple[Rate, ...]

    @property
    def best(self) -> Rate:
        """The rate with the lowest mean final loss."""
        return min(self.rates, key=lambda rate: rate.loss)


def main(
    chosen: Sequence[Setting],
    seeds: int = 3,
    cache: Path | None = None,
    json_path: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
) -> None:
    """Sweep, print and write.

    Args:
        chosen: what to tune.
        seeds: trainings at each rate.
        cache: keeps every training, where an interrupted call goes on; None: `runs/bench-tune`.
        json_path: where the figures go.
        workers: processes, of one thread each; None: up to two.
        device: `cpu` or `cuda`.

    Raises:
        CPSRError: the best rate of a setting lies at the limit of what is tried.
    """
    kept, count = cache or CACHE, workers or default_workers()
    with measuring("tune", json_path, place=kept.parent, timed=False, device=device) as call:
        call.machine.update(torch_threads=1, workers=count)
        bar = call.progress.add_task("trainings", total=None)
        with Workers(count) as pool:
            tick = lambda done, total: call.progress.update(bar, completed=done, total=total)  # noqa: E731
            found = sweep(chosen, seeds, kept, device, pool, tick)
        _show(call, found)
        figures = {"rate_step": RATE_STEP, "seeds": seeds, "settings": [_plain(one) for one in found]}
        call.leave(figures)


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


def sweep(
    chosen: Sequence[Setting],
    seeds: int,
    cache: Path,
    device: str,
    workers: Workers,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sweep]:
    """Train at more rates until there are two on either side of the best of each setting.

    Args:
        chosen: what to tune.
        seeds: trainings at each rate.
        cache: keeps every training.
        device: `cpu` or `cuda`.
        workers: processes that train.
        tick: called with the trainings done and the trainings known to be needed.

    Raises:
        CPSRError: the best rate of a setting lies at the limit of what is tried, or every training diverged.
    """
    found: dict[tuple[Setting, int], tuple[Ended, ...]] = {}
    finished = 0
    while needed := [place for setting in chosen for place in _needed(setting, found)]:
        trainings = [
            Training(setting.workload(step), place, cache, device) for setting, step in needed for place in range(seeds)
        ]
        total, before = finished + len(trainings), finished
        ended = workers.each(trained, trainings, lambda done: tick(before + done, total))  # noqa: B023 - called at once
        for place, key in enumerate(needed):
            found[key] = tuple(ended[place * seeds : (place + 1) * seeds])
        finished = total
    return [_sweep(setting, found) for setting in chosen]


def _sweep(setting: Setting, found: dict[tuple[Setting, int], tuple[Ended, ...]]) -> Sweep:
    steps = sorted(step for one, step in found if one == setting)
    return Sweep(setting, tuple(Rate(step, rate_of(step, setting.optimizer), found[setting, step]) for step in steps))


def _needed(setting: Setting, found: dict[tuple[Setting, int], tuple[Ended, ...]]) -> list[tuple[Setting, int]]:
    """Rates around the best so far that were not tried."""
    known = _sweep(setting, found)
    best = known.best.step if known.rates else FIRST_STEP
    if known.rates and not math.isfinite(known.best.loss):
        best = known.rates[0].step  # all diverged: look lower
    wanted = [step for step in range(best - AROUND, best + AROUND + 1) if (setting, step) not in found]
    if any(abs(step) > LIMIT for step in wanted):
        peak = rate_of(best, setting.optimizer)
        raise CPSRError(
            f"{setting.name}: the best rate lies at the end of what is tried ({peak:.1e}); trainings are kept"
        )
    return [(setting, step) for step in wanted]


def _show(call: Measurement, sweeps: Sequence[Sweep]) -> None:
    """One row per setting: the best rate, and what its neighbours lose."""
    rows = []
    for one in sweeps:
        best, beside = one.best, {rate.step - one.best.step: rate for rate in one.rates}
        gaps = [_gap(beside[side], best) for side in (-1, 1)]
        rows.append((one.setting.name, f"{best.peak:.2e}", f"{best.loss:.4f}", *gaps, str(len(one.rates))))
    call.table(
        "Final loss by peak learning rate",
        ("training", "best rate", "final loss, nats", "1.4 times lower", "1.4 times higher", "rates tried"),
        rows,
        caption="neighbours: what they end above the best, in nats, with twice its standard error over seeds",
    )


def _gap(rate: Rate, best: Rate) -> str:
    """Paired by seed."""
    pairs = [(one.loss, other.loss) for one, other in zip(rate.ended, best.ended, strict=True) if one.loss is not None]
    gaps = [loss - other for loss, other in pairs if other is not None]
    if len(gaps) < len(rate.ended):
        return "diverges"
    if len(gaps) == 1:
        return f"{gaps[0]:+.4f}"
    return f"{numpy.mean(gaps):+.4f} ± {2 * numpy.std(gaps, ddof=1) / len(gaps) ** 0.5:.4f}"


def _plain(sweep: Sweep) -> dict[str, Any]:
    """Every training's end, by rate."""
    rates = [
        {"peak_learning_rate": rate.peak, "step": rate.step, "ended": [asdict(end) for end in rate.ended]}
        for rate in sweep.rates
    ]
    return {**asdict(sweep.setting), "best_peak_learning_rate": sweep.best.peak, "rates": rates}
