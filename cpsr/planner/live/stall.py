"""The stall of a checkpoint: the wait for its copy, and the slower steps while it is written."""

import statistics
from collections import deque

__all__ = ["StallMeter"]

CALM_STEPS = 50  # the pace of training is the median of this many steps without a checkpoint under way
CALM_STEPS_MIN = 5


class StallMeter:
    """Sums how much longer steps take from a checkpoint's begin until it is durable; on the training thread."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=CALM_STEPS)
        self._under_way: list[float] | None = None
        self._snapshot_seconds = 0.0

    def begun(self) -> None:
        """A checkpoint was begun."""
        self._under_way = []

    def snapshot(self, stall_seconds: float) -> None:
        """The step under way has waited so long for a snapshot to memory alone, which costs the disk nothing."""
        self._snapshot_seconds += stall_seconds

    def step(self, seconds: float) -> None:
        """Add the duration of one step, with its wait for a copy."""
        seconds -= self._snapshot_seconds
        self._snapshot_seconds = 0.0
        if self._under_way is None:
            self._calm.append(seconds)
        else:
            self._under_way.append(seconds)

    def durable(self, blocked_seconds: float) -> float:
        """The checkpoint is durable: its cost in seconds, at least the time in which training waited.

        If checkpoints follow each other so closely that no pace is known, it is just that time.
        """
        steps, self._under_way = self._under_way, None
        if not steps or len(self._calm) < CALM_STEPS_MIN:
            return blocked_seconds
        return max(blocked_seconds, sum(steps) - len(steps) * statistics.median(self._calm))
