"""From single recoveries to cells and grids: means, intervals over training runs, and verdicts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
from scipy import stats

from cpsr.benchmarks.harness.intervals import CONFIDENCE
from cpsr.benchmarks.recovery.grid import Cell
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import MOVED, RECOMPUTE, STALE

__all__ = [
    "MIN_SEEDS",
    "CellResult",
    "Mean",
    "Sample",
    "cell_results",
    "cost_samples",
    "differences",
    "grid_mean",
    "lag_samples",
    "verdict",
]

# Failures of one run share the run that never failed, and its luck: only runs with other seeds are independent.
MIN_SEEDS = 3
# A method is at most this much worse, in horizons, before a cell counts against it.
TOLERATED_HORIZONS = 0.1


@dataclass(frozen=True)
class Mean:
    """A mean; `low` and `high` bound its 95% interval over training runs, None with fewer than three seeds."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sample:
    """One number of a failure: of which workload and seed."""

    workload: str
    seed: int
    value: float


@dataclass(frozen=True)
class CellResult:
    """One method in one cell.

    Attributes:
        cell: the cell.
        method: its name.
        points: failures with an end cost.
        diverged: failures after which training diverged; they are in no mean, and forbid a verdict.
        declined: failures at which the method advised against itself, so that the horizon was recomputed.
        end_cost_iterations: what the failure cost in the end.
        end_cost: the same over the horizon; 1 is what recomputing costs.
        against_recompute: `end_cost` minus recomputing's, paired.
        against_stale: `end_cost` minus that of going on from the checkpoint, paired; None where that was not measured.
        lag: lag after 60 to 160 iterations, over the horizon; None where no failure has one.
        injection_gap_nats: mean paired loss gap right at injection.
        recover_iterations: forecasting, predicting and injecting, in training iterations, by their median times.
        learning_seconds: median of what the predictor had spent on learning before the failure.
        verdicts: `better`, `not worse`, `worse` or `undetermined`, against recomputing and against stale.
    """

    cell: Cell
    method: str
    points: int
    diverged: int
    declined: int
    end_cost_iterations: Mean
    end_cost: Mean
    against_recompute: Mean
    against_stale: Mean | None
    lag: Mean | None
    injection_gap_nats: float | None
    recover_iterations: float | None
    learning_seconds: float | None
    verdicts: dict[str, str]


def cell_results(cell: Cell, outcomes: Sequence[Outcome]) -> list[CellResult]:
    """Every method of one cell, in the order in which they appear; a method that always diverged is left out."""
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    of_method = {name: [outcome for outcome in outcomes if outcome.method == name] for name in methods}
    stale = of_method.get(STALE, [])
    return [
        _cell_result(cell, name, of_method[name], stale)
        for name in methods
        if any(outcome.end_cost_iterations is not None for outcome in of_method[name])
    ]


def _cell_result(cell: Cell, method: str, outcomes: list[Outcome], stale: list[Outcome]) -> CellResult:
    name = cell.workload
    known = [outcome for outcome in outcomes if outcome.end_cost_iterations is not None]
    diverged = len(outcomes) - len(known)
    costs = cost_samples(name, known)
    against_recompute = grid_mean([[Sample(one.workload, one.seed, one.value - 1.0) for one in costs]])
    beside = differences(name, known, stale)
    against_stale = grid_mean([beside]) if beside else None
    lags = lag_samples(name, known)
    verdicts = {RECOMPUTE: verdict(against_recompute, diverged)} if method != RECOMPUTE else {}
    if against_stale is not None and method != STALE:
        verdicts[STALE] = verdict(against_stale, len(outcomes) - len(beside))
    curves = [outcome.curve for outcome in known if outcome.curve is not None]
    return CellResult(
        cell=cell,
        method=method,
        points=len(known),
        diverged=diverged,
        declined=0 if method in (RECOMPUTE, MOVED) else sum(not outcome.predicted for outcome in known),
        end_cost_iterations=grid_mean([[Sample(name, one.seed, _iterations(one)) for one in known]]),
        end_cost=grid_mean([costs]),
        against_recompute=against_recompute,
        against_stale=against_stale,
        lag=grid_mean([lags]) if lags else None,
        injection_gap_nats=_mean([curve["transient"]["gap_nats"] for curve in curves if curve["transient"]]),
        recover_iterations=_recover_iterations(known),
        learning_seconds=_median([one.learning_seconds for one in known if one.learning_seconds is not None]),
        verdicts=verdicts,
    )


