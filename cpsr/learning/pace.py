"""When the predictor may work: in waits of the training thread, and outside of them within a budget, if at all."""

import statistics
from collections import deque
from time import perf_counter

from cpsr.engines.adapter import EngineAdapter
from cpsr.learning.bubbles import Bubbles

__all__ = ["Pace", "pace_of"]

# Expected duration before any slice was measured: slices are cut to a few milliseconds.
FIRST_SLICE_SECONDS = 0.005
# The next slice is expected to take as long as the second longest of so many, of all kinds.
RECENT_SLICES = 64
# Share of a wait's forecast, at its end, that is left unused. The forecast is a low quantile: one wait in eight is
# shorter, and a slice at its end is late. In a pipeline on a busy machine 8 to 14% were shorter than the forecast, and
# 5 to 10% shorter than four fifths of it (2026-11-22). The predictor needs a quarter of the bubbles.
SPARED_SHARE = 0.25
# After so many iterations and seconds without a bubble that was long enough, the longest slices are forgotten: they may
# be outliers. So many iterations measure all waits, and one slice in two seconds, some milliseconds late, costs little.
STARVED_ITERATIONS = 8
STARVED_SECONDS = 2.0


class Pace:
    """Lets a slice of learning run in a wait of the training thread, or outside of waits within a budget.

    A slice that ends late delays the training thread, since both share the interpreter's lock or a core. So the second
    longest of the recent slices must fit into the forecast rest of the wait, with some of it to spare. A slice counts
    with its processor time, plus the usual delay beside it (a slow disk). Once in a while the scheduler delays a thread
    by more than any slice takes; that says nothing about the next slice.

    The learner's thread calls `before_slice` and `after_slice`, any thread `close`.

    Args:
        bubbles: the waits.
        budget_fraction: share of one core that slices outside of waits may take, and what ran past a wait's end; 0:
            nothing outside.
    """

    def __init__(self, bubbles: Bubbles, budget_fraction: float) -> None:
        self._bubbles = bubbles
        self._budget_fraction = budget_fraction
        self._due = 0.0  # when the next slice may run outside of waits
        self._slices: deque[float] = deque(maxlen=RECENT_SLICES)  # their processor time
        self._delays: deque[float] = deque(maxlen=RECENT_SLICES)
        self._entered: float | None = None  # when the next slice was admitted to a bubble
        self._closed = False

    def before_slice(self) -> None:
        """Wait for a bubble, or for the budget outside of them, or until the pace is closed."""
        seen = self._bubbles.iterations
        while not self._closed:
            patience = max(self._due - perf_counter(), 0.0) if self._budget_fraction else STARVED_SECONDS
            self._entered = self._bubbles.wait(self.expected_seconds(), patience, SPARED_SHARE)
            if self._entered is not None:
                return
            if self._budget_fraction:
                if self._due <= perf_counter():
                    return
            elif (iterations := self._bubbles.iterations) - seen >= STARVED_ITERATIONS:
                self._starve()
                seen = iterations

    def after_slice(self, used_seconds: float, processor_seconds: float) -> None:
        """Account for the slice that has just ended, by its wall time and its processor time."""
        ended = perf_counter()
        self._slices.append(processor_seconds)
        self._delays.append(max(used_seconds - processor_seconds, 0.0))
        if self._budget_fraction:
            # From its admission: a delay before its first line may have taken it past the bubble's end.
            began = ended - used_seconds if self._entered is None else self._entered
            beside = self._bubbles.beside(began, ended)
            # Processor time counts: what a slice waits for a core or the disk leaves the core to training.
            pause = min(beside, processor_seconds) / self._budget_fraction
            self._due = max(self._due, ended - beside + pause)

    def close(self) -> None:
        """End the wait of `before_slice`, now and later."""
        self._closed = True
        self._bubbles.close()

    def expected_seconds(self) -> float:
        """Expected duration of the next slice."""
        if not self._slices:
            return FIRST_SLICE_SECONDS
        return self._longest_seconds() + statistics.median(self._delays)

    def _longest_seconds(self) -> float:
        """Processor time of the longest recent slice; of the second longest once enough were measured."""
        ordered = sorted(self._slices)
        return ordered[-2] if len(ordered) == RECENT_SLICES else ordered[-1]

    def _starve(self) -> None:
        """No bubble was long enough for a slice: expect a shorter slice."""
        if self._slices:
            longest = self._longest_seconds()
            self._slices = deque((one for one in self._slices if one < longest), maxlen=RECENT_SLICES)


def pace_of(adapter: EngineAdapter, bubbles: Bubbles, budget_fraction: float) -> Pace:
    """When the predictor may learn on this rank.

    In a pipeline on CPUs receives block, and the predictor learns in these bubbles only. Elsewhere it learns in waits
    for data loader workers, and outside of them within the budget; on a GPU, a pipeline's receives do not block the
    host thread. A step boundary has no idle time: the next forward follows a snapshot at once, and while an update
    waits for the rest of the copy, a core is busy with that.

    Args:
        adapter: the engine.
        bubbles: of this rank.
        budget_fraction: of one core, outside of bubbles.
    """
    # A receive on a GPU is only queued.
    waits_itself = adapter.pipeline is not None and adapter.device.type == "cpu"
    return Pace(bubbles, 0.0 if waits_itself else budget_fraction)
