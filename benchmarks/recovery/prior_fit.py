"""From measured recoveries to the predictor's prior table, and how well it does on a run that it has not seen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from scipy import stats

from cpsr.benchmarks.recovery.end_cost import IterationWorth, end_cost_iterations
from cpsr.predictor.calibration import FEATURES, Context, Setting, Table, features
from cpsr.predictor.checkpoint_series import path_places, straightness
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import merged

__all__ = ["Left", "Recoveries", "fit", "leave_one_group_out", "recoveries_of"]

# Pulls coefficients that the data leave open to zero: a share of each feature's own mean square.
RIDGE = 1e-2
# Residuals beyond three robust deviations count less (Huber's weights): a few recoveries end far off.
HUBER_DEVIATIONS = 3.0
ROUNDS = 10
# The network's direction may cost or save a fifth of the reach: no measurement shows that it saves anything.
UNSEEN_DEVIATION = 0.2
# Before the residuals are known.
FIRST_NOISE_ITERATIONS = 20.0

MIN_RUNS = 3  # a spread between runs needs some

BENT = FEATURES.index("reach * bent")

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Recoveries:
    """Measured end costs, one a row.

    Attributes:
        terms: features, `(n, len(FEATURES))`.
        costs: in iterations, `(n,)`.
        horizons: in iterations, `(n,)`.
        lost_shares: of the state, `(n,)`.
        runs: names, `(n,)`.
        failures: number of the failure among all, `(n,)`.
    """

    terms: _Array
    costs: _Array
    horizons: _Array
    lost_shares: _Array
    runs: NDArray[numpy.str_]
    failures: NDArray[numpy.int64]

    @property
    def whole(self) -> "Recoveries":
        """Those after failures that took the whole state."""
        return self.of(self.lost_shares == 1.0)

    def of(self, chosen: NDArray[numpy.bool_]) -> "Recoveries":
        """The rows chosen."""
        return Recoveries(**{name: values[chosen] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Left:
    """How a table does on a run that it is not fitted to.

    Attributes:
        run: its name.
        recoveries: measured in it, after failures that took the whole state.
        correlation: rank correlation (Spearman) of expected and measured cost.
        chosen_over_horizon: of each failure the cost over the horizon: that of the measured setting with the lowest
            expectation among those that are safe (`Calibration.best`), or 1 where none is and it recomputes.
        recomputed: share of the failures at which it recomputes.
        stale_over_horizon: mean over failures of going on from the checkpoint.
    """

    run: str
    recoveries: int
    correlation: float
    chosen_over_horizon: tuple[float, ...]
    recomputed: float
    stale_over_horizon: float


def recoveries_of(rows: Iterable[Mapping[str, Any]], worths: Mapping[str, IterationWorth]) -> Recoveries:
    """The rows of `collect`, their final gaps in iterations; recoveries that diverged are left out."""
    terms, costs, horizons, shares, runs, failures = [], [], [], [], [], []
    for number, row in enumerate(rows):
        for recovery in row["recoveries"]:
            if recovery["final_gap_nats"] is None:
                continue
            cost = end_cost_iterations(recovery["final_gap_nats"], worths[row["run"]])
            share = row["lost_share"]
            terms.append(share * _terms(row, recovery["setting"]))
            costs.append(cost)
            horizons.append(row["failure"] - row["checkpoint"])
            shares.append(share)
            runs.append(row["run"])
            failures.append(number)
    return Recoveries(*map(numpy.array, (terms, costs, horizons, shares, runs, failures)))


def _terms(row: Mapping[str, Any], setting: Mapping[str, Any] | None) -> _Array:
    horizon = row["failure"] - row["checkpoint"]
    context = Context(
        horizon_iterations=horizon,
        age_iterations=row["checkpoint"],
        interval_iterations=row["interval"],
        learning_rate_ratio=row["learning_rate"] / row["peak_learning_rate"],
        straightness=_straightness(row),
    )
    if setting is None:  # the checkpoint itself: no window matters where nothing is followed
        return features(context, Setting(float(row["interval"]), 0.0))
    return features(context, Setting(setting["window_iterations"], setting["gain"] * horizon))


def _straightness(row: Mapping[str, Any]) -> float:
    """Of the path that the row's products describe, as the predictor measures it."""
    count = len(row["times"])
    points = [HistoryEntry(place * row["interval"], float(place), 0.0) for place in range(count)]
    return straightness(merged(torch.tensor(row["products"], dtype=torch.float64), path_places(points)))


