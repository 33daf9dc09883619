"""Probation of a predicted state, the recovery's row in the journal, and what the losses tell of its end cost."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from cpsr.config import CPSRConfig
from cpsr.job import Job
from cpsr.journal import JournalReader
from cpsr.predictor.divergence_watch import WATCH_ITERATIONS, Watch, WatchDecision
from cpsr.ranks.group import Group
from cpsr.restart.restored_state import Restored, report_recovery
from cpsr.state.losses import LossRecorder, Step

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.learning.learner import Learner

__all__ = ["Probation", "measure_lag"]

NOISE_NATS = 0.2  # allowed beyond the tolerance of the probes, which are the same batches before and after
# Window after the failure in which the lag is measured, after the transient.
FIRST_ITERATION, LAST_ITERATION = 60, 160
# Losses arrive some iterations late; after so many, those of the window are complete.
ARRIVAL_ITERATIONS = 40
# The slope is local: from at most this many iterations, and at least the minimum; its own error decides whether it
# differs from zero.
SLOPE_LOSSES_MAX = 400
SLOPE_LOSSES_MIN = 100
SLOPE_STANDARD_ERRORS = 3.0
# Losses from before half of a run's age bend the fitted course: with them the slope at iteration 300 came out 2.4 times
# too steep, without them at most 1.2 times, on eight runs.
OLDEST_SHARE = 0.5
# Fewer losses after a recovery than this are not evaluated.
AFTER_LOSSES_MIN = 10
# A higher autocorrelation of the noise would leave almost no independent points.
AUTOCORRELATION_MAX = 0.9

_Array = NDArray[numpy.float64]


class Probation:
    """Watches a predicted state on all ranks together, and records what became of it; opening it is a collective.

    The training loss, averaged over the ranks that see one, is compared with its level before the failure. Meanwhile
    the checkpoint behind the prediction stays in host memory. Without a prediction, or without a loss to compare with,
    there is no watch.

    Later losses are compared with the trend of those before the failure. That lag is weak evidence on the end cost,
    with an error of some 27 iterations: planner and predictor weigh it so when they choose after the next failure.

    Args:
        let_go: called once the state may not be discarded any more, or at once without a watch.
        cause: how the last life ended, as a clause; None if it ended in good order.
    """

    def __init__(
        self,
        job: Job,
        restored: Restored,
        losses: LossRecorder,
        let_go: Callable[[], None],
        learner: "Learner",
        cause: str | None,
    ) -> None:
        self._job, self._restored, self._losses = job, restored, losses
        self._let_go, self._learner = let_go, learner
        self._watch = _watch(restored, job.config, job.group)
        if self._watch is None:
            let_go()
        self._found: dict[str, Any] = {}  # by the watch
        self._row = report_recovery(job.journal, restored, cause, job.config.mode, self.active)
        self._failed_at = restored.restored_iteration
        # Losses before the failure, on rank 0, and after it; None: no lag is to be measured.
        self._before: list[tuple[int, float]] | None = None
        self._after: list[tuple[int, float]] = []
        if restored.predicted and not restored.partly_predicted:
            self._before = _losses_before(job, self._failed_at)

    @property
    def active(self) -> bool:
        """Whether the state may still be discarded."""
        return self._watch is not None

    def observe(self, iteration: int) -> WatchDecision | None:
        """Evaluate the iteration that has just ended; a collective while the watch is active.

        Returns:
            The decision, the same on every rank; None while there is none.
        """
        if self._watch is None:
            return None
        loss = self._losses.latest()
        own = [0.0 if loss is None else loss, float(loss is not None)]
        seen = torch.tensor(own, dtype=torch.float64, device="cpu")
        total, count = self._job.group.reduce(seen).tolist()
        decision = self._watch.observe(iteration, total / count) if count else None
        return None if decision is None or decision.status == "watching" else decision

    def keep(self, watch: Mapping[str, Any]) -> None:
        """The state is kept: release the checkpoint in memory; without a watch nothing happens."""
        if self._watch is not None:
            self._end("kept", watch)

    def discard(self, restored: Restored, watch: Mapping[str, Any]) -> None:
        """The state was discarded: the life continues from this one."""
        self._restored = restored
        self._end("rolled_back", watch, rolled_back_to=restored.method)

    def _end(self, outcome: Literal["kept", "rolled_back"], watch: Mapping[str, Any], **more: Any) -> None:
        self._watch, self._found = None, dict(watch)
        self._let_go()
        self._update(outcome, **more)

    @property
    def _settings(self) -> dict[str, Any]:
        """The predictor's; empty if it was not used."""
        return {} if self._restored.forecast is None else dict(self._restored.forecast.settings)

    def _update(self, outcome: Literal["kept", "rolled_back"], **more: Any) -> None:
        if self._row is not None:
            guard = {**self._restored.guard, "watch": self._found, **more}
            self._job.journal.record(replace(self._row, outcome=outcome, guard=guard, origin=self._restored.origin))

    def on_steps(self, steps: Iterable[Step]) -> None:
        """Finished iterations whose losses have arrived."""
        first, last = self._failed_at + FIRST_ITERATION, self._failed_at + LAST_ITERATION
        if self._before is not None:
            self._after += [
                (one.iteration, one.loss) for one in steps if one.loss is not None and first <= one.iteration <= last
            ]

    @property
    def measures_at(self) -> int | None:
        """The iteration at which the lag is measured, the same on all ranks; None: it is not."""
        return None if self._before is None else self._failed_at + LAST_ITERATION + ARRIVAL_ITERATIONS

    def measure_if_due(self, iteration: int) -> None:
        """Measure the lag once its losses have arrived, for the journal and the predictor; then a collective."""
        if self._before is None or self.measures_at is None or iteration < self.measures_at:
            return
        before, self._before = self._before, None
        # Only rank 0 has the losses of earlier lives, and all ranks must record the same.
        measured, settings = self._job.group.broadcast([measure_lag(before, self._after), self._settings])
        if measured is not None:
            lag = dict(zip(("lag_iterations", "standard_error_iterations"), measured, strict=True))
            self._learner.record({"kind": "recovery", "settings": settings, **lag})
            self._update("kept", lag=lag)

    def rewound(self) -> None:
        """The recovered state was discarded or replaced."""
        self._before = None


