"""How much of a copy to host memory one iteration hides, and how much one takes without getting longer."""

import math
import statistics
import time
from collections import deque

__all__ = ["CopyBudget", "Lengthening"]

MEASURED_COPIES = 8  # bandwidth and overlap are medians of this many
MEASURED_STEPS = 16  # beside much, and beside little
ENOUGH_STEPS = 8
LONGER = 0.02  # of a step: so much longer copies may make it
STANDARD_ERRORS = 2.5  # a smaller difference may be chance
SPREAD = 1.858  # standard error of the median of some values over their median distance from it, times their root


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


class Lengthening:
    """How much longer steps get beyond chance by the bytes that are copied beside them, on the training thread's clock.

    The median step beside much is compared with the one beside little. A step lasts from the begin of a snapshot to
    that of the next; of several in between, each has its part of time and bytes. What a snapshot costs whatever it
    copies is in both, so it does not count: fewer bytes would not lower it.
    """

    def __init__(self) -> None:
        self._steps = [deque[tuple[float, float]](maxlen=MEASURED_STEPS) for _ in range(2)]  # seconds, bytes
        self._begun: tuple[int, float, bool | None] = 0, 0.0, None
        self._moved_bytes = 0

    def begin(self, iteration: int, much: bool | None) -> None:
        """A snapshot of this iteration begins, with much to copy or little; None: its step is not compared."""
        now, (before, began, was_much) = time.perf_counter(), self._begun
        if was_much is not None and self._moved_bytes and iteration > before:
            passed = iteration - before
            self._steps[was_much].append(((now - began) / passed, self._moved_bytes / passed))
        self._begun, self._moved_bytes = (iteration, now, much), 0

    def moved(self, moved_bytes: int) -> None:
        """The snapshot that was begun last is complete: so many bytes were copied for it, to and in host memory."""
        self._moved_bytes = moved_bytes

    @property
    def bytes(self) -> float:
        """That make a step 2% longer; infinite while that was not measured, or where bytes make no difference."""
        if min(map(len, self._steps)) < ENOUGH_STEPS:
            return math.inf
        medians = [[*map(statistics.median, zip(*steps, strict=True))] for steps in self._steps]
        (little_seconds, little_bytes), (much_seconds, much_bytes) = medians
        longer, more = much_seconds - little_seconds, much_bytes - little_bytes
        errors = [
            SPREAD * statistics.median(abs(seconds - middle) for seconds, _ in steps) / math.sqrt(len(steps))
            for steps, (middle, _) in zip(self._steps, medians, strict=True)
        ]
        is_longer = longer > STANDARD_ERRORS * math.hypot(*errors)
        return LONGER * little_seconds * more / longer if is_longer and more > 0 else math.inf
