"""How far behind a real recovery stays, told from the run's own training losses before and after it."""

from collections.abc import Iterable, Sequence

from cpsr.coordinator.lag import SLOPE_LOSSES_MAX, measure_unpaired
from cpsr.losses import Step

__all__ = ["RecoveredLag"]

# After the failure: where the persistent lag of a recovery is taken, the transient being over.
FIRST_ITERATION, LAST_ITERATION = 60, 160
# Losses arrive some iterations late; by then those of the window have.
ARRIVAL_ITERATIONS = 40


class RecoveredLag:
    """Collects losses after a predicted restart, and compares them with the course of those before.

    There is no run that did not fail to compare with: the losses before are continued as a straight line in the
    logarithm of the iteration. The error of that continuation is in the standard error, and is large; it is a weak
    measurement that costs nothing.

    Args:
        before: iterations and training losses before the failure, oldest first; may be none.
        failure_iteration: where training went on.
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
        """Lag and its standard error in iterations; None where the losses do not tell."""
        return measure_unpaired(self._before, self._after)
