"""Sweeps of the peak learning rate, which widen until the best lies well inside."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Ended, Training
from cpsr.benchmarks.recovery.ending import ended as trained
from cpsr.benchmarks.tune.space import Setting, rate_of
from cpsr.errors import CPSRError

__all__ = ["Rate", "Sweep", "sweep"]

FIRST_STEP = 2  # twice the rate of step 0
AROUND = 2  # rates on either side of the best
LIMIT = 14  # steps away from step 0: 110 times its rate, or a 110th


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


def sweep(
    chosen: Sequence[Setting],
    seeds: int,
    cache: Path,
    device: str,
    workers: Workers,
    tick: Callable[[int, int], None] = lambda done, total: None,
    first_seed: int = 0,
) -> list[Sweep]:
    """Train at more rates until there are two on either side of the best of each setting.

    Args:
        chosen: what to tune.
        seeds: trainings at each rate.
        cache: keeps every training.
        device: `cpu` or `cuda`.
        workers: processes that train.
        tick: called with the trainings done and the trainings known to be needed.
        first_seed: of the seeds, which follow one another.

    Raises:
        CPSRError: the best rate of a setting lies at the limit of what is tried, or every training diverged.
    """
    found: dict[tuple[Setting, int], tuple[Ended, ...]] = {}
    finished = 0
    while needed := [place for setting in chosen for place in _needed(setting, found)]:
        trainings = [
            Training(setting.workload(step), first_seed + place, cache, device)
            for setting, step in needed
            for place in range(seeds)
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
