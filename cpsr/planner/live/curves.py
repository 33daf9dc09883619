"""The curves behind a plan, fitted to the run's journal."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy

from cpsr.config import CPSRConfig
from cpsr.fitter.accuracy import AccuracyCurve, fit_accuracy
from cpsr.fitter.failures import FailureClasses, FailureRate
from cpsr.fitter.loss_fit import LossFit, fit_loss
from cpsr.journal import JournalReader, LifeRow, RecoveryRow, ReportedFailure
from cpsr.planner.live.recovery_cost import lost_share, measured_costs
from cpsr.planner.recovery_curve import CostObservation
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["Curves", "FitKind", "fit_curves", "prior_curves"]

FitKind = Literal["loss", "predictor", "failure_rate"]
# A restart begins within minutes of its failure, and reports by people are not exact to the second.
SAME_FAILURE_SECONDS = 600.0
# `planner.mtbf_hours` counts as much as this number of observed failures.
PRIOR_FAILURES = 1.0
# Recent losses say more about the next phase than old ones, and a fit to a million would take seconds.
LOSSES_MAX = 20_000
# Points of a fitted loss curve, for plots: a falling curve needs no more, and a fit stays a few kilobytes.
CURVE_POINTS = 65


@dataclass(frozen=True)
class Curves:
    """The fitted curves of the run at the end of a phase.

    Attributes:
        iteration: at the fit.
        failures: how often the job fails, in each class.
        costs: what the run's own recoveries tell about the end cost, for `lost_share` of the state.
        lost_share: mean share of the state that the run's failures have lost; 1 before any.
        predict_seconds: median of the predictions and injections so far; 0 without any.
        predictions: how many these were.
        loss: of the training; None if it cannot be fitted.
        predictor: error of the predictor over checkpoints; None if it cannot be fitted.
        missing: why a curve is None, for messages.
        load_seconds: medians of restarts until the state was read, and how many these were, by where it came
            from: `disk` or `memory`.
    """

    iteration: int
    failures: FailureClasses
    costs: tuple[CostObservation, ...] = ()
    lost_share: float = 1.0
    predict_seconds: float = 0.0
    predictions: int = 0
    loss: LossFit | None = None
    predictor: AccuracyCurve | None = None
    missing: tuple[str, ...] = ()
    load_seconds: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def to_rows(self) -> Iterator[tuple[FitKind, dict[str, Any]]]:
        """Rows for the journal: kind and result of every fitted curve."""
        yield "failure_rate", self.failures.to_dict()
        if self.loss is not None:
            yield "loss", self.loss.to_dict() | {"curve": _drawn(self.loss)}
        if self.predictor is not None:
            yield "predictor", self.predictor.to_dict()


def fit_curves(
    reader: JournalReader,
    accuracy: Sequence[dict[str, Any]],
    iteration: int,
    span_iterations: int,
    config: CPSRConfig,
    reported: Sequence[ReportedFailure] = (),
) -> Curves:
    """Fit all curves that can be fitted.

    Args:
        reader: of the run's journal.
        accuracy: the predictor's backtests, oldest first.
        iteration: completed steps; later losses, of a branch that was given up, do not count.
        span_iterations: length of the phase: the loss is extrapolated as far.
        config: of the run.
        reported: failures reported by people; those before the run, or within minutes of a known one, do not count.

    Raises:
        JournalError: the journal cannot be read.
    """
    missing: list[str] = []
    recoveries = reader.recoveries()
    lost = lost_share(recoveries)
    predicted = [  # in an exact restart these are 0
        one.predict_seconds + one.inject_seconds for one in recoveries if one.predict_seconds and one.inject_seconds
    ]
    return Curves(
        iteration,
        _failures(reader, config, reported),
        tuple(measured_costs(recoveries, WATCH_ITERATIONS, lost)),
        lost,
        statistics.median(predicted) if predicted else 0.0,
        len(predicted),
        _loss(reader, iteration, span_iterations, missing),
        _predictor(accuracy, missing),
        tuple(missing),
        _loads(recoveries),
    )


def prior_curves(iteration: int, config: CPSRConfig) -> Curves:
    """The curves before the journal is read."""
    planner = config.planner
    return Curves(iteration, FailureClasses(FailureRate(planner.mtbf_hours, PRIOR_FAILURES), {}))


def _loads(recoveries: Sequence[RecoveryRow]) -> dict[str, tuple[float, int]]:
    """A prediction and an emergency dump begin with the checkpoint on the disk."""
    found: dict[str, list[float]] = {}
    for row in recoveries:
        in_memory = {source.source for source in row.sources} == {"memory"}
        if row.load_seconds is not None:
            found.setdefault("memory" if in_memory else "disk", []).append(row.load_seconds)
    return {place: (statistics.median(seconds), len(seconds)) for place, seconds in found.items()}


def _drawn(fit: LossFit) -> dict[str, list[float]]:
    """The curve and the band of single losses, from the first loss to the end of the held-out span."""
    places = numpy.linspace(fit.first_iteration, fit.last_iteration + fit.held_out_iterations, CURVE_POINTS).round()
    low, high = fit.band(places)
    drawn = {"iterations": places, "loss_nats": fit.at(places), "low_nats": low, "high_nats": high}
    return {name: values.tolist() for name, values in drawn.items()}


def _failures(reader: JournalReader, config: CPSRConfig, reported: Sequence[ReportedFailure]) -> FailureClasses:
    planner = config.planner
    lives = reader.lives()
    # A life without an end was killed. `clean` and `sigterm` are no failures, even if some training was repeated.
    ended = [life for life in lives[:-1] if life.ending in ("running", "error")]
    began = [later.started_unix_seconds for life, later in pairwise(lives) if life in ended]
    unseen = _unseen(reported, began, lives[0].started_unix_seconds if lives else math.inf)
    exposure_seconds = _exposure_seconds(reader, lives)
    total = FailureRate(planner.mtbf_hours, PRIOR_FAILURES, len(ended) + unseen, exposure_seconds)
    scopes = {failure.life: failure.scope for failure in reader.failures()}
    return FailureClasses(total, Counter(scope for life in ended if (scope := scopes.get(life.life)) is not None))


def _exposure_seconds(reader: JournalReader, lives: Sequence[LifeRow]) -> float:
    """How long the present ranks would have to train for as many failures to be expected as in all lives so far.

    Failures are of machines: a life with twice as many ranks counts twice as long. A life of which the number is not
    recorded counts as one with the present ranks.
    """
    trained_seconds, now = reader.trained_seconds(), lives[-1].ranks if lives else None
    if now is None or all(life.ranks in (None, now) for life in lives):
        return trained_seconds
    seconds = reader.seconds_of_lives()
    more = [(life.ranks / now - 1) * seconds.get(life.life, 0.0) for life in lives if life.ranks is not None]
    return max(0.0, trained_seconds + sum(more))


def _unseen(reported: Sequence[ReportedFailure], seen_unix_seconds: Sequence[float], start_unix_seconds: float) -> int:
    """Number of reported failures in this run that neither a restart nor another report shows."""
    known = list(seen_unix_seconds)
    for failure in reported:
        at = failure.failed_unix_seconds
        if at >= start_unix_seconds and all(abs(at - other) > SAME_FAILURE_SECONDS for other in known):
            known.append(at)
    return len(known) - len(seen_unix_seconds)


def _loss(reader: JournalReader, iteration: int, span_iterations: int, missing: list[str]) -> LossFit | None:
    steps = [
        (step.iteration, step.loss)
        for step in reader.losses(max(0, iteration - LOSSES_MAX), iteration + 1)
        if step.loss is not None and 0.0 < step.loss < math.inf
    ]
    try:
        return fit_loss([place for place, _ in steps], [loss for _, loss in steps], span_iterations)
    except ValueError as error:
        missing.append(f"the loss curve is not known yet ({error})")
        return None


def _predictor(accuracy: Sequence[dict[str, Any]], missing: list[str]) -> AccuracyCurve | None:
    """The error of the weights, mean square (the paper's Eq. 9): of the direction, times how far weights moved."""
    points = [
        (one["checkpoints"], 2.0 * (1.0 - one["vitp_cosine"]) * one["mean_square_motion"])
        for one in accuracy
        if "mean_square_motion" in one
    ]
    points = [(count, error) for count, error in points if 0.0 < error < math.inf]
    try:
        return fit_accuracy([count for count, _ in points], [error for _, error in points])
    except ValueError as error:
        missing.append(f"the predictor's accuracy is not known yet ({error})")
        return None
