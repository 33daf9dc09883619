"""From measured recoveries to the predictor's prior table, and how well it does on a run that it has not seen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from scipy import stats

from cpsr.benchmarks.prior.collect import read_rows
from cpsr.predictor.calibration import FEATURES, Context, Direction, Setting, Table, features

__all__ = ["Left", "Recoveries", "expected_without", "fit", "leave_one_run_out", "read", "read_pairs"]

# Pulls coefficients that the data leave open to zero: a share of each feature's own mean square.
RIDGE = 1e-2
# Residuals beyond three robust deviations count less (Huber's weights): a few lags are found at the edge of a noisy
# curve, a hundred iterations off.
HUBER_DEVIATIONS = 3.0
ROUNDS = 10
# Where too few runs show it, the network's direction may cost or save a fifth of the reach.
UNSEEN_DEVIATION = 0.2
# Before the residuals are known.
FIRST_NOISE_ITERATIONS = 10.0

MIN_RUNS = 3  # a spread between runs needs some

REACH, BENT = FEATURES.index("reach"), FEATURES.index("reach * bent")

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Recoveries:
    """Measured lags, one a row.

    Attributes:
        terms: features, `(n, len(FEATURES))`.
        lags: in iterations, `(n,)`.
        errors: standard errors of the lags, `(n,)`.
        runs: names, `n` of them.
        failures: number of the failure in the file, `n` of them.
    """

    terms: _Array
    lags: _Array
    errors: _Array
    runs: Sequence[str]
    failures: Sequence[int]

    def of(self, chosen: Sequence[bool]) -> "Recoveries":
        """The rows chosen."""
        rows = [row for row, one in enumerate(chosen) if one]
        return Recoveries(
            self.terms[rows],
            self.lags[rows],
            self.errors[rows],
            [self.runs[row] for row in rows],
            [self.failures[row] for row in rows],
        )


@dataclass(frozen=True)
class Left:
    """How the table fitted to all other runs does on one.

    Attributes:
        run: its name.
        recoveries: measured in it.
        correlation: rank correlation (Spearman) of expected and measured lag.
        regret_iterations: mean over failures of the lag of the measured setting that the table likes best, over the
            best one that was measured there.
        stale_regret_iterations: the same of going on from the checkpoint.
    """

    run: str
    recoveries: int
    correlation: float
    regret_iterations: float
    stale_regret_iterations: float


def read(path: Path) -> Recoveries:
    """Read what `collect` wrote; recoveries without a lag are left out."""
    return _recoveries(read_rows(path))


def read_pairs(path: Path) -> Recoveries:
    """Read what `collect_directions` wrote; pairs of the same direction, or without a lag, are left out."""
    return _recoveries(row for row in read_rows(path) if _is_pair(row["recoveries"]))


def _is_pair(recoveries: Sequence[Mapping[str, Any]]) -> bool:
    complete = all(recovery["lag_iterations"] is not None for recovery in recoveries)
    return complete and [recovery["setting"]["direction"] for recovery in recoveries] == ["line", "vitp"]


def _recoveries(rows: Iterable[Mapping[str, Any]]) -> Recoveries:
    terms, lags, errors, runs, failures = [], [], [], [], []
    for number, row in enumerate(rows):
        for recovery in row["recoveries"]:
            if recovery["lag_iterations"] is None:
                continue
            terms.append(_terms(row, recovery["setting"]))
            lags.append(recovery["lag_iterations"])
            error = recovery["standard_error"]
            errors.append(FIRST_NOISE_ITERATIONS if error is None or math.isnan(error) else error)
            runs.append(row["run"])
            failures.append(number)
    return Recoveries(numpy.array(terms), numpy.array(lags), numpy.array(errors), runs, failures)


def _terms(row: Mapping[str, Any], setting: Mapping[str, Any] | None) -> _Array:
    horizon = row["failure"] - row["checkpoint"]
    context = Context(
        horizon_iterations=horizon,
        age_iterations=row["checkpoint"],
        interval_iterations=row["interval"],
        learning_rate_ratio=row["learning_rate"] / row["peak_learning_rate"],
    )
    if setting is None:  # the checkpoint itself: no window matters where nothing is followed
        return features(context, Setting(float(row["interval"]), 0.0, 0.0))
    direction: Direction = setting.get("direction", "line")
    return features(
        context, Setting(setting["window_iterations"], setting["gain"] * horizon, setting["base"], direction)
    )


def fit(recoveries: Recoveries, source: Mapping[str, Any], pairs: Recoveries | None = None) -> Table:
    """Mean and covariance of the coefficients over runs.

    Args:
        recoveries: with settings drawn at random, all in the line's direction.
        source: kept with the table.
        pairs: recoveries that differ in their direction alone; the coefficient of the network's direction comes from
            their differences. None: it is open.

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
    without = [_regression(recoveries.of([run != name for run in recoveries.runs]))[0] for name in names]
    shifts = numpy.array(without) - mean
    between = (len(names) - 1) * (1 + 1 / len(names)) * shifts.T @ shifts
    covariance = between + inverse
    covariance[BENT], covariance[:, BENT] = 0.0, 0.0
    mean[BENT], covariance[BENT, BENT] = (0.0, UNSEEN_DEVIATION**2) if pairs is None else _bent(pairs)
    return Table(mean, covariance, noise, source)


