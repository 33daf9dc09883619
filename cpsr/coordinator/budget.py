"""What rehearsals may cost: a share of the training time, earned before it is spent."""

__all__ = ["RehearsalBudget"]


class RehearsalBudget:
    """Wall time that the run has trained, over all its lives, against what its rehearsals have taken.

    Args:
        fraction: share of the training time that may be spent.
        trained_seconds: training of earlier lives.
        spent_seconds: rehearsals of earlier lives.

    Attributes:
        trained_seconds: wall time of all steps, rehearsals not included.
        spent_seconds: wall time of all rehearsals.
    """

    def __init__(self, fraction: float, trained_seconds: float = 0.0, spent_seconds: float = 0.0) -> None:
        self._fraction = fraction
        self.trained_seconds = trained_seconds
        self.spent_seconds = spent_seconds
        self._step_seconds = 0.0  # of this life: a new machine may have another pace
        self._steps = 0

    def train(self, seconds: float) -> None:
        """A step took that long."""
        self.trained_seconds += seconds
        self._step_seconds += seconds
        self._steps += 1

    def spend(self, seconds: float) -> None:
        """A rehearsal took that long."""
        self.spent_seconds += seconds

    @property
    def iteration_seconds(self) -> float:
        """Mean wall time of a step in this life; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    def allows(self, seconds: float) -> bool:
        """Whether a rehearsal that is expected to take that long has been earned."""
        return self.spent_seconds + seconds <= self._fraction * self.trained_seconds