def cost_samples(workload: str, outcomes: Iterable[Outcome]) -> list[Sample]:
    """End costs over horizons, of the outcomes that have one."""
    return [Sample(workload, one.seed, _share(one)) for one in outcomes if one.end_cost_iterations is not None]


def lag_samples(workload: str, outcomes: Iterable[Outcome]) -> list[Sample]:
    """Lags after 60 to 160 iterations over horizons, of the outcomes that have one."""
    return [
        Sample(workload, one.seed, one.lag_iterations / one.point.horizon)
        for one in outcomes
        if one.lag_iterations is not None
    ]


def differences(workload: str, outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> list[Sample]:
    """End costs over horizons minus those of another method, at the failures at which both have one."""
    beside = {_place(other): other for other in others if other.end_cost_iterations is not None}
    return [
        Sample(workload, outcome.seed, _share(outcome) - _share(beside[_place(outcome)]))
        for outcome in outcomes
        if outcome.end_cost_iterations is not None and _place(outcome) in beside
    ]


def grid_mean(cells: Sequence[Sequence[Sample]]) -> Mean:
    """Mean over cells that count alike, each the mean of its seeds; and its interval over seeds.

    The interval is Student's. A run's part in the mean is the sum of what it adds to each cell. The parts of one
    workload's seeds scatter around their mean, workloads are independent, and their degrees of freedom are combined as
    Welch and Satterthwaite do.

    Raises:
        ValueError: there is no cell, or one without samples.
    """
    if not cells or not all(cells):
        raise ValueError("no samples")
    parts: dict[str, dict[int, float]] = {}
    for samples in cells:
        seeds = _by_seed(samples)
        for (workload, seed), values in seeds.items():
            part = float(numpy.mean(values)) / len(seeds) / len(cells)
            of = parts.setdefault(workload, {})
            of[seed] = of.get(seed, 0.0) + part
    value = sum(part for of in parts.values() for part in of.values())
    if any(len(of) < MIN_SEEDS for of in parts.values()):
        return Mean(value, None, None)
    variances = [len(of) * float(numpy.var(list(of.values()), ddof=1)) for of in parts.values()]
    total = sum(variances)
    if total == 0.0:
        return Mean(value, value, value)
    freedom = 1.0 / sum(
        (variance / total) ** 2 / (len(of) - 1) for variance, of in zip(variances, parts.values(), strict=True)
    )
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(total)
    return Mean(value, value - half, value + half)


def _by_seed(samples: Sequence[Sample]) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        found.setdefault((sample.workload, sample.seed), []).append(sample.value)
    return found


def verdict(difference: Mean, missing: int = 0) -> str:
    """What a paired difference in horizons says: `better`, `not worse`, `worse` or `undetermined`.

    Args:
        difference: of the method to what it is compared with; positive costs more.
        missing: points that are not in it.
    """
    if missing or difference.low is None or difference.high is None:
        return "undetermined"
    if difference.low > 0.0:
        return "worse"
    if difference.high < 0.0:
        return "better"
    return "not worse" if difference.high <= TOLERATED_HORIZONS else "undetermined"


def _iterations(outcome: Outcome) -> float:
    assert outcome.end_cost_iterations is not None
    return outcome.end_cost_iterations


def _share(outcome: Outcome) -> float:
    return _iterations(outcome) / outcome.point.horizon


def _place(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.seed, outcome.point.checkpoint, outcome.point.failure


def _recover_iterations(outcomes: Sequence[Outcome]) -> float | None:
    pairs = [
        (outcome.recover_seconds, outcome.curve["step_seconds"])
        for outcome in outcomes
        if outcome.recover_seconds is not None and outcome.curve is not None
    ]
    if not pairs:
        return None
    recover, step = numpy.median(numpy.array(pairs), axis=0)
    return float(recover / step)


def _median(values: Sequence[float]) -> float | None:
    return float(numpy.median(values)) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return float(numpy.mean(values)) if values else None
