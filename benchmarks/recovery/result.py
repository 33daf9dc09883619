"""From single recoveries to pooled end costs, with intervals over training runs."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy
from scipy import stats

from cpsr.benchmarks.harness.intervals import CONFIDENCE
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.selection import Selection

__all__ = ["MIN_SEEDS", "Group", "GroupCost", "Pooled", "difference", "pooled", "summarise"]

# Failures of one run share the run that never failed, and its luck: only runs with other seeds are independent.
MIN_SEEDS = 3


@dataclass(frozen=True)
class Pooled:
    """A sum of iterations over the sum of the horizons of their failures, averaged over workloads.

    `low` and `high` bound its 95% interval over training runs; they are None with fewer than three seeds.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """The failures that are pooled; None stands for all."""

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
class GroupCost:
    """What a method's recoveries from a group's failures cost; 1 is what recomputing costs.

    Attributes:
        group: of which failures.
        failures: how many.
        net: end costs less those of the method's control, where it has one: what a run without a failure could gain in
            the same way is no merit of the recovery.
        end_cost: with that gain.
        diverged: failures after which training diverged; they are in no figure.
        declined: failures at which the horizon was recomputed.
    """

    group: Group
    failures: int
    net: Pooled
    end_cost: Pooled
    diverged: int
    declined: int


def summarise(selection: Selection, outcomes: Sequence[Outcome]) -> dict[Group, GroupCost]:
    """Costs by method and lost part: of all, by workload, by stage, by interval, and by all of these."""
    groups = product(
        selection.methods,
        selection.lost,
        (None, *selection.workloads),
        (None, *selection.fractions),
        (None, *selection.intervals),
    )
    found = (_cost_of(Group(*group), outcomes) for group in groups)
    return {cost.group: cost for cost in found if cost is not None}


def _cost_of(group: Group, outcomes: Sequence[Outcome]) -> GroupCost | None:
    mine = [one for one in outcomes if group.holds(one)]
    known = [one for one in mine if one.net_iterations is not None]
    if not known:
        return None
    return GroupCost(
        group,
        failures=len(known),
        net=pooled(known, lambda one: one.net_iterations or 0.0),
        end_cost=pooled(known, lambda one: one.end_cost_iterations or 0.0),
        diverged=len(mine) - len(known),
        declined=sum(not one.formed for one in known),
    )


def difference(outcomes: Iterable[Outcome], method: str, other: str) -> Pooled | None:
    """The net cost of a method less that of another one, at the failures that both have; None without any."""
    net = {(one.method, one.workload, one.seed, one.point): one.net_iterations for one in outcomes}
    paired = []
    for one in outcomes:
        beside = net.get((other, one.workload, one.seed, one.point))
        if one.method == method and one.net_iterations is not None and beside is not None:
            paired.append((one, one.net_iterations - beside))
    costs = {id(one): cost for one, cost in paired}
    return pooled([one for one, _ in paired], lambda one: costs[id(one)]) if paired else None


def pooled(outcomes: Sequence[Outcome], cost: Callable[[Outcome], float]) -> Pooled:
    """Sum of the costs over the sum of the horizons of each workload, averaged over workloads.

    The interval is Student's over training runs. A seed of a workload is one run; the workload's seeds scatter around
    their mean, workloads are independent, and their degrees of freedom are combined as Welch and Satterthwaite do.

    Raises:
        ValueError: there is no outcome.
    """
    if not outcomes:
        raise ValueError("no outcomes")
    runs: dict[str, dict[int, list[Outcome]]] = {}
    for one in outcomes:
        runs.setdefault(one.workload, {}).setdefault(one.seed, []).append(one)
    parts = [_of_workload(list(seeds.values()), cost) for seeds in runs.values()]
    count = len(parts)
    mean = math.fsum(value for value, _, _ in parts) / count
    if any(freedom < MIN_SEEDS - 1 for _, _, freedom in parts):
        return Pooled(mean)
    variances = [variance / count**2 for _, variance, _ in parts]
    total = math.fsum(variances)
    if total == 0.0:
        return Pooled(mean, mean, mean)
    weights = [(variance / total) ** 2 / freedom for variance, (_, _, freedom) in zip(variances, parts, strict=True)]
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, 1.0 / sum(weights))) * math.sqrt(total)
    return Pooled(mean, mean - half, mean + half)


def _of_workload(seeds: Sequence[Sequence[Outcome]], cost: Callable[[Outcome], float]) -> tuple[float, float, int]:
    """The ratio of sums over all seeds, its variance as a ratio estimator has it, and its degrees of freedom."""
    costs = [math.fsum(map(cost, of)) for of in seeds]
    horizons = [float(sum(one.point.horizon for one in of)) for of in seeds]
    ratio = sum(costs) / sum(horizons)
    if len(seeds) == 1:
        return ratio, 0.0, 0
    mean_horizon = statistics.fmean(horizons)
    residuals = [(one - ratio * horizon) / mean_horizon for one, horizon in zip(costs, horizons, strict=True)]
    return ratio, float(numpy.sum(numpy.square(residuals))) / (len(seeds) - 1) / len(seeds), len(seeds) - 1
