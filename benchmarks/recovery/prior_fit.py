"""From measured recoveries to the predictor's prior table, and how well it does on a family that it has not seen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from scipy import optimize, stats
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GroupKFold

from cpsr.benchmarks.recovery.end_cost import IterationWorth, end_cost_iterations
from cpsr.predictor.calibration import (
    FURTHEST_ITERATIONS,
    MOVE_TERMS,
    REACH_OF_WINDOW,
    STALE,
    WINDOW_SHARE_OF_AGE,
    Context,
    Curve,
    Setting,
    Table,
    move_terms,
    skip_terms,
)
from cpsr.predictor.checkpoint_series import path_places, straightness
from cpsr.predictor.line import CAUTION_DEVIATIONS
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import merged

__all__ = ["Judged", "Measured", "Part", "fit", "judge", "measured_of", "noise"]

# Residuals beyond three robust deviations count less (Huber's weights): a few recoveries end far off.
HUBER_DEVIATIONS = 3.0
ROUNDS = 10
# Scatter of a single cost around its run's expectation: as many iterations, and this share of what is skipped or moved.
NOISE_ITERATIONS, NOISE_SHARE = 6.0, 0.1
MIN_FAMILIES = 3  # a spread between families needs some
LOST_EXPONENTS = (1.0, 3.0)  # searched; a part costs its share at most
# The network's direction may cost or save a fifth of the reach, while no measurement shows that it saves anything.
UNSEEN_DEVIATION = 0.2
BENT = MOVE_TERMS.index("reach * bent")

_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Measured:
    """A cost that was measured, of a skip, of a move, or of both.

    Attributes:
        family: of models, tasks and optimizers, that is held out as one.
        run: its name.
        failure: number of the failure among all.
        context: of the failure.
        setting: of the move; `STALE` for the skip alone.
        alone: moved at the exact state, with nothing lost: the cost of the move alone.
        cost_iterations: as measured.
        move_iterations: of the move: the cost, or what it differs from the skip's; None for a skip.
    """

    family: str
    run: str
    failure: int
    context: Context
    setting: Setting
    alone: bool
    cost_iterations: float
    move_iterations: float | None = None

    @property
    def allowed(self) -> bool:
        """Whether the product would go as far."""
        window, reach = self.setting.window_iterations, self.setting.reach_iterations
        furthest = min(REACH_OF_WINDOW[-1] * window, FURTHEST_ITERATIONS)
        return reach <= furthest and window <= WINDOW_SHARE_OF_AGE * self.context.age_iterations


@dataclass(frozen=True)
class Part:
    """Costs of skips or of moves, one a row.

    Attributes:
        terms: `(n, terms)`; the first of them is what is skipped or moved.
        costs: in iterations, `(n,)`.
        lost_shares: of the state, `(n,)`.
        families: names, `(n,)`.
    """

    terms: _Array
    costs: _Array
    lost_shares: _Array
    families: NDArray[numpy.str_]

    def where(self, chosen: NDArray[numpy.bool_]) -> "Part":
        """The rows chosen."""
        return Part(**{name: values[chosen] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Judged:
    """How a table does on a family that it is not fitted to.

    Attributes:
        family: its name.
        failures: of its runs, that took the whole state.
        deviation: mean distance of the expected from the measured cost over the settings that the product may take,
            by the pooled horizon.
        surprise: distance of the family's pooled cost from the expected one, in the deviations that the table states.
        inside_68, inside_95: shares of the measured costs within these intervals, their own noise included.
        chosen: what the rule's choices cost, by the pooled horizon; 1 recomputes.
        recomputed: share of the failures at which it recomputes.
        regret: that cost over the cheapest measured arm of each failure, chance included.
        stale: cost of going on from the checkpoint, by the pooled horizon.
    """

    family: str
    failures: int
    deviation: float
    surprise: float
    inside_68: float
    inside_95: float
    chosen: float
    recomputed: float
    regret: float
    stale: float


def measured_of(
    rows: Iterable[Mapping[str, Any]], worths: Mapping[str, IterationWorth], family_of: Mapping[str, str]
) -> list[Measured]:
    """The rows of `collect`, their final gaps in iterations; what diverged is left out."""
    found: list[Measured] = []
    for number, row in enumerate(rows):
        skip: float | None = None
        for recovery in row["recoveries"]:
            if recovery["final_gap_nats"] is None:
                continue
            cost = end_cost_iterations(recovery["final_gap_nats"], worths[row["run"]])
            context, alone = _context(row), recovery.get("alone", False)
            if recovery["setting"] is None:
                setting, skip, move = STALE, cost, None
            elif not alone and skip is None:  # the skip diverged: there is no difference
                continue
            else:
                setting = _setting(recovery["setting"], context)
                move = cost if alone or skip is None else cost - skip
            family = family_of[row["run"]]
            found.append(Measured(family, row["run"], number, context, setting, alone, cost, move))
    return found


def _setting(kept: Mapping[str, Any], context: Context) -> Setting:
    reach = kept["gain"] * context.horizon_iterations
    return Setting(kept["window_iterations"], reach, kept.get("direction", "line"))


def _context(row: Mapping[str, Any]) -> Context:
    return Context(
        horizon_iterations=row["failure"] - row["checkpoint"],
        age_iterations=row["checkpoint"],
        learning_rate_ratio=row["learning_rate"] / row["peak_learning_rate"],
        straightness=_straightness(row),
        lost_share=row["lost_share"],
    )


def _straightness(row: Mapping[str, Any]) -> float:
    """Of the path that the row's products describe, as the predictor measures it."""
    count = len(row["times"])
    points = [HistoryEntry(place * row["interval"], float(place), 0.0) for place in range(count)]
    return straightness(merged(torch.tensor(row["products"], dtype=torch.float64), path_places(points)))


