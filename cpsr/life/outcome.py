"""What a recovery cost: its outcome and its lag, for the journal and the predictor."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from cpsr.fitter.lag import SLOPE_STANDARD_ERRORS, StraightLine
from cpsr.job import Job, Part, Rewind
from cpsr.journal import JournalReader, RankJournal
from cpsr.learning.learner import Learner
from cpsr.restart.restored import Restored, report_recovery
from cpsr.state.losses import Step

__all__ = ["LagReport", "RecoveredLag", "RecoveryOutcome", "losses_before", "measure_unpaired"]

# The slope is local: from at most this many iterations, and at least the minimum; its own error decides whether it
# differs from zero.
SLOPE_LOSSES_MAX = 400
SLOPE_LOSSES_MIN = 100
# Losses from before half of a run's age bend the fitted course: with them the slope at iteration 300 came out 2.4 times
# too steep, without them at most 1.2 times, on eight runs.
OLDEST_SHARE = 0.5
# Fewer losses after a recovery than this are not evaluated.
AFTER_LOSSES_MIN = 10
# A higher autocorrelation of the noise would leave almost no independent points.
AUTOCORRELATION_MAX = 0.9
# Window after the failure in which the lag is measured, after the transient.
FIRST_ITERATION, LAST_ITERATION = 60, 160
# Losses arrive some iterations late; after so many, those of the window are complete.
ARRIVAL_ITERATIONS = 40

_Array = NDArray[numpy.float64]


class RecoveryOutcome:
    """Records the recovery, and later its measurements.

    Args:
        job: this rank's.
        learner: gets the measurements for the predictor.
        restored: how this life began.
        cause: how the last life ended, as a clause; None if it ended in good order.
        watching: whether the predicted state is being watched.
    """

    def __init__(self, job: Job, learner: Learner, restored: Restored, cause: str | None, watching: bool) -> None:
        self._journal = job.journal
        self._learner = learner
        self._restored = restored
        self._watched: dict[str, Any] = {}
        self._row = report_recovery(job.journal, restored, cause, job.config.mode, watching)

    @property
    def settings(self) -> dict[str, Any]:
        """The predictor's settings; empty if it was not used."""
        return {} if self._restored.forecast is None else dict(self._restored.forecast.settings)

    def rolled_back(self, restored: Restored) -> None:
        """The predicted state was discarded: the life continues from this one."""
        self._restored = restored

    def end_watch(self, outcome: Literal["kept", "rolled_back"], watch: dict[str, Any]) -> None:
        """The watch has ended."""
        self._watched = watch
        self._update(outcome, **({"rolled_back_to": self._restored.method} if outcome == "rolled_back" else {}))
        self._learner.record({"outcome": outcome, "settings": self.settings, "watch": watch})

    def measured(self, lag: dict[str, float], settings: dict[str, Any]) -> None:
        """Record the lag that the losses after the failure show.

        Args:
            lag: `lag_iterations` and `standard_error_iterations`.
            settings: of rank 0, for every rank.
        """
        self._learner.record({"kind": "recovery", "settings": settings, **lag})
        self._update("kept", lag=lag)

    def _update(self, outcome: Literal["kept", "rolled_back"], **more: Any) -> None:
        if self._row is not None:
            guard = {**self._restored.guard, "watch": self._watched, **more}
            self._journal.record(replace(self._row, outcome=outcome, guard=guard, origin=self._restored.origin))


class RecoveredLag:
    """Collects losses after a predicted restart, and compares them with the trend of those before.

    Without a run that did not fail for comparison, the losses before are extrapolated as a straight line in the
    logarithm of the iteration. The standard error includes the error of that extrapolation, and is large: it is a weak
    measurement without cost.

    Args:
        before: iterations and training losses before the failure, oldest first; may be none.
        failure_iteration: where training continued.
    """

    def __init__(self, before: Sequence[tuple[int, float]], failure_iteration: int) -> None:
        self._before = [one for one in before if 0 < one[0] <= failure_iteration][-SLOPE_LOSSES_MAX:]
        self._first = failure_iteration + FIRST_ITERATION
        self._last = failure_iteration + LAST_ITERATION
        self._after: list[tuple[int, float]] = []
        self.due_iteration = self._last + ARRIVAL_ITERATIONS

    def on_steps(self, steps: Iterable[Step]) -> None:
        """Finished iterations whose losses have arrived."""
        self._after += [
            (step.iteration, step.loss)
            for step in steps
            if step.loss is not None and self._first <= step.iteration <= self._last
        ]

    def measure(self) -> tuple[float, float] | None:
        """Lag and its standard error in iterations; None if the losses do not show it."""
        return measure_unpaired(self._before, self._after)


