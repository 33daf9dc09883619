"""From single recoveries to cells and grids: means, intervals over failure points, and verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.harness.intervals import CONFIDENCE, RESAMPLES, SEED
from cpsr.benchmarks.recovery.grid import Cell
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import MOVED, RECOMPUTE, STALE

__all__ = [
    "CellResult",
    "Mean",
    "Sample",
    "cell_results",
    "differences",
    "grid_mean",
    "mean_interval",
    "samples_of",
    "verdict",
]

# Failures of one run that lie in the same stretch of so many iterations count as one in the intervals.
CLUSTER_ITERATIONS = 100
# Below this a bootstrap interval is hardly more than the samples' own range: none is given.
MIN_CLUSTERS = 4
# A method is at most this much worse, in horizons, before a cell counts against it.
TOLERATED_HORIZONS = 0.1


@dataclass(frozen=True)
class Mean:
    """A mean over failure points; `low` and `high` bound its 95% interval, None with too few points for one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sample:
    """One number of a failure point; points that share `cluster` are not independent."""

    cluster: tuple[int, int]
    value: float


@dataclass(frozen=True)
class CellResult:
    """One method in one cell.

    Attributes:
        cell: the cell.
        method: its name.
        points: failure points with a lag.
        without_lag: failure points at which none can be determined; they are in no mean, and forbid a verdict.
        declined: points at which the method advised against itself, so that the horizon was recomputed.
        lag_iterations: persistent lag.
        lag: persistent lag over the horizon; 1 is what recomputing costs.
        against_recompute: `lag` minus recomputing's, paired.
        against_stale: `lag` minus that of going on from the checkpoint, paired; None where that was not measured.
        injection_gap_nats: mean paired loss gap right at injection.
        recover_iterations: forecasting, predicting and injecting, in training iterations, by their median times.
        learning_seconds: median of what the predictor had spent on learning before the failure.
        below_recompute: mean share of the evaluations with a lower loss than recomputing after as many iterations.
        verdicts: `better`, `not worse`, `worse` or `undetermined`, against recomputing and against stale.
    """

    cell: Cell
    method: str
    points: int
    without_lag: int
    declined: int
    lag_iterations: Mean
    lag: Mean
    against_recompute: Mean
    against_stale: Mean | None
    injection_gap_nats: float | None
    recover_iterations: float | None
    learning_seconds: float | None
    below_recompute: float | None
    verdicts: dict[str, str]


def cell_results(cell: Cell, outcomes: Sequence[Outcome]) -> list[CellResult]:
    """Every method of one cell, in the order in which they appear; a method without any lag is left out."""
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    of_method = {name: [outcome for outcome in outcomes if outcome.method == name] for name in methods}
    stale = of_method.get(STALE, [])
    return [
        _cell_result(cell, name, of_method[name], stale)
        for name in methods
        if any(outcome.lag_iterations is not None for outcome in of_method[name])
    ]


def _cell_result(cell: Cell, method: str, outcomes: list[Outcome], stale: list[Outcome]) -> CellResult:
    known = [outcome for outcome in outcomes if outcome.lag_iterations is not None]
    missing = len(outcomes) - len(known)
    lags = [Sample(_cluster(outcome), _share(outcome)) for outcome in known]
    over = [Sample(sample.cluster, sample.value - 1.0) for sample in lags]
    beside = differences(known, stale)
    against_recompute = mean_interval(over)
    against_stale = mean_interval(beside) if beside else None
    curves = [outcome.curve for outcome in known if outcome.curve is not None]
    verdicts = {RECOMPUTE: verdict(against_recompute, missing)} if method != RECOMPUTE else {}
    if against_stale is not None and method != STALE:
        verdicts[STALE] = verdict(against_stale, len(outcomes) - len(beside))
    return CellResult(
        cell=cell,
        method=method,
        points=len(known),
        without_lag=missing,
        declined=0 if method == RECOMPUTE else sum(not outcome.predicted for outcome in known),
        lag_iterations=mean_interval([Sample(_cluster(one), float(one.lag_iterations or 0.0)) for one in known]),
        lag=mean_interval(lags),
        against_recompute=against_recompute,
        against_stale=against_stale,
        injection_gap_nats=_mean([curve["transient"]["gap_nats"] for curve in curves]),
        recover_iterations=_recover_iterations(known),
        learning_seconds=_median([one.learning_seconds for one in known if one.learning_seconds is not None]),
        # Where the horizon was recomputed first, iterations after the failure do not compare.
        below_recompute=_mean([_below(one) for one in outcomes]) if curves and method != MOVED else None,
        verdicts=verdicts,
    )


