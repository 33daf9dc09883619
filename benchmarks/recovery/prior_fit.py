"""From measured recoveries to the predictor's prior table, and how well it does on a family that it has not seen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    MOVE_TERMS,
    STALE,
    WINDOW_SHARE_OF_AGE,
    Context,
    Curve,
    Setting,
    Table,
    move_terms,
    reaches,
    skip_terms,
)
from cpsr.predictor.checkpoint_series import path_places, straightness
from cpsr.predictor.protocol import CAUTION_DEVIATIONS, HistoryEntry
from cpsr.predictor.statistics import merged

__all__ = ["Judged", "Measured", "Part", "fit", "judge", "measured_of"]

# Residuals beyond three robust deviations count less (Huber's weights): a few recoveries end far off.
HUBER_DEVIATIONS = 3.0
ROUNDS = 10
# Scatter of a single cost around its expectation: as many nats, whatever an iteration is worth, and this share of what
# is skipped or moved. Of GPTs, whose iterations are worth some 0.0003 nats, residuals of held-out families are 2
# iterations below a size of 10, and 21 at 100.
NOISE_NATS, NOISE_SHARE = 6.5e-4, 0.2
MIN_FAMILIES = 3  # a spread between families needs some
LOST_EXPONENTS = (1.0, 3.0)  # searched; a part costs its share at most
# What the network's direction costs beside the line's, over `reach * (1 - rate)`: 3.5 and 2.3 iterations less at 75% of
# `gpt-0.1M-cosine10`, seeds 0 and 1, nothing lost, and 2.3 and 0.1 after a failure (window 200, reach 170). Other
# stages and schedules were not measured, so the deviation is as large.
BENT_MEAN, BENT_DEVIATION = -0.016, 0.016
BENT = MOVE_TERMS.index("reach * (1 - rate) * bent")

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
        cost_iterations: of both, as measured, or the sum of the two where each was measured alone.
        noise_iterations: what chance alone makes of a cost where little is skipped or moved.
        move_iterations: of the move alone: measured with nothing lost, or what the cost differs from the skip's; None
            for a skip.
        sum_of_parts: whether the cost is such a sum.
    """

    family: str
    run: str
    failure: int
    context: Context
    setting: Setting
    cost_iterations: float
    noise_iterations: float
    move_iterations: float | None = None
    sum_of_parts: bool = False

    @property
    def noise(self) -> float:
        """Standard deviation of the skip's or the move's cost around its run's expectation, up to a common factor."""
        trained = self.context.horizon_iterations * self.context.learning_rate_ratio
        size = trained if self.move_iterations is None else self.setting.reach_iterations
        return self.noise_iterations + NOISE_SHARE * self.context.lost_share * size

    @property
    def allowed(self) -> bool:
        """Whether the product would go as far."""
        window, reach = self.setting.window_iterations, self.setting.reach_iterations
        return reach <= reaches(window)[-1] and window <= WINDOW_SHARE_OF_AGE * self.context.age_iterations