def losses_before(journal: RankJournal, iteration: int) -> list[tuple[int, float]]:
    """The newest losses up to this iteration, of all lives (rank 0; elsewhere none)."""

    def question(reader: JournalReader) -> list[tuple[int, float]]:
        steps = reader.losses(iteration - SLOPE_LOSSES_MAX, iteration + 1)
        return [(step.iteration, step.loss) for step in steps if step.loss is not None]

    return journal.read(question, [], "how far behind the recovery is will not be reported")


class LagReport(Part):
    """Measures the lag of a predicted recovery, once enough losses have arrived.

    Args:
        job: this rank's.
        outcome: receives the result.
        measured: collects the losses; None if nothing was predicted.
    """

    def __init__(self, job: Job, outcome: RecoveryOutcome, measured: RecoveredLag | None) -> None:
        self._job = job
        self._outcome = outcome
        self._lag = measured

    def on_steps(self, steps: Iterable[Step]) -> None:
        """Finished iterations whose losses have arrived."""
        if self._lag is not None:
            self._lag.on_steps(steps)

    def report_if_due(self, iteration: int) -> None:
        """Report to the journal and the predictor; a collective when it is due."""
        if self._lag is None or iteration < self._lag.due_iteration:
            return
        found, self._lag = self._lag, None
        # Only rank 0 has the losses of earlier lives, and all ranks must record the same.
        measured, settings = self._job.group.broadcast([found.measure(), self._outcome.settings])
        if measured is None:
            message = "the losses are too noisy to show how far the recovered run is behind"
        else:
            lag, error = measured
            side = "ahead of" if lag < 0 else "behind"
            message = (
                f"the recovered run is {abs(lag):.0f} ± {error:.0f} iterations {side} the loss trend before it "
                f"(measured {FIRST_ITERATION} to {LAST_ITERATION} iterations after the failure)"
            )
            self._outcome.measured({"lag_iterations": lag, "standard_error_iterations": error}, settings)
        self._job.journal.event("recovered", message, iteration)

    def rewound(self, to: Rewind) -> None:
        """The recovered state was discarded or replaced."""
        self._lag = None


def _recent(iterations: Sequence[int], losses: Sequence[float]) -> tuple[_Array, _Array]:
    """The losses from half of the newest iteration on: a young run's loss curve bends too much before."""
    times = numpy.asarray(iterations, dtype=numpy.float64)
    values = numpy.asarray(losses, dtype=numpy.float64)
    recent = times > OLDEST_SHARE * times[-1] if len(times) else numpy.zeros(0, dtype=bool)
    return times[recent], values[recent]


def measure_unpaired(
    before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]
) -> tuple[float, float] | None:
    """Lag of a real recovery from training losses alone: `after` against the course of `before`, continued.

    Args:
        before: iterations (positive, ascending) and losses in nats before the failure.
        after: iterations and losses after it, once the transient is over.

    Returns:
        Lag and standard error in iterations, that of the continued course included. None with fewer than 100 losses
        before or 10 after, with a loss that is not finite, or without a significant slope.
    """
    times, values = _recent([at for at, _ in before], [loss for _, loss in before])
    if len(times) < SLOPE_LOSSES_MIN or len(after) < AFTER_LOSSES_MIN:
        return None
    later, losses = (numpy.array(column, dtype=numpy.float64) for column in zip(*after, strict=True))
    if not (numpy.isfinite(values).all() and numpy.isfinite(losses).all()):
        return None
    place, there = numpy.log(times), float(numpy.log(later).mean())
    fit = StraightLine.through(place, values)
    residuals = values - (fit.intercept + fit.slope * place)
    course_error = fit.slope_error * _inflation(residuals)
    at = float(later.mean())
    slope, slope_error = -fit.slope / at, course_error / at
    if not slope > SLOPE_STANDARD_ERRORS * slope_error:
        return None
    gap = float(losses.mean()) - (fit.intercept + fit.slope * there)
    error = math.hypot(
        _standard_error(losses), _standard_error(residuals), course_error * (there - float(place.mean()))
    )
    lag = gap / slope
    return float(lag), math.hypot(error, lag * slope_error) / slope


def _standard_error(values: _Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) * _inflation(values - values.mean())


def _inflation(residuals: _Array) -> float:
    """Factor on the error of a mean for noise that is correlated between iterations."""
    scatter = float(residuals @ residuals)
    if scatter == 0.0:
        return 1.0
    correlation = min(max(float(residuals[1:] @ residuals[:-1]) / scatter, 0.0), AUTOCORRELATION_MAX)
    return math.sqrt((1.0 + correlation) / (1.0 - correlation))
