"""Steps of a life: how long they take, and their rows once the losses have arrived from the device."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.optimizer_state import learning_rate
from cpsr.journal import RankJournal, StepRow
from cpsr.planner.plan import Plan, Schedule, Situation
from cpsr.state.losses import LossRecorder, Step

__all__ = ["Steps"]

TIMED_ITERATIONS = 50  # the planner's iteration time is the median of this many
UNKNOWN_ITERATIONS = 20  # without a loss, before that is reported


class Steps:
    """Times the steps of one life, and passes them on once their losses have arrived from the device.

    Attributes:
        learning_rate: of the newest update.
        followers: called with finished iterations, after the journal.
    """

    def __init__(self, adapter: EngineAdapter, journal: RankJournal, losses: LossRecorder) -> None:
        self._adapter = adapter
        self._journal = journal
        self._losses = losses
        self.learning_rate = learning_rate(adapter.optimizers)
        self.followers: list[Callable[[Sequence[Step]], None]] = []
        self._seconds: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._ended = time.perf_counter()
        # Iterations of this life without a loss; None once one has come, or was reported missing.
        self._without_loss: int | None = 0 if journal.rank == 0 else None

    def start_clock(self) -> None:
        """Training begins: the time before does not count to its first step."""
        self._ended = time.perf_counter()
        self.learning_rate = learning_rate(self._adapter.optimizers)

    def before_update(self) -> None:
        """An update begins: it uses the current learning rate."""
        self.learning_rate = learning_rate(self._adapter.optimizers)

    def end(self, iteration: int, applied: bool) -> Step:
        """A step is complete."""
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self._seconds.append(seconds)
        step = Step(iteration, self.learning_rate, seconds, applied)
        self._forward(self._losses.end_iteration(step))
        return step

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def situation(self, iteration: int, peak_learning_rate: float, plan: Plan) -> Situation:
        """The planner's view of the training now."""
        schedule = Schedule(iteration, self.learning_rate, peak_learning_rate)
        return Situation(schedule, self.median_seconds, len(self._seconds), plan)

    def flush(self, *, wait: bool) -> None:
        """Forward the losses that have arrived; at the end of a life wait for the others."""
        self._forward(self._losses.flush(wait))

    def _forward(self, steps: Sequence[Step]) -> None:
        if steps:
            self._journal.record(*(StepRow(life=self._journal.life, **vars(step)) for step in steps))
            for follower in self.followers:
                follower(steps)
            self._report_missing(steps)

    def _report_missing(self, steps: Sequence[Step]) -> None:
        """Say once, after the first iterations of a life, that the run knows no loss."""
        if self._without_loss is None:
            return
        self._without_loss += len(steps)
        if any(step.loss is not None for step in steps):
            self._without_loss = None
        elif self._without_loss >= UNKNOWN_ITERATIONS:
            self._journal.event(
                "no loss",
                f"no loss is known after {self._without_loss} iterations, because the model does not return it: the "
                "loss curve stays empty, and predicted states cannot be checked. Call recovery.log_loss(loss) before "
                "optimizer.step()",
                steps[-1].iteration,
            )
            self._without_loss = None
