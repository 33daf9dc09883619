"""The duration and the learning rate of steps."""

import statistics
import time
from collections import deque

from cpsr.engines.adapter import EngineAdapter
from cpsr.planner.live.inputs import Situation
from cpsr.planner.live.recovery_cost import Schedule
from cpsr.planner.plan import Plan
from cpsr.state.losses import Step

__all__ = ["StepClock"]

TIMED_ITERATIONS = 50  # the planner's iteration time is the median of this many


class StepClock:
    """Times the steps of one life.

    Args:
        adapter: the engine.

    Attributes:
        learning_rate: of the newest update.
    """

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self.learning_rate = adapter.learning_rate()
        self._seconds: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._ended = time.perf_counter()

    def before_update(self) -> None:
        """An update begins: it uses the current learning rate."""
        self.learning_rate = self._adapter.learning_rate()

    def end(self, iteration: int, applied: bool) -> Step:
        """A step is complete."""
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self._seconds.append(seconds)
        return Step(iteration, self.learning_rate, seconds, applied)

    def restart(self) -> None:
        """The time since the last step does not count as training."""
        self._ended = time.perf_counter()

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def situation(self, iteration: int, peak_learning_rate: float, plan: Plan) -> Situation:
        """The planner's view of the training now."""
        schedule = Schedule(iteration, self.learning_rate, peak_learning_rate)
        return Situation(schedule, self.median_seconds, len(self._seconds), plan)