def fit(recoveries: Recoveries, source: Mapping[str, Any]) -> Table:
    """Mean and covariance of the coefficients over runs.

    The mean is a robust ridge regression over all recoveries: `b` over all R runs, and `b_r` without run r. A run's own
    coefficients are `b - (R - 1) (b_r - b)`, as for a mean over runs. Their covariance, once more for the error of the
    mean, is what a new run may differ by.

    Raises:
        ValueError: fewer than 3 runs.
    """
    names = sorted(set(recoveries.runs))
    if len(names) < MIN_RUNS:
        raise ValueError(f"{len(names)} runs do not show how runs differ; {MIN_RUNS} are needed")
    mean, noise, inverse = _regression(recoveries)
    without = [_regression(recoveries.of(recoveries.runs != name))[0] for name in names]
    shifts = numpy.array(without) - mean
    between = (len(names) - 1) * (1 + 1 / len(names)) * shifts.T @ shifts
    covariance = between + inverse
    covariance[BENT], covariance[:, BENT] = 0.0, 0.0
    mean[BENT], covariance[BENT, BENT] = 0.0, UNSEEN_DEVIATION**2
    return Table(mean, covariance, noise, source)


def leave_one_group_out(recoveries: Recoveries, group_of: Mapping[str, str]) -> list[Left]:
    """Judge the fit on every run by the table without the run's whole group.

    Args:
        recoveries: of some groups; one that leaves fewer than 3 other runs is not judged.
        group_of: the group of each run.
    """
    found, whole = {}, recoveries.whole
    for group in {group_of[run] for run in recoveries.runs}:
        others = recoveries.of(numpy.array([group_of[run] != group for run in recoveries.runs]))
        if len(set(others.runs)) < MIN_RUNS:
            continue
        table = fit(others, {})
        for name in {run for run in recoveries.runs if group_of[run] == group}:
            found[name] = _judged(name, whole.of(whole.runs == name), table)
    return [found[name] for name in sorted(found)]


def _judged(name: str, mine: Recoveries, table: Table) -> Left:
    expected = mine.terms @ table.mean
    deviation = numpy.sqrt(numpy.einsum("ni,ij,nj->n", mine.terms, table.covariance, mine.terms))
    chosen, stale = [], []
    for failure in sorted(set(mine.failures)):
        rows = numpy.flatnonzero(mine.failures == failure)
        horizon = mine.horizons[rows[0]]
        safe = [row for row in rows if expected[row] + deviation[row] < horizon]
        chosen.append(mine.costs[min(safe, key=lambda row: expected[row])] / horizon if safe else 1.0)
        stale.append(mine.costs[rows[0]] / horizon)
    correlation = float(stats.spearmanr(expected, mine.costs).statistic)
    recomputed = float(numpy.mean([cost == 1.0 for cost in chosen]))
    costs = tuple(float(cost) for cost in chosen)
    return Left(name, len(mine.costs), correlation, costs, recomputed, float(numpy.mean(stale)))


def _regression(recoveries: Recoveries) -> tuple[_Array, float, _Array]:
    """Coefficients, noise of one recovery in iterations, and the covariance of the coefficients for given runs."""
    terms, costs = recoveries.terms, recoveries.costs
    noise = FIRST_NOISE_ITERATIONS
    huber = numpy.ones(len(costs))
    for _ in range(ROUNDS):
        weighted = terms * (huber / noise**2)[:, None]
        normal = weighted.T @ terms
        normal += RIDGE * numpy.diag(numpy.diag(normal)) + numpy.eye(len(FEATURES)) * 1e-9
        mean = numpy.asarray(numpy.linalg.solve(normal, weighted.T @ costs), dtype=numpy.float64)
        residuals = costs - terms @ mean
        noise = max(float(stats.median_abs_deviation(residuals, scale="normal")), 1.0)
        huber = numpy.minimum(1.0, HUBER_DEVIATIONS * noise / numpy.maximum(numpy.abs(residuals), 1e-9))
    return mean, noise, numpy.asarray(numpy.linalg.inv(normal), dtype=numpy.float64)