def _bent(pairs: Recoveries) -> tuple[float, float]:
    """What the network's direction adds to the lag per iteration of reach: mean over runs, and variance of a run's."""
    shares: dict[str, list[float]] = {}
    for failure in sorted(set(pairs.failures)):
        line, bent = (row for row, number in enumerate(pairs.failures) if number == failure)
        difference = pairs.lags[bent] - pairs.lags[line]
        shares.setdefault(pairs.runs[line], []).append(float(difference / pairs.terms[bent, REACH]))
    per_run = numpy.array([numpy.median(of) for of in shares.values()])
    if len(per_run) < MIN_RUNS:
        return 0.0, UNSEEN_DEVIATION**2
    return float(per_run.mean()), float(per_run.var(ddof=1) * (1 + 1 / len(per_run)))


def expected_without(recoveries: Recoveries, run: str) -> tuple[_Array, _Array]:
    """Expected lags of one run's recoveries by the table without it, and the measured ones."""
    inside = [one == run for one in recoveries.runs]
    mine = recoveries.of(inside)
    return mine.terms @ fit(recoveries.of([not one for one in inside]), {}).mean, mine.lags


def leave_one_run_out(recoveries: Recoveries) -> list[Left]:
    """Judge the fit on every run by the table without it."""
    found = []
    for name in sorted(set(recoveries.runs)):
        inside = [run == name for run in recoveries.runs]
        table = fit(recoveries.of([not one for one in inside]), {})
        mine = recoveries.of(inside)
        expected = mine.terms @ table.mean
        deviation = numpy.sqrt(numpy.einsum("ni,ij,nj->n", mine.terms, table.covariance, mine.terms))
        regrets, stale = [], []
        for failure in sorted(set(mine.failures)):
            rows = [row for row, number in enumerate(mine.failures) if number == failure]
            best = mine.lags[rows].min()
            chosen = min(rows, key=lambda row: expected[row] + deviation[row])
            regrets.append(mine.lags[chosen] - best)
            stale.append(mine.lags[rows[0]] - best)
        correlation = float(stats.spearmanr(expected, mine.lags).statistic)
        found.append(Left(name, len(mine.lags), correlation, float(numpy.mean(regrets)), float(numpy.mean(stale))))
    return found


def _regression(recoveries: Recoveries) -> tuple[_Array, float, _Array]:
    """Coefficients, noise of one recovery in iterations, and the covariance of the coefficients for given runs."""
    terms, lags = recoveries.terms, recoveries.lags
    noise = FIRST_NOISE_ITERATIONS
    huber = numpy.ones(len(lags))
    for _ in range(ROUNDS):
        deviations = numpy.sqrt(noise**2 + recoveries.errors**2)
        weighted = terms * (huber / deviations**2)[:, None]
        normal = weighted.T @ terms
        normal += RIDGE * numpy.diag(numpy.diag(normal)) + numpy.eye(len(FEATURES)) * 1e-9
        mean = numpy.linalg.solve(normal, weighted.T @ lags)
        residuals = lags - terms @ mean
        spread = float(stats.median_abs_deviation(residuals, scale="normal"))
        noise = math.sqrt(max(spread**2 - float(numpy.median(recoveries.errors)) ** 2, 1.0))
        huber = numpy.minimum(1.0, HUBER_DEVIATIONS * deviations / numpy.maximum(numpy.abs(residuals), 1e-9))
    return mean, noise, numpy.linalg.inv(normal)
