"""End cost of a predicted recovery of this run at any interval, by the offline prior and its own recoveries."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy

from cpsr.checkpoint.retention import Retention
from cpsr.journal import RecoveryRow
from cpsr.planner.recovery_curve import CostObservation, EndCostCurve
from cpsr.predictor.calibration import Expected, table
from cpsr.predictor.line import LAG_DEVIATION_ITERATIONS, LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.series import TYPICAL_STRAIGHTNESS

__all__ = ["INTERVALS_ITERATIONS", "Schedule", "expected_costs", "lost_share", "measured_costs"]

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
    predictor: LinePredictor,
    schedule: Schedule,
    kept: Retention,
    straightness: float | None = None,
    lost: float = 1.0,
) -> tuple[EndCostCurve, int] | None:
    """The line through the end costs that the prior expects, and the longest interval to predict from.

    Args:
        predictor: with the settings of this run, but without its measurements, which are added later.
        schedule: progress of the run.
        kept: how much history is kept.
        straightness: of the run's own path; None takes the typical one.
        lost: share of the state that a failure is expected to lose.

    Returns:
        None if nothing can be predicted at any interval yet.
    """
    straight = TYPICAL_STRAIGHTNESS if straightness is None else straightness
    rows: list[tuple[float, float]] = []
    expected: list[Expected] = []
    longest = 0
    for interval in INTERVALS_ITERATIONS:
        horizons = [max(1, round(share * interval)) for share in HORIZON_SHARES]
        found = [_expected(predictor, schedule, kept, interval, horizon, straight) for horizon in horizons]
        possible = [(horizon, one) for horizon, one in zip(horizons, found, strict=True) if one is not None]
        if len(possible) < len(horizons):
            break
        longest = interval
        rows += [(float(horizon), float(interval)) for horizon, _ in possible]
        expected += [one.of_part(lost) for _, one in possible]
    if not rows:
        return None
    places = numpy.array(rows)
    costs = numpy.array([one.end_cost_iterations for one in expected])
    coefficients = numpy.linalg.lstsq(numpy.column_stack([numpy.ones(len(places)), places]), costs, rcond=None)[0]
    # The errors of these costs are fully correlated.
    deviation = float(numpy.mean([one.deviation_iterations for one in expected]))
    errors = [deviation, *(deviation / places.mean(axis=0))]
    path = "a typical path" if straightness is None else f"the run's own path (straightness {straightness:.2f})"
    part = "" if lost == 1.0 else f", {lost:.0%} of the state lost"
    scatter = lost * table().noise_iterations
    source = f"the offline prior for {path}{part}"
    return EndCostCurve.with_independent_prior(coefficients.tolist(), errors, scatter, source), longest


def lost_share(recoveries: Iterable[RecoveryRow]) -> float:
    """Mean share of the state that the run's failures have lost, with one failure in advance that loses all.

    Failures after which every rank had its state do not count, nor rows of older journals, which lack the share.
    """
    shares = [1.0, *filter(None, (_share(row) for row in recoveries))]
    return sum(shares) / len(shares)


def measured_costs(
    recoveries: Iterable[RecoveryRow], watch_iterations: int, lost: float = 1.0
) -> Iterator[CostObservation]:
    """What this run's recoveries tell about the end cost, oldest first.

    A lag tells it to some 27 iterations. A vetoed prediction cost the horizon, since it is recomputed.
    One that was rolled back also cost the iterations of its watch.

    Args:
        recoveries: of the run.
        watch_iterations: of a predicted restart.
        lost: share of the state for which the lags are to hold: they are in proportion to what was lost.
    """
    for row in sorted(recoveries, key=lambda one: one.created_unix_seconds):
        yield from _recovered(row, watch_iterations, lost)


def _recovered(recovery: RecoveryRow, watch_iterations: int, lost: float) -> Iterator[CostObservation]:
    if recovery.failure_iteration is None or recovery.checkpoint_iteration is None:
        return
    horizon = recovery.failure_iteration - recovery.checkpoint_iteration
    lag = recovery.guard.get("lag")
    if recovery.outcome == "vetoed":
        yield from _observed(horizon, recovery.settings, horizon, 0.0)
    elif recovery.outcome == "rolled_back":
        yield from _observed(horizon, recovery.settings, horizon + watch_iterations, 0.0)
    elif lag is not None and not recovery.settings.get("own_series_operators"):  # else of several horizons
        measured = lag["lag_iterations"], lag["standard_error_iterations"]
        yield from _lagged(horizon, recovery.settings, *measured, _share(recovery) or 1.0, lost)


def _share(recovery: RecoveryRow) -> float | None:
    """Share of the state that was lost, as the choice of the state has recorded it."""
    share = recovery.settings.get("lost_share", recovery.guard.get("lost_share"))
    return None if share is None else float(share)


def _expected(
    predictor: LinePredictor,
    schedule: Schedule,
    kept: Retention,
    interval: int,
    horizon: int,
    straightness: float,
) -> Expected | None:
    """Expected end cost with this checkpoint interval, the newest checkpoint now, at the current learning rate."""
    count = min(kept.history_checkpoints(interval), schedule.iteration // interval + 1)
    rate = schedule.learning_rate
    points = [
        HistoryEntry(iteration, rate * iteration, rate)
        for iteration in range(schedule.iteration - (count - 1) * interval, schedule.iteration + 1, interval)
    ]
    failure = schedule.iteration + horizon
    found = predictor.expected(points, Target(failure, rate * failure, schedule.peak_learning_rate), straightness)
    return None if isinstance(found, str) else found


def _lagged(
    horizon: float, settings: object, lag: float, error: float, share: float, lost: float
) -> Iterator[CostObservation]:
    """What a lag after the loss of a share of the state tells about the end cost where `lost` of it is lost."""
    error = math.hypot(error / share, LAG_DEVIATION_ITERATIONS)
    yield from _observed(horizon, settings, lost * lag / share, lost * error)


def _observed(horizon: float, settings: object, cost: float, error: float) -> Iterator[CostObservation]:
    """One observation, if the settings name the interval of the checkpoints and all is finite."""
    context = settings.get("context") if isinstance(settings, dict) else None
    if context is None or not all(math.isfinite(number) for number in (cost, error)):
        return
    yield CostObservation(float(horizon), float(context["interval_iterations"]), float(cost), float(error))