def mean_interval(samples: Sequence[Sample]) -> Mean:
    """The mean, and its percentile bootstrap interval over clusters of samples.

    Raises:
        ValueError: there are no samples.
    """
    _refuse_none(samples)
    value = float(numpy.mean([sample.value for sample in samples]))
    drawn = _resampled_means(samples, SEED)
    return Mean(value, *_bounds(drawn))


def grid_mean(cells: Sequence[Sequence[Sample]]) -> Mean:
    """Mean over cells of their means, each cell counting alike; the interval draws clusters within each cell.

    Raises:
        ValueError: there is no cell, or one without samples.
    """
    for part in (cells, *cells):
        _refuse_none(part)
    means = [numpy.mean([sample.value for sample in samples]) for samples in cells]
    drawn = [_resampled_means(samples, SEED + place) for place, samples in enumerate(cells)]
    known = [draws for draws in drawn if draws is not None]
    together = numpy.mean(known, axis=0) if len(known) == len(cells) else None
    return Mean(float(numpy.mean(means)), *_bounds(together))


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


def differences(outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> list[Sample]:
    """Lags over horizons minus those of another method, at the failures at which both have one."""
    beside = {_place(other): other for other in others if other.lag_iterations is not None}
    return [
        Sample(_cluster(outcome), _share(outcome) - _share(beside[_place(outcome)]))
        for outcome in outcomes
        if outcome.lag_iterations is not None and _place(outcome) in beside
    ]


def samples_of(outcomes: Sequence[Outcome]) -> list[Sample]:
    """Lags over horizons, of the outcomes that have one."""
    return [Sample(_cluster(outcome), _share(outcome)) for outcome in outcomes if outcome.lag_iterations is not None]


def _share(outcome: Outcome) -> float:
    assert outcome.lag_iterations is not None
    return outcome.lag_iterations / outcome.point.horizon


def _place(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.seed, outcome.point.checkpoint, outcome.point.failure


def _below(outcome: Outcome) -> float:
    """Where a method declined, diverged or failed it was never below recomputing."""
    share = None if outcome.curve is None else outcome.curve["below_recompute"]
    return 0.0 if share is None else float(share)


def _cluster(outcome: Outcome) -> tuple[int, int]:
    # Failures close to each other are recovered from much the same weights, and followed by the same batches.
    return outcome.seed, outcome.point.checkpoint // CLUSTER_ITERATIONS


def _resampled_means(samples: Sequence[Sample], seed: int) -> NDArray[numpy.float64] | None:
    clusters = sorted({sample.cluster for sample in samples})
    if len(clusters) < MIN_CLUSTERS:
        return None
    values = [[sample.value for sample in samples if sample.cluster == cluster] for cluster in clusters]
    sums, counts = numpy.array([sum(part) for part in values]), numpy.array([len(part) for part in values])
    rows = numpy.random.default_rng(seed).integers(len(clusters), size=(RESAMPLES, len(clusters)))
    means: NDArray[numpy.float64] = sums[rows].sum(axis=1) / counts[rows].sum(axis=1)
    return means


def _bounds(drawn: NDArray[numpy.float64] | None) -> tuple[float | None, float | None]:
    if drawn is None:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


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


def _refuse_none(values: Sequence[object]) -> None:
    if not values:
        raise ValueError("no samples")
