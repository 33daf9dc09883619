"""From single recoveries to means over cells of the grid, with intervals over training runs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy
from scipy import stats

from cpsr.benchmarks.harness.intervals import CONFIDENCE
from cpsr.benchmarks.recovery.grid import Cell
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import MOVED, RECOMPUTE
from cpsr.benchmarks.recovery.selection import Selection

__all__ = ["MIN_SEEDS", "Group", "GroupMean", "Mean", "Sample", "differences", "mean_of", "summarise"]

# Failures of one run share the run that never failed, and its luck: only runs with other seeds are independent.
MIN_SEEDS = 3


@dataclass(frozen=True)
class Mean:
    """A mean; `low` and `high` bound its 95% interval over training runs, None with fewer than three seeds."""

    value: float
    low: float | None = None
    high: float | None = None


class Sample(NamedTuple):
    """A number of one failure, in a cell of the grid."""

    cell: Cell
    seed: int
    value: float


@dataclass(frozen=True)
class Group:
    """The failures that a mean is over; None stands for all."""

    method: str
    lost: PartName = "all"
    workload: str | None = None
    fraction: float | None = None
    interval: int | None = None

    def holds(self, outcome: Outcome) -> bool:
        """Whether an outcome belongs to it."""
        cell = outcome.cell
        wanted = (self.method, self.lost), (self.workload, self.fraction, self.interval)
        found = (outcome.method, cell.lost), (cell.workload, cell.fraction, cell.interval)
        return wanted[0] == found[0] and all(
            one in (None, other) for one, other in zip(wanted[1], found[1], strict=True)
        )


@dataclass(frozen=True)
class GroupMean:
    """A method's end cost over the horizon, averaged over cells of the grid that count alike.

    Attributes:
        group: of which failures.
        cells: how many there are.
        end_cost: the mean; 1 is what recomputing costs.
        of_all_horizons: sum of the end costs over sum of the horizons: what counts for the time lost.
        diverged: failures after which training diverged; they are in no mean.
        declined: failures at which the method advised against itself, so that the horizon was recomputed.
    """

    group: Group
    cells: int
    end_cost: Mean
    of_all_horizons: float
    diverged: int
    declined: int


def summarise(selection: Selection, outcomes: Sequence[Outcome]) -> dict[Group, GroupMean]:
    """Means by method and lost part: of all, by workload, by stage, by interval, and by all of these."""
    groups = product(
        selection.methods,
        selection.lost,
        (None, *selection.workloads),
        (None, *selection.fractions),
        (None, *selection.intervals),
    )
    found = (_group_mean(Group(*group), outcomes) for group in groups)
    return {mean.group: mean for mean in found if mean is not None}


def _group_mean(group: Group, outcomes: Sequence[Outcome]) -> GroupMean | None:
    mine = [one for one in outcomes if group.holds(one)]
    known = [one for one in mine if one.end_cost_iterations is not None]
    if not known:
        return None
    return GroupMean(
        group,
        cells=len({one.cell for one in known}),
        end_cost=mean_of([Sample(one.cell, one.seed, one.over_horizon) for one in known]),
        of_all_horizons=sum(one.over_horizon * one.point.horizon for one in known)
        / sum(one.point.horizon for one in known),
        diverged=len(mine) - len(known),
        declined=0 if group.method in (RECOMPUTE, MOVED) else sum(not one.formed for one in known),
    )


def differences(outcomes: Sequence[Outcome], method: str, other: str) -> list[Sample]:
    """End costs over horizons minus those of another method, at the failures that both have."""
    known = {
        (one.method, one.cell, one.seed, one.point): one.over_horizon
        for one in outcomes
        if one.end_cost_iterations is not None
    }
    return [
        Sample(cell, seed, value - known[other, cell, seed, point])
        for (name, cell, seed, point), value in known.items()
        if name == method and (other, cell, seed, point) in known
    ]


def mean_of(samples: Sequence[Sample]) -> Mean:
    """Mean over cells that count alike; in a cell, failures of a seed count as one.

    The interval is Student's over training runs. A seed of a workload is one run, whatever cells it appears in; the
    workload's seeds scatter around their mean, workloads are independent, and their degrees of freedom are combined as
    Welch and Satterthwaite do.

    Raises:
        ValueError: there is none.
    """
    if not samples:
        raise ValueError("no samples")
    cells: dict[Cell, dict[int, list[float]]] = {}
    for cell, seed, value in samples:
        cells.setdefault(cell, {}).setdefault(seed, []).append(value)
    parts: dict[str, dict[int, float]] = {}
    for cell, seeds in cells.items():
        for seed, values in seeds.items():
            of = parts.setdefault(cell.workload, {})
            of[seed] = of.get(seed, 0.0) + statistics.fmean(values) / len(seeds) / len(cells)
    mean = math.fsum(part for of in parts.values() for part in of.values())
    if any(len(of) < MIN_SEEDS for of in parts.values()):
        return Mean(mean)
    variances = [len(of) * float(numpy.var(list(of.values()), ddof=1)) for of in parts.values()]
    total = sum(variances)
    if total == 0.0:
        return Mean(mean, mean, mean)
    freedom = 1.0 / sum(
        (variance / total) ** 2 / (len(of) - 1) for variance, of in zip(variances, parts.values(), strict=True)
    )
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(total)
    return Mean(mean, mean - half, mean + half)