@dataclass(frozen=True)
class Part:
    """Costs of skips or of moves, one a row.

    Attributes:
        terms: `(n, terms)`; the first of them is what is skipped or moved.
        costs: in iterations, `(n,)`.
        noise: standard deviation of each around its run's expectation, up to a common factor, `(n,)`.
        lost_shares: of the state, `(n,)`.
        families: names, `(n,)`.
    """

    terms: _Array
    costs: _Array
    noise: _Array
    lost_shares: _Array
    families: NDArray[numpy.str_]

    def where(self, chosen: NDArray[numpy.bool_]) -> "Part":
        """The rows chosen."""
        return Part(**{name: values[chosen] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Judged:
    """How a table does on a family that it is not fitted to, at failures that took the whole state.

    Costs are pooled: their sum over the sum of the horizons.

    Attributes:
        family: its name.
        failures: of its runs.
        horizon_iterations: of all of them.
        skip_deviation: mean distance of the expected from the measured cost of a skip.
        move_deviation: of a skip with a move that the product may make.
        surprise: mean error of the skips over the mean deviation that the table states.
        inside_68: share of the measured costs within one deviation, their own noise included.
        inside_95: within two.
        stale: cost of going on from the checkpoint.
        expected: what that was expected to cost.
        chosen: cost of the rule's choices; 1 recomputes.
        recomputed: share of the failures at which it recomputes.
        dearer: share that cost more than recomputing.
        regret: cost over the cheapest measured arm of each failure, which is partly cheap by chance.
        own_regret: the same by a fit to the family itself: without chance, and without what the terms cannot express.
    """

    family: str
    failures: int
    horizon_iterations: float
    skip_deviation: float
    move_deviation: float
    surprise: float
    inside_68: float
    inside_95: float
    stale: float
    expected: float
    chosen: float
    recomputed: float
    dearer: float
    regret: float
    own_regret: float


def measured_of(
    rows: Iterable[Mapping[str, Any]], worths: Mapping[str, IterationWorth], family_of: Mapping[str, str]
) -> list[Measured]:
    """The rows of `collect`, final gaps in iterations; what diverged is left out, and moves whose skip did."""
    found: list[Measured] = []
    for number, row in enumerate(rows):
        run, context = row["run"], _context(row)
        family, worth = family_of[run], worths[run]
        skip: float | None = None
        for recovery in row["recoveries"]:
            if recovery["final_gap_nats"] is None:
                continue
            cost, chance = end_cost_iterations(recovery["final_gap_nats"], worth), NOISE_NATS / worth.nats
            if recovery["setting"] is None:
                skip = cost
                found.append(Measured(family, run, number, context, STALE, cost, chance))
            elif skip is not None:  # else the skip diverged
                setting = _setting(recovery["setting"], context)
                alone = recovery.get("alone", False)
                both, move = (skip + cost, cost) if alone else (cost, cost - skip)
                found.append(Measured(family, run, number, context, setting, both, chance, move, alone))
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
    move.covariance[BENT], move.covariance[:, BENT] = 0.0, 0.0
    move.mean[BENT], move.covariance[BENT, BENT] = BENT_MEAN, BENT_DEVIATION**2
    return Table(skip, move, source)


def _part(measured: Sequence[Measured]) -> Part:
    rows = []
    for one in measured:
        skip = one.move_iterations is None
        terms = skip_terms(one.context) if skip else move_terms(one.context, one.setting)
        cost = one.cost_iterations if one.move_iterations is None else one.move_iterations
        rows.append((terms, cost, one.noise, one.context.lost_share, one.family))
    return Part(*map(numpy.array, zip(*rows, strict=True)))


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
    scale = part.noise
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
    whole, scale = parts.terms @ mean, parts.noise

    def misfit(exponent: float) -> float:
        return float(numpy.sum(numpy.abs(parts.costs - parts.lost_shares**exponent * whole) / scale))

    return float(optimize.minimize_scalar(misfit, bounds=LOST_EXPONENTS, method="bounded").x)


def judge(measured: Sequence[Measured]) -> list[Judged]:
    """Judge the fit on every family by the table without it; none where that leaves fewer than 3 others."""
    families = sorted({one.family for one in measured})
    if len(families) <= MIN_FAMILIES:
        return []
    judged = []
    for family in families:
        mine = [one for one in measured if one.family == family and one.context.lost_share == 1.0]
        arms = [one for one in mine if one.setting == STALE or one.allowed]
        others = fit([one for one in measured if one.family != family], {})
        judged.append(Judged(family, **_errors(arms, others), **_choices(arms, others, _own(mine))))
    return judged


def _own(mine: Sequence[Measured]) -> Callable[[Measured], float]:
    """Cost of an arm by a fit to its family alone."""
    skip, _ = _regression(_part([one for one in mine if one.move_iterations is None]))
    move, _ = _regression(_part([one for one in mine if one.move_iterations is not None and one.allowed]))
    return lambda one: float(skip_terms(one.context) @ skip + move_terms(one.context, one.setting) @ move)


def _errors(arms: Sequence[Measured], table: Table) -> dict[str, Any]:
    expected = [table.expected(one.context, one.setting) for one in arms]
    horizons = numpy.array([one.context.horizon_iterations for one in arms])
    measured = numpy.array([one.cost_iterations for one in arms])
    errors = measured - [one.end_cost_iterations for one in expected]
    stated = numpy.array([one.deviation_iterations for one in expected])
    sizes = numpy.hypot(horizons, [one.setting.reach_iterations for one in arms])
    single = numpy.hypot(stated, [one.noise_iterations for one in arms] + NOISE_SHARE * sizes)
    stale = numpy.array([one.setting == STALE for one in arms])
    deviations = [
        float(numpy.abs(errors[of]).sum() / horizons[of].sum()) if of.any() else 0.0 for of in (stale, ~stale)
    ]
    return {
        "failures": int(stale.sum()),
        "horizon_iterations": float(horizons[stale].sum()),
        "skip_deviation": deviations[0],
        "move_deviation": deviations[1],
        "surprise": float(errors[stale].sum() / stated[stale].sum()),
        "inside_68": float(numpy.mean(numpy.abs(errors) < single)),
        "inside_95": float(numpy.mean(numpy.abs(errors) < 2 * single)),
        "stale": float(measured[stale].sum() / horizons[stale].sum()),
        "expected": float((measured - errors)[stale].sum() / horizons[stale].sum()),
    }


def _choices(arms: Sequence[Measured], table: Table, own: Callable[[Measured], float]) -> dict[str, Any]:
    rows = []
    for failure in sorted({one.failure for one in arms}):
        # One arm a setting: what was measured from the checkpoint, else the sum of its parts.
        measured = sorted((one for one in arms if one.failure == failure), key=lambda one: -one.sum_of_parts)
        of_setting = {one.setting: one for one in measured}
        here = list(of_setting.values())
        horizon = here[0].context.horizon_iterations
        setting, expected = table.best(here[0].context, [one.setting for one in here], CAUTION_DEVIATIONS)
        exact = expected.bound(CAUTION_DEVIATIONS) >= horizon
        taken = of_setting[setting]
        cost, smooth = (horizon, horizon) if exact else (taken.cost_iterations, own(taken))
        regret = cost - min(horizon, *(one.cost_iterations for one in here))
        rows.append((horizon, cost, exact, cost > horizon, regret, smooth - min(horizon, *map(own, here))))
    horizons, costs, recomputed, dearer, regrets, own_regrets = map(numpy.array, zip(*rows, strict=True))
    return {
        "chosen": float(costs.sum() / horizons.sum()),
        "recomputed": float(recomputed.mean()),
        "dearer": float(dearer.mean()),
        "regret": float(regrets.sum() / horizons.sum()),
        "own_regret": float(own_regrets.sum() / horizons.sum()),
    }