def _watch(restored: Restored, config: CPSRConfig, group: Group) -> Watch | None:
    if not restored.beginning.predicted or restored.scalars is None:
        return None
    baseline = _mean_over_ranks(restored.scalars.recent_losses, group)
    if not any(math.isfinite(loss) for loss in baseline):
        return None  # nothing to compare with
    return Watch(baseline, WATCH_ITERATIONS, config.restart.loss_tolerance_nats + NOISE_NATS)


def _mean_over_ranks(losses: list[float], group: Group) -> list[float]:
    """Mean loss of each recent iteration over the ranks that saw it; empty if none did."""
    lengths = [length for length in group.gather(len(losses)) if length]
    if not lengths:
        return []
    length = min(lengths)
    own = losses[-length:] if losses else [0.0] * length
    values = torch.tensor(own, dtype=torch.float64, device="cpu")
    mean: list[float] = (group.reduce(values) / len(lengths)).tolist()
    return mean


def _losses_before(job: Job, iteration: int) -> list[tuple[int, float]]:
    """The newest losses up to this iteration, of all lives, oldest first (rank 0; elsewhere none)."""

    def question(reader: JournalReader) -> list[tuple[int, float]]:
        steps = reader.losses(iteration - SLOPE_LOSSES_MAX, iteration + 1)
        found = [(step.iteration, step.loss) for step in steps if step.loss is not None and step.iteration > 0]
        return found[-SLOPE_LOSSES_MAX:]

    return job.journal.read(question, [], "the next plan will not know what this recovery has cost")


def measure_lag(before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Lag of a real recovery from training losses alone: `after` against the course of `before`, continued.

    Without a run that did not fail for comparison, the losses before are extrapolated as a straight line in the
    logarithm of the iteration.

    Args:
        before: iterations (positive, ascending) and losses in nats before the failure.
        after: iterations and losses after it, once the transient is over.

    Returns:
        Lag and standard error in iterations, that of the continued course included. None with fewer than 100 losses
        before or 10 after, with a loss that is not finite, or without a significant slope.
    """
    # A young run's loss curve bends too much before half of the newest iteration.
    recent = [one for one in before if one[0] > OLDEST_SHARE * before[-1][0]]
    if len(recent) < SLOPE_LOSSES_MIN or len(after) < AFTER_LOSSES_MIN:
        return None
    times, values = numpy.array(recent, dtype=numpy.float64).T
    later, losses = numpy.array(after, dtype=numpy.float64).T
    if not (numpy.isfinite(values).all() and numpy.isfinite(losses).all()):
        return None
    place = numpy.log(times)
    place, there = place - place.mean(), float(numpy.log(later).mean() - place.mean())
    (fall, level), covariance = numpy.polyfit(place, values, 1, cov=True)
    residuals = values - level - fall * place
    course_error = math.sqrt(covariance[0, 0]) * _inflation(residuals)
    at = float(later.mean())
    slope, slope_error = -float(fall) / at, course_error / at
    if not slope > SLOPE_STANDARD_ERRORS * slope_error:
        return None
    gap = float(losses.mean() - level - fall * there)
    error = math.hypot(_standard_error(losses), _standard_error(residuals), course_error * there)
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
