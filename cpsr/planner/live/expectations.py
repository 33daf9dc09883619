"""What a running job expects of failures, recoveries, loss and accuracy, fitted to its journal."""

import logging
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy

from cpsr.config import CPSRConfig
from cpsr.fitter.accuracy import AccuracyCurve, Backtest, fit_accuracy
from cpsr.fitter.failures import FailureClasses, FailureRate
from cpsr.fitter.loss_fit import LossFit, fit_loss
from cpsr.journal import JournalReader, RecoveryRow, ReportedFailure
from cpsr.planner.plan import Situation
from cpsr.planner.recovery_curve import EndCostCurve
from cpsr.predictor.backtest import HORIZON_ITERATIONS
from cpsr.predictor.calibration import STALE, Context, table
from cpsr.predictor.divergence_watch import WATCH_ITERATIONS

__all__ = [
    "Curves",
    "FitKind",
    "expected_costs",
    "fit_curves",
    "prior_curves",
]

logger = logging.getLogger(__name__)

FitKind = Literal["loss", "predictor", "failure_rate"]
# `planner.mtbf_hours` counts as much as this number of observed failures.
PRIOR_FAILURES = 1.0
# A restart begins within minutes of its failure, and reports by people are not exact to the second.
SAME_FAILURE_SECONDS = 600.0
# Recent losses say more about the next phase than old ones, and a fit to a million would take seconds.
LOSSES_MAX = 20_000
# Points of a fitted loss curve, for plots: a falling curve needs no more, and a fit stays a few kilobytes.
CURVE_POINTS = 65
# Kept predictions that a run starts with, so that a first veto is no verdict.
KEPT_BEFORE = 4
NONE_YET: Mapping[str, int] = {}


@dataclass(frozen=True)
class Curves:
    """The fitted curves of the run at the end of a phase.

    Attributes:
        iteration: at the fit.
        failures: how often the job fails, in each class.
        outcomes: number of the run's predicted recoveries with each outcome.
        lost_share: mean share of the state that the run's failures have lost; 1 before any.
        predict_seconds: median of the predictions and injections so far; 0 without any.
        loss: of the training; None if it cannot be fitted.
        accuracy: error of the predictor over checkpoints; None if it cannot be fitted.
    """

    iteration: int
    failures: FailureClasses
    outcomes: Mapping[str, int] = field(default_factory=dict)
    lost_share: float = 1.0
    predict_seconds: float = 0.0
    loss: LossFit | None = None
    accuracy: AccuracyCurve | None = None

    def to_rows(self) -> Iterator[tuple[FitKind, dict[str, Any]]]:
        """Rows for the journal: kind and result of every fitted curve."""
        yield "failure_rate", self.failures.to_dict()
        if self.loss is not None:
            yield "loss", self.loss.to_dict() | {"curve": _drawn(self.loss)}
        if self.accuracy is not None:
            yield "predictor", self.accuracy.to_dict()


def prior_curves(iteration: int, config: CPSRConfig) -> Curves:
    """The curves before the journal is read."""
    return Curves(iteration, FailureClasses(FailureRate(config.planner.mtbf_hours, PRIOR_FAILURES), {}))


def fit_curves(
    reader: JournalReader,
    accuracy: Sequence[Mapping[str, Any]],
    iteration: int,
    config: CPSRConfig,
    reported: Sequence[ReportedFailure] = (),
) -> Curves:
    """Fit all curves that can be fitted.

    Args:
        reader: of the run's journal.
        accuracy: how well the predictor has predicted checkpoints, oldest first.
        iteration: completed steps; later losses, of a branch that was given up, do not count.
        config: of the run.
        reported: failures reported by people; those before the run, or within minutes of a known one, do not count.

    Raises:
        JournalError: the journal cannot be read.
    """
    recoveries = reader.recoveries()
    predicted = [  # in an exact restart these are 0
        one.predict_seconds + one.inject_seconds for one in recoveries if one.predict_seconds and one.inject_seconds
    ]
    return Curves(
        iteration,
        _failures(reader, config, reported),
        Counter(one.outcome for one in recoveries if _was_predicted(one)),
        _lost_share(recoveries),
        statistics.median(predicted) if predicted else 0.0,
        _loss(reader, iteration),
        _accuracy(accuracy),
    )


def _drawn(fit: LossFit) -> dict[str, list[float]]:
    """The curve, and the band that holds 95% of single losses."""
    places = numpy.linspace(fit.first_iteration, fit.last_iteration, CURVE_POINTS).round()
    losses, half = fit.at(places), fit.band_nats
    drawn = {"iterations": places, "loss_nats": losses, "low_nats": losses - half, "high_nats": losses + half}
    return {name: values.tolist() for name, values in drawn.items()}


