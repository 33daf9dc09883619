"""End cost of a predicted recovery of this run at any interval, by the offline prior and its own recoveries."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy

from cpsr.config import CheckpointConfig
from cpsr.journal import RecoveryRow, RehearsalRow
from cpsr.planner.recovery_curve import CostObservation, EndCostCurve
from cpsr.predictor.calibration import Expected, table
from cpsr.predictor.line import REHEARSAL_DEVIATION_ITERATIONS, LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = ["INTERVALS_ITERATIONS", "Schedule", "expected_costs", "measured_costs"]

# Intervals at which the prior is evaluated, in iterations: it is smooth between them.
INTERVALS_ITERATIONS = (10, 20, 35, 50, 75, 100, 150, 200, 300, 500)
# Failures at which it is evaluated, as shares of the interval: f is anywhere in it.
HORIZON_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Schedule:
    """Progress of the training, as far as the expected end cost depends on it.

    Attributes:
        iteration: completed steps.
        learning_rate: of the next one.
        peak_learning_rate: largest so far.
    """

    iteration: int
    learning_rate: float
    peak_learning_rate: float


def expected_costs(
    predictor: LinePredictor, schedule: Schedule, checkpoint: CheckpointConfig
) -> tuple[EndCostCurve, int] | None:
    """The line through the end costs that the prior expects, and the longest interval to predict from.

    Args:
        predictor: with the settings of this run, but without its measurements, which are added later.
        schedule: progress of the run.
        checkpoint: how much history is kept.

    Returns:
        None if nothing can be predicted at any interval yet.
    """
    rows: list[tuple[float, float]] = []
    expected: list[Expected] = []
    longest = 0
    for interval in INTERVALS_ITERATIONS:
        horizons = [max(1, round(share * interval)) for share in HORIZON_SHARES]
        found = [_expected(predictor, schedule, checkpoint, interval, horizon) for horizon in horizons]
        possible = [(horizon, one) for horizon, one in zip(horizons, found, strict=True) if one is not None]
        if len(possible) < len(horizons):
            break
        longest = interval
        rows += [(float(horizon), float(interval)) for horizon, _ in possible]
        expected += [one for _, one in possible]
    if not rows:
        return None
    places = numpy.array(rows)
    costs = numpy.array([one.end_cost_iterations for one in expected])
    coefficients = numpy.linalg.lstsq(numpy.column_stack([numpy.ones(len(places)), places]), costs, rcond=None)[0]
    # The errors of these costs are fully correlated.
    deviation = float(numpy.mean([one.deviation_iterations for one in expected]))
    errors = [deviation, *(deviation / places.mean(axis=0))]
    return EndCostCurve.with_independent_prior(
        coefficients.tolist(), errors, table().noise_iterations, "the offline prior"
    ), longest


def measured_costs(
    rehearsals: Iterable[RehearsalRow], recoveries: Iterable[RecoveryRow], watch_iterations: int
) -> Iterator[CostObservation]:
    """What this run's rehearsals and recoveries tell about the end cost, oldest first.

    A lag tells it to some 27 iterations, as for the predictor.

    A vetoed prediction, also in a rehearsal, cost the horizon, since it is recomputed. One that diverged or was rolled
    back also cost the iterations of its watch.
    """
    found = [(row.created_unix_seconds, _rehearsed(row, watch_iterations)) for row in rehearsals]
    found += [(row.created_unix_seconds, _recovered(row, watch_iterations)) for row in recoveries]
    for _, costs in sorted(found, key=lambda one: one[0]):
        yield from costs


def _rehearsed(rehearsal: RehearsalRow, watch_iterations: int) -> Iterator[CostObservation]:
    horizon = rehearsal.failure_iteration - rehearsal.checkpoint_iteration
    if rehearsal.outcome == "measured" and rehearsal.lag_iterations is not None:
        error = math.hypot(rehearsal.lag_standard_error_iterations or 0.0, REHEARSAL_DEVIATION_ITERATIONS)
        yield from _observed(horizon, rehearsal.settings, rehearsal.lag_iterations, error)
    elif rehearsal.outcome == "diverged":
        yield from _observed(horizon, rehearsal.settings, horizon + watch_iterations, 0.0)
    elif rehearsal.outcome == "refused" and rehearsal.guard:  # the guard had checked a predicted state
        yield from _observed(horizon, rehearsal.settings, horizon, 0.0)


def _recovered(recovery: RecoveryRow, watch_iterations: int) -> Iterator[CostObservation]:
    if recovery.failure_iteration is None or recovery.checkpoint_iteration is None:
        return
    horizon = recovery.failure_iteration - recovery.checkpoint_iteration
    lag = recovery.guard.get("lag")
    if recovery.outcome == "vetoed":
        yield from _observed(horizon, recovery.settings, horizon, 0.0)
    elif recovery.outcome == "rolled_back":
        yield from _observed(horizon, recovery.settings, horizon + watch_iterations, 0.0)
    elif lag is not None and not recovery.settings.get("own_series_operators"):  # else of several horizons
        yield from _observed(horizon, recovery.settings, lag["lag_iterations"], lag["standard_error_iterations"])


def _expected(
    predictor: LinePredictor, schedule: Schedule, checkpoint: CheckpointConfig, interval: int, horizon: int
) -> Expected | None:
    """Expected end cost with this checkpoint interval, the newest checkpoint now, at the current learning rate."""
    count = min(checkpoint.history_checkpoints(interval), schedule.iteration // interval + 1)
    rate = schedule.learning_rate
    points = [
        HistoryEntry(iteration, rate * iteration, rate)
        for iteration in range(schedule.iteration - (count - 1) * interval, schedule.iteration + 1, interval)
    ]
    failure = schedule.iteration + horizon
    found = predictor.expected(points, Target(failure, rate * failure, schedule.peak_learning_rate))
    return None if isinstance(found, str) else found


def _observed(horizon: float, settings: object, cost: float, error: float) -> Iterator[CostObservation]:
    """One observation, if the settings name the interval of the checkpoints and all is finite."""
    context = settings.get("context") if isinstance(settings, dict) else None
    if context is None or not all(math.isfinite(number) for number in (cost, error)):
        return
    yield CostObservation(float(horizon), float(context["interval_iterations"]), float(cost), float(error))
