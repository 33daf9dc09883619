"""A job under failures, event by event in plain Python: what the simulation must come to."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Walk:
    """One run of a job that predicts after failures, or recomputes where it has no `lag`; detection takes no time.

    A recovery is struck by failures as training is, and then begins again. The next checkpoint is begun when the
    interval has passed since the restart and the watch is over. Each is durable some time after its stall. A lag
    below zero is had so many iterations after a predicted restart; a failure before leaves none.
    """

    iteration_seconds: float
    interval_iterations: int
    stall_seconds: float
    persist_seconds: float
    mtbf_seconds: float
    lag: Callable[[float], float] | None = None
    predict_seconds: float = 0.0
    watch_iterations: int = 0
    lead_after_iterations: int = 0

    def cost(self, wall_seconds: float, seed: int) -> float:
        """Share of the wall time that is not useful."""
        draw = random.Random(seed)
        clock = position = lag = begun = 0.0
        checkpoint, checkpoint_lag = 0.0, 0.0
        due = float(self.interval_iterations)
        while clock < wall_seconds:
            failure = clock + draw.expovariate(1 / self.mtbf_seconds)
            position, durable = self._train(clock, position, due, min(failure, wall_seconds))
            if position - begun < self.lead_after_iterations:
                lag = max(lag, checkpoint_lag)
            if durable is not None:
                checkpoint, checkpoint_lag = durable, lag
            if failure >= wall_seconds:
                break
            clock, position, due, lag = failure, checkpoint, checkpoint + self.interval_iterations, checkpoint_lag
            if self.lag is not None and checkpoint > 0:
                position, due, lag, clock = self._predict(draw, failure, checkpoint, checkpoint_lag)
            begun = position
        return 1 - (position - lag) * self.iteration_seconds / wall_seconds

    def _train(self, clock: float, position: float, due: float, until: float) -> tuple[float, float | None]:
        """Position at a time, and the newest checkpoint of these that is durable then."""
        self._stopped = position
        begun: list[tuple[float, float]] = []
        while True:
            left = (until - clock) / self.iteration_seconds
            if left < due - position:
                self._stopped = position + left
                break
            clock, position = clock + (due - position) * self.iteration_seconds, due
            begun.append((clock + self.stall_seconds + self.persist_seconds, due))
            self._stopped = position
            clock, due = clock + self.stall_seconds, due + self.interval_iterations
            if clock >= until:
                break
        return self._stopped, next((at for when, at in reversed(begun) if when <= until), None)

    def _predict(
        self, draw: random.Random, failure: float, checkpoint: float, checkpoint_lag: float
    ) -> tuple[float, float, float, float]:
        """Position, next checkpoint, lag and time after a recovery that nothing interrupts."""
        assert self.lag is not None
        target = float(int(self._stopped))
        clock = failure
        while (gap := draw.expovariate(1 / self.mtbf_seconds)) < self.predict_seconds:
            clock += gap
        due = target + max(self.interval_iterations, self.watch_iterations)
        return target, due, checkpoint_lag + self.lag(target - checkpoint), clock + self.predict_seconds