def fit(measured: Sequence[Measured], source: Mapping[str, Any]) -> Table:
    """Both curves.

    Raises:
        ValueError: fewer than 3 families.
    """
    skips = [one for one in measured if one.move_iterations is None]
    moves = [one for one in measured if one.move_iterations is not None and one.allowed]
    skip = _curve(_part(skips))
    move = _curve(_part(moves))
    if not any(one.setting.direction == "vitp" for one in moves):
        move.covariance[BENT], move.covariance[:, BENT] = 0.0, 0.0
        move.covariance[BENT, BENT] = UNSEEN_DEVIATION**2
    return Table(skip, move, source)


def _part(measured: Sequence[Measured]) -> Part:
    rows = []
    for one in measured:
        skip = one.move_iterations is None
        terms = skip_terms(one.context) if skip else move_terms(one.context, one.setting)
        share = 1.0 if one.alone else one.context.lost_share
        cost = one.cost_iterations if one.move_iterations is None else one.move_iterations
        rows.append((terms, cost, share, one.family))
    return Part(*map(numpy.array, zip(*rows, strict=True)))


def noise(terms: _Array, lost_shares: _Array) -> _Array:
    """Standard deviation of each single cost around its run's expectation, up to a common factor; `(n,)`."""
    return NOISE_ITERATIONS + NOISE_SHARE * lost_shares * numpy.abs(terms[:, 0])


def _curve(part: Part) -> Curve:
    """Mean and covariance of the coefficients over families, and the power of the lost share.

    The mean is `b` over all F families, and `b_f` without family f. A family's own coefficients are
    `b - (F - 1) (b_f - b)`, as for a mean over families. Their covariance, once more for the error of the mean, is what
    a new family may differ by. The posterior covariance of the regression is added.

    Raises:
        ValueError: fewer than 3 families.
    """
    whole = part.where(part.lost_shares == 1.0)
    count = len(set(whole.families))
    if count < MIN_FAMILIES:
        raise ValueError(f"{count} families do not show how families differ; {MIN_FAMILIES} are needed")
    mean, posterior = _regression(whole)
    folds = GroupKFold(count).split(whole.terms, groups=whole.families)
    shifts = numpy.array([_regression(_rows(whole, kept))[0] for kept, _ in folds]) - mean
    between = (count - 1) * (1 + 1 / count) * shifts.T @ shifts
    return Curve(mean, between + posterior, _lost_exponent(part.where(part.lost_shares < 1.0), mean))


def _rows(part: Part, places: NDArray[numpy.int64]) -> Part:
    chosen = numpy.zeros(len(part.costs), dtype=bool)
    chosen[places] = True
    return part.where(chosen)


