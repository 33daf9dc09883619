"""The lag of a real recovery, measured from the run's own training losses before and after it."""

from collections.abc import Iterable, Sequence

from cpsr.job import Job, Part, Rewind
from cpsr.journal import JournalReader, RankJournal
from cpsr.life.outcome import RecoveryOutcome
from cpsr.restart.lag import SLOPE_LOSSES_MAX, measure_unpaired
from cpsr.state.losses import Step

__all__ = ["LagReport", "RecoveredLag", "losses_before"]

# Window after the failure in which the lag is measured, after the transient.
FIRST_ITERATION, LAST_ITERATION = 60, 160
# Losses arrive some iterations late; after so many, those of the window are complete.
ARRIVAL_ITERATIONS = 40


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
