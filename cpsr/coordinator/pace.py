"""When the predictor may work: in the waits of the training thread, and outside them within a budget or not at all."""

import statistics
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

from cpsr.coordinator.bubbles import Bubbles
from cpsr.coordinator.pipeline_schedule import idle_shares
from cpsr.engines.adapter import EngineAdapter
from cpsr.learner import BudgetPace, Pace

__all__ = ["BubblePace", "bubbles_of", "pace_of"]

# What a slice is expected to take before any was measured: slices are made to take a few milliseconds.
FIRST_SLICE_SECONDS = 0.005
# Of so many, slices of all kinds among them, the longest but one is expected of the next.
RECENT_SLICES = 64
# Of a wait's forecast, at its end. The forecast is a low quantile, so that one wait in eight is shorter, and what runs
# at its end is late. In a pipeline on a busy machine 8 to 14% were shorter than the forecast, and 5 to 10% shorter than
# four fifths of it (2026-11-22); the predictor needs a quarter of the bubbles there are.
SPARED_SHARE = 0.25
# Where no bubble was long enough in so many iterations and for so long, the longest slices are forgotten: they may have
# been freaks of the machine. In as many iterations all waits are measured, and one slice in two seconds, late by some
# milliseconds, would cost training little.
STARVED_ITERATIONS = 8
STARVED_SECONDS = 2.0


class BubblePace:
    """Lets a slice run where the open wait of the training thread should last at least as long (a `Pace`).

    A slice that ends late holds the training thread back by what it shares with it: the interpreter's lock, a core.
    So the longest of the recent slices but one must fit into the forecast rest of the wait, with some of it to spare.
    What a slice takes is its processor time, and the delay that is usual beside it (a slow disk): once in a while a
    thread is kept from a busy processor for longer than any slice takes, which tells nothing of the next one.

    Args:
        bubbles: the waits; they are told what was done.
        outside: what slices outside of bubbles may take, and what ran past a bubble's end; None: nothing outside.
        tell: called once, with one sentence, where no bubble is long enough for any slice; on the learner's thread.
    """

    def __init__(self, bubbles: Bubbles, outside: BudgetPace | None, tell: Callable[[str], object]) -> None:
        self._bubbles = bubbles
        self._outside = outside
        self._tell = tell
        self._told = False
        self._slices: deque[float] = deque(maxlen=RECENT_SLICES)  # their processor time
        self._delays: deque[float] = deque(maxlen=RECENT_SLICES)
        self._entered: float | None = None  # when the next slice was let into a bubble
        self._closing = threading.Event()

    def before_slice(self) -> None:
        """Wait for a bubble, or for the budget outside of them."""
        seen = self._bubbles.account().iterations
        while not self._closing.is_set():
            patience = STARVED_SECONDS if self._outside is None else self._outside.rest_seconds()
            self._entered = self._bubbles.entered(self._expected_seconds(), patience, SPARED_SHARE)
            if self._entered is not None:
                return
            if self._outside is not None:
                if self._outside.rest_seconds() == 0.0:
                    return
            elif (iterations := self._bubbles.account().iterations) - seen >= STARVED_ITERATIONS:
                self._starve()
                seen = iterations

    def after_slice(self, used_seconds: float, processor_seconds: float) -> None:
        """Account for the slice that has just ended."""
        ended = perf_counter()
        self._slices.append(processor_seconds)
        self._delays.append(max(used_seconds - processor_seconds, 0.0))
        # From when it was let in: what came between that and its first line may have taken it past the bubble's end.
        began = ended - used_seconds if self._entered is None else self._entered
        beside = self._bubbles.worked(began, ended)
        if self._outside is not None:
            self._outside.after_slice(beside, processor_seconds)

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closing.set()
        self._bubbles.close()

    def _expected_seconds(self) -> float:
        if not self._slices:
            return FIRST_SLICE_SECONDS
        return self._longest_seconds() + statistics.median(self._delays)

    def _longest_seconds(self) -> float:
        """Processor time of the longest recent slice, but one where there are enough to see what is usual."""
        ordered = sorted(self._slices)
        return ordered[-2] if len(ordered) == RECENT_SLICES else ordered[-1]

    def _starve(self) -> None:
        """No bubble was long enough for a slice: expect a shorter one."""
        if self._slices:
            longest = self._longest_seconds()
            self._slices = deque((one for one in self._slices if one < longest), maxlen=RECENT_SLICES)
        elif not self._told:
            self._told = True
            self._tell(
                "no wait of this pipeline stage is long enough for the predictor's work (a slice should take "
                f"{1000 * self._expected_seconds():.1f} ms, all waits of an iteration together are forecast to take "
                f"{1000 * self._bubbles.iteration_forecast_seconds():.1f} ms): until one is, it learns nothing from "
                "the checkpoints, and a recovery rests on what was learned before. Training is not affected"
            )


def bubbles_of(adapter: EngineAdapter) -> Bubbles:
    """The waits of this rank's training thread, forecast by the pipeline's schedule where there is one."""
    stage = adapter.pipeline_stage
    if stage is None:
        return Bubbles()
    return Bubbles(idle_shares(stage.count, adapter.micro_batches_per_iteration, stage.index))


def pace_of(
    adapter: EngineAdapter, bubbles: Bubbles, budget_fraction: float, tell: Callable[[str], object]
) -> Pace | None:
    """When the predictor may learn on this rank; None: never.

    In a pipeline on the host's processors, where receives block: in bubbles only. Else in waits for the data loader's
    workers, and outside of them within the budget; on a device, a pipeline's receives do not block the host's thread,
    so that there is no wait to be seen. A step boundary holds no idle time: after a snapshot has begun, the next
    forward follows at once, and where an update waits for the rest of the copy, a processor is busy with that.

    Args:
        adapter: the engine.
        bubbles: of this rank.
        budget_fraction: of one core, outside of bubbles; 0: never learn.
        tell: as in `BubblePace`.
    """
    if budget_fraction == 0:
        return None
    blocks = adapter.pipeline_stage is not None and adapter.device.type == "cpu"
    return BubblePace(bubbles, None if blocks else BudgetPace(budget_fraction), tell)
