"""What happened between two checkpoints of a pipeline's stage: bubbles, and the predictor's work in them."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from cpsr.recovery import CPSRRecovery

__all__ = ["IntervalSample", "measure_interval"]


@dataclass(frozen=True)
class IntervalSample:
    """One interval on one rank.

    Attributes:
        seconds: from the checkpoint at its beginning to the one at its end.
        bubble_seconds: in which the training thread waited.
        used_seconds: of the predictor's work inside bubbles.
        late_seconds: of work that began in a bubble and ran past its end.
        outside_seconds: of work that began outside.
        slices: pieces of work.
        late_slices: those that ran past the end of their bubble.
        taken_in: whether the checkpoint at its beginning had been learned from by its end.
    """

    seconds: float
    bubble_seconds: float
    used_seconds: float
    late_seconds: float
    outside_seconds: float
    slices: int
    late_slices: int
    taken_in: bool

    @property
    def work_seconds(self) -> float:
        """All of the predictor's work, wherever it fell."""
        return self.used_seconds + self.late_seconds + self.outside_seconds


def measure_interval(recovery: CPSRRecovery, train: Callable[[], None]) -> IntervalSample:
    """Train from one checkpoint to the next, and say what the bubbles amounted to.

    Args:
        recovery: at the iteration of a checkpoint.
        train: over one interval.
    """
    checkpoint = recovery.iteration
    before, started = recovery.life.loop.learning.bubbles.account(), perf_counter()
    train()
    seconds, after = perf_counter() - started, recovery.life.loop.learning.bubbles.account()
    learned: dict[str, Any] = recovery.life.loop.learning.learner.state_dict()
    return IntervalSample(
        seconds,
        after.bubble_seconds - before.bubble_seconds,
        after.used_seconds - before.used_seconds,
        after.late_seconds - before.late_seconds,
        after.outside_seconds - before.outside_seconds,
        after.slices - before.slices,
        after.late_slices - before.late_slices,
        checkpoint in learned["vitp"]["statistics"]["seen"],
    )