def _failures(reader: JournalReader, config: CPSRConfig, reported: Sequence[ReportedFailure]) -> FailureClasses:
    lives = reader.lives()
    # A life without an end was killed. `clean` and `sigterm` are no failures, even if some training was repeated.
    ended = [life for life in lives[:-1] if life.ending in ("running", "error")]
    began = [later.started_unix_seconds for life, later in pairwise(lives) if life in ended]
    unseen = _unseen(reported, began, lives[0].started_unix_seconds if lives else math.inf)
    trained = sum(reader.life_seconds().values())
    total = FailureRate(config.planner.mtbf_hours, PRIOR_FAILURES, len(ended) + unseen, trained)
    scopes = {failure.life: failure.scope for failure in reader.failures()}
    return FailureClasses(total, Counter(scope for life in ended if (scope := scopes.get(life.life)) is not None))


def _unseen(reported: Sequence[ReportedFailure], seen_unix_seconds: Sequence[float], start_unix_seconds: float) -> int:
    """Number of reported failures in this run that neither a restart nor another report shows."""
    known = list(seen_unix_seconds)
    for failure in reported:
        at = failure.failed_unix_seconds
        if at >= start_unix_seconds and all(abs(at - other) > SAME_FAILURE_SECONDS for other in known):
            known.append(at)
    return len(known) - len(seen_unix_seconds)


def _loss(reader: JournalReader, iteration: int) -> LossFit | None:
    steps = [
        (step.iteration, step.loss)
        for step in reader.losses(max(0, iteration - LOSSES_MAX), iteration + 1)
        if step.loss is not None and 0.0 < step.loss < math.inf
    ]
    try:
        return fit_loss([place for place, _ in steps], [loss for _, loss in steps])
    except ValueError as error:
        logger.debug("the loss curve is not known yet: %s", error)
        return None


def _accuracy(accuracy: Sequence[Mapping[str, Any]]) -> AccuracyCurve | None:
    backtests = [
        Backtest(**{one.name: found[one.name] for one in fields(Backtest)})
        for found in accuracy
        if 0.0 < found.get("mean_square_error", 0.0) < math.inf  # other versions have left something else
    ]
    try:
        return fit_accuracy(backtests, HORIZON_ITERATIONS)
    except ValueError as error:
        logger.debug("the predictor's accuracy is not known yet: %s", error)
        return None


# The end cost of predicted recoveries


def expected_costs(situation: Situation, lost: float = 1.0, outcomes: Mapping[str, int] = NONE_YET) -> EndCostCurve:
    """The expected end cost of a failure whose iterations are skipped, by the horizon.

    It is net of the move: a gain that needs no failure is no reason for longer intervals. What a restart that was kept
    has cost shows at the end of the training alone: it counts as expected.

    Args:
        situation: progress of the run.
        lost: share of the state that a failure is expected to lose.
        outcomes: number of the run's own recoveries that were `kept`, `vetoed` and `rolled_back`.
    """
    peak = situation.peak_learning_rate
    ratio = min(1.0, situation.learning_rate / peak) if peak > 0 else 1.0
    context = Context(1.0, situation.iteration, ratio, lost_share=lost)  # a skip costs in proportion to its length
    expected = table().expected(context, STALE)
    part = "" if lost == 1.0 else f", {lost:.0%} of the state lost"
    ends = [outcomes.get(outcome, 0) for outcome in ("kept", "vetoed", "rolled_back")]
    own = f"{sum(ends)} recoveries of the run, on " if any(ends) else ""
    source = f"{own}the offline prior for skipped iterations at {ratio:.0%} of the peak learning rate{part}"
    prior = EndCostCurve(0.0, max(expected.skip_iterations, 0.0), 0.0, expected.deviation_iterations, source)
    _, vetoed, rolled_back = (count / (sum(ends) + KEPT_BEFORE) for count in ends)
    return prior.with_refusals(vetoed, rolled_back, WATCH_ITERATIONS)


def _lost_share(recoveries: Iterable[RecoveryRow]) -> float:
    """Mean share of the state that the run's failures have lost, with one failure in advance that loses all.

    Failures after which every rank had its state do not count.
    """
    shares = [1.0, *filter(None, (_share(row) for row in recoveries))]
    return sum(shares) / len(shares)


def _was_predicted(recovery: RecoveryRow) -> bool:
    """Whether a state was predicted, kept or not; a forecast may also have been too dear."""
    asked = "context" in recovery.settings and not _was_moved_back(recovery)
    return asked and (recovery.outcome == "vetoed" or recovery.method == recovery.settings.get("method"))


def _was_moved_back(recovery: RecoveryRow) -> bool:
    """Whether the checkpoint's weights were moved at the checkpoint itself, whatever was lost: nothing was skipped."""
    return recovery.beginning.predicted and recovery.restored_iteration == recovery.checkpoint_iteration


def _share(recovery: RecoveryRow) -> float | None:
    """Share of the state that was lost, as the choice of the state has recorded it."""
    share = None if _was_moved_back(recovery) else recovery.settings.get("lost_share")
    return None if share is None else float(share)
