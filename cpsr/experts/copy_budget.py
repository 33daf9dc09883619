"""How much of a copy to host memory one iteration hides."""

import statistics
from collections import deque

__all__ = ["CopyBudget"]

MEASURED_COPIES = 8  # bandwidth and overlap are medians of this many


class CopyBudget:
    """How many bytes one forward and backward hides, from the measured copies of one rank to host memory."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEASURED_COPIES)  # bytes per second
        self._overlaps: deque[float] = deque(maxlen=MEASURED_COPIES)

    def note(self, copied_bytes: int, copy_seconds: float, overlap_seconds: float) -> None:
        """Add a copy.

        Args:
            copied_bytes: of the snapshot.
            copy_seconds: that it took.
            overlap_seconds: from its begin until the optimizer needed it to be complete.
        """
        if copy_seconds > 0 and overlap_seconds > 0:
            self._rates.append(copied_bytes / copy_seconds)
            self._overlaps.append(overlap_seconds)

    @property
    def bytes(self) -> float | None:
        """None until one was measured."""
        return statistics.median(self._rates) * statistics.median(self._overlaps) if self._rates else None