def _regression(part: Part) -> tuple[_Array, _Array]:
    """Bayesian ridge regression with Huber's weights: coefficients, and their covariance for given families."""
    scale = noise(part.terms, part.lost_shares)
    terms, costs = part.terms / scale[:, None], part.costs / scale
    sizes = numpy.sqrt(numpy.mean(terms**2, axis=0))
    sizes[sizes == 0.0] = 1.0  # a term that was never drawn keeps its prior
    model, huber = BayesianRidge(fit_intercept=False), numpy.ones(len(scale))
    for _ in range(ROUNDS):
        root = numpy.sqrt(huber)
        model.fit(terms / sizes * root[:, None], costs * root)
        residuals = costs - model.predict(terms / sizes)
        spread = HUBER_DEVIATIONS * stats.median_abs_deviation(residuals, scale="normal")
        huber = numpy.minimum(1.0, spread / numpy.maximum(numpy.abs(residuals), 1e-9))
    return model.coef_ / sizes, model.sigma_ / numpy.outer(sizes, sizes)


def _lost_exponent(parts: Part, mean: _Array) -> float:
    """The power of the share that the costs of lost parts follow; 1 without any."""
    if not len(parts.costs):
        return LOST_EXPONENTS[0]
    whole, scale = parts.terms @ mean, noise(parts.terms, parts.lost_shares)

    def misfit(exponent: float) -> float:
        return float(numpy.sum(numpy.abs(parts.costs - parts.lost_shares**exponent * whole) / scale))

    return float(optimize.minimize_scalar(misfit, bounds=LOST_EXPONENTS, method="bounded").x)


def judge(measured: Sequence[Measured]) -> list[Judged]:
    """Judge the fit on every family by the table without it, where the whole state was lost.

    Families that leave fewer than 3 others are not judged.
    """
    families, judged = sorted({one.family for one in measured}), []
    for family in families:
        if len(families) <= MIN_FAMILIES:
            continue
        table = fit([one for one in measured if one.family != family], {})
        mine = [one for one in measured if one.family == family and one.context.lost_share == 1.0 and not one.alone]
        judged.append(_judged(family, [one for one in mine if one.allowed or one.setting == STALE], table))
    return judged


def _judged(family: str, mine: Sequence[Measured], table: Table) -> Judged:
    expected = [table.expected(one.context, one.setting) for one in mine]
    horizons = numpy.array([one.context.horizon_iterations for one in mine])
    errors = numpy.array(
        [one.cost_iterations - cost.end_cost_iterations for one, cost in zip(mine, expected, strict=True)]
    )
    stated = numpy.array([cost.deviation_iterations for cost in expected])
    moved = numpy.array([one.setting.reach_iterations for one in mine])
    single = numpy.hypot(stated, NOISE_ITERATIONS + NOISE_SHARE * numpy.maximum(horizons, moved))
    chosen, recomputed, stale, cheapest, lost = [], [], [], [], []
    for failure in sorted({one.failure for one in mine}):
        arms = [one for one in mine if one.failure == failure]
        horizon = arms[0].context.horizon_iterations
        setting, cost = table.best(arms[0].context, [one.setting for one in arms], CAUTION_DEVIATIONS)
        recomputed.append(cost.bound(CAUTION_DEVIATIONS) >= horizon)
        of_setting = next(one.cost_iterations for one in arms if one.setting == setting)
        chosen.append(horizon if recomputed[-1] else of_setting)
        stale.append(next((one.cost_iterations for one in arms if one.setting == STALE), math.nan))
        cheapest.append(min(horizon, *(one.cost_iterations for one in arms)))
        lost.append(horizon)
    total = sum(lost)
    return Judged(
        family,
        len(lost),
        float(numpy.abs(errors).sum() / horizons.sum()),
        float(errors.sum() / stated.sum()),
        float(numpy.mean(numpy.abs(errors) < single)),
        float(numpy.mean(numpy.abs(errors) < 2 * single)),
        sum(chosen) / total,
        float(numpy.mean(recomputed)),
        (sum(chosen) - sum(cheapest)) / total,
        float(numpy.nansum(stale) / total),
    )
