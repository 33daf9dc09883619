"""A copy that is under way: what must arrive before its buffer may be sealed or written.

The host's own thread makes it, in a pipeline in the waits of the training thread, or a device on a stream.

Source: MoEtion, section 5.3, Algorithm 4: split into what is copied in the bubbles of a pipeline, and the rest.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline, beside_captures, in_time, reached

__all__ = ["CopyPace", "DeviceCopy", "PacedCopy", "Piece", "RunningCopy", "Waits"]

Piece = tuple[torch.Tensor, torch.Tensor]  # target and source


class RunningCopy:
    """A copy on the host by one thread; copies on a device, and those in waits, are subclasses.

    Args:
        small: the small state, if one goes with it.
        arrival: of the buffers, where the copy itself does not show it.

    Attributes:
        copied: gives the seconds that a copy on the host took; set by what has begun it.
        seconds: that the copy took, once it is complete.
    """

    copied: Future[float]

    def __init__(self, small: SmallState | None, arrival: Arrival | None = None) -> None:
        self._small, self._arrival = small, arrival
        self._lock = threading.Lock()
        self._confirmed: bool | None = None
        self._waiting: list[Callable[[bool], None]] = []
        self.seconds = 0.0

    def confirm(self, *, unchanged: bool) -> None:
        """The copy is, or is not, that of one state; only the first call counts. From any thread.

        What the functions of `when_confirmed` raise comes from here.
        """
        with self._lock:
            if self._confirmed is not None:
                return
            self._confirmed, waiting = unchanged, self._waiting
        for act in waiting:
            act(unchanged)

    def when_confirmed(self, act: Callable[[bool], None]) -> None:
        """Call `act` with whether its sources stayed unchanged, once that is known: here, or in `confirm`."""
        with self._lock:
            if self._confirmed is None:
                self._waiting.append(act)
                return
        act(self._confirmed)

    @property
    def is_sent(self) -> bool:
        """Whether a device writes no more into the buffer; does not wait."""
        return all(one is None or one.here for one in (self._small, self._arrival))

    def arrives(self, deadline: Deadline) -> bool:
        """Whether `is_sent` before the deadline."""
        return in_time(lambda: deadline.wait_for(lambda: self.is_sent, "a copy"))

    def result(self, deadline: Deadline | None = None) -> None:
        """Wait until everything is here; from any thread, any number of times.

        Args:
            deadline: for the device alone: copies on the host come to their end by themselves.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
            Exception: a copy failed.
        """
        self.seconds = self._copy_seconds(deadline)
        if self._arrival is not None:
            self._arrival.wait("the copy of the buffers", deadline)
        if self._small is not None:
            self._small.wait(deadline)

    def _copy_seconds(self, deadline: Deadline | None) -> float:
        """Wait until weights and moments are here; returns the seconds that their copy took."""
        return self.copied.result()

    def hurry(self) -> None:
        """Stop using waits; returns at once."""

    def mark_needed(self) -> None:
        """On the training thread, before it waits for the copy."""

    def stall_seconds(self, waited_seconds: float) -> float:
        """How much of the training thread's wait this copy has cost the training."""
        return waited_seconds

    def overlap_seconds(self, host_seconds: float) -> float:
        """How much time the copy had, by the device's clock where it copies; 0: not known."""
        return host_seconds


class DeviceCopy(RunningCopy):
    """Copies after all work queued on the current stream so far; made when it is enqueued, and not yet complete.

    Args:
        stream: for the copies; its device is that of the sources.
        pairs: the copies.
        small: as of `RunningCopy`.
        beside: enqueues more that reads the sources.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        pairs: Sequence[Piece],
        small: SmallState | None,
        beside: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(small)
        self._stream = stream
        self._pairs = pairs  # keeps the sources alive until the copy is through
        self._start, self._end, self._needed = _timed_event(), _timed_event(), _timed_event()
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            stream.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(stream):
            self._start.record(stream)
            beside()  # first: it may fail for lack of memory
            for target, source in pairs:
                # Converted there: a copy that converts would wait for the device.
                target.copy_(source.to(target.dtype), non_blocking=True)
            self._end.record(stream)

    @property
    def is_sent(self) -> bool:
        """See `RunningCopy.is_sent`."""
        return reached(self._end) and super().is_sent

    def _copy_seconds(self, deadline: Deadline | None) -> float:
        """See `RunningCopy`; the seconds are of the device."""
        if deadline is None:
            with beside_captures():
                self._end.synchronize()
        else:
            deadline.wait_for(lambda: reached(self._end), "the copy of weights and moments")
        return self._seconds(self._start)

    def mark_needed(self) -> None:
        """On the training thread: what it queues from here on needs the copy to be complete."""
        self._needed.record(torch.cuda.current_stream(self._stream.device))

    def stall_seconds(self, waited_seconds: float) -> float:
        """How long a complete copy kept the device from what `mark_needed` stands before; at most as given.

        The thread may have waited longer: for steps that the device had still to compute.
        """
        if not reached(self._needed):
            return 0.0  # it is not even there yet
        return min(waited_seconds, max(0.0, self._seconds(self._needed)))

    def overlap_seconds(self, host_seconds: float) -> float:
        """From the copy's begin until the device needed it to be complete; 0 where it is not there yet."""
        if not reached(self._needed):
            return 0.0
        return _seconds_between(self._start, self._needed)

    def _seconds(self, before: torch.cuda.Event) -> float:
        return _seconds_between(before, self._end)


def _seconds_between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    with beside_captures():
        milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000.0


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub has no types


# How often to check whether the copy is needed now, while no wait comes: the update waits at most this long for the
# copy to go on, as no other thread makes it.
PATIENCE_SECONDS = 0.005
# After a copy that did not fit into the forecast waits, the next one tries the bytes that fitted, and then this
# factor more each time, while that fits.
GROWTH = 2.0
# The time until the update is the median over this many snapshots, so that one immediate save changes little.
RECENT_SNAPSHOTS = 8
# A snapshot that is needed within less than this share of that time (at the exit, or before the user changes the
# state) saw few waits, and was not hashed on its way: it measures neither what fits into them nor the copy speed.
COMPLETE_SHARE = 0.5
# Share of that time: postponed pieces are copied beside the work this long before they would be late.
MARGIN = 0.1


class Waits(Protocol):
    """Forecasts when and how long the training thread waits."""

    def remaining_seconds(self) -> float:
        """Forecast remaining seconds of the current wait; 0 while the training thread works."""

    def iteration_forecast_seconds(self) -> float:
        """Forecast of all waits of one iteration."""

    def wait(self, needed_seconds: float, timeout_seconds: float) -> object:
        """Block until a wait with that much left; false after the timeout."""


class CopyPace:
    """Plans how much of each snapshot is copied in waits, from the copies before it.

    The first one measures the copy speed, and is copied beside the training's work.

    Args:
        waits: forecasts them.
    """

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self._bytes_per_second = 0.0
        self._limit_bytes: float | None = None  # set after forecasts were too long
        self._until_update: deque[float] = deque(maxlen=RECENT_SNAPSHOTS)

    def seconds(self, count_bytes: int) -> float:
        """Expected seconds to copy so many bytes; 0 while unknown."""
        return count_bytes / self._bytes_per_second if self._bytes_per_second else 0.0

    def plan(self, total_bytes: int) -> int:
        """How many bytes of a snapshot to copy in waits: as many as they are long enough for (MoEtion, Algorithm 4)."""
        planned = min(total_bytes, self._bytes_per_second * self.waits.iteration_forecast_seconds())
        return int(planned if self._limit_bytes is None else min(planned, self._limit_bytes))

    def patience_seconds(self, left_bytes: int) -> float:
        """Seconds from the start of a snapshot for which so many bytes may be postponed."""
        return (1.0 - MARGIN) * self._usual_seconds() - self.seconds(left_bytes)

    def record(self, copy: "PacedCopy", copy_seconds: float, until_update_seconds: float) -> None:
        """Record the copy of one snapshot.

        Args:
            copy: complete.
            copy_seconds: for copying alone.
            until_update_seconds: from its beginning until it was needed.
        """
        was_complete = until_update_seconds >= COMPLETE_SHARE * self._usual_seconds()
        self._until_update.append(until_update_seconds)
        if copy.copied_bytes and copy_seconds > 0 and (was_complete or not self._bytes_per_second):
            self._bytes_per_second = copy.copied_bytes / copy_seconds
        if not was_complete:
            return
        if copy.late_bytes:  # one piece at least, to see when there are waits again
            self._limit_bytes = max(copy.bytes_in_waits, copy.largest_bytes)
        elif self._limit_bytes is not None:
            self._limit_bytes *= GROWTH

    def _usual_seconds(self) -> float:
        """From the beginning of a snapshot until the update; 0 before the first one."""
        return statistics.median(self._until_update) if self._until_update else 0.0


class PacedCopy(RunningCopy):
    """The copy of one snapshot on the host, in the thread that makes it; a caller that needs it calls `result`.

    `result` returns with everything copied, whether waits come or not. If no wait comes in time, postponed pieces are
    copied beside the work, so that the update seldom waits for them.

    Args:
        pace: plans it, and learns from it.
        small, arrival: as of `RunningCopy`.

    Attributes:
        copied_bytes: so far.
        bytes_in_waits: of these, while the training thread waited, as planned.
        late_bytes: of these, that were to be copied then, and found no wait in time.
        largest_bytes: of the largest piece.
        blocked_seconds: how long its thread has waited for waits.
    """

    def __init__(self, pace: CopyPace, small: SmallState | None = None, arrival: Arrival | None = None) -> None:
        super().__init__(small, arrival)
        self._pace = pace
        self._began = time.perf_counter()
        self._until_update: float | None = None
        self._hurried = threading.Event()
        self._postponed_bytes = self._beside_bytes = 0  # that are left
        self.copied_bytes = self.bytes_in_waits = self.late_bytes = self.largest_bytes = 0
        self.blocked_seconds = 0.0

    def divide(self, total_bytes: int) -> None:
        """The copy has so many bytes, and begins now."""
        self._postponed_bytes = self._pace.plan(total_bytes)
        self._beside_bytes = total_bytes - self._postponed_bytes

    @property
    def is_hurried(self) -> bool:
        """Whether it is needed now."""
        return self._hurried.is_set()

    def turn(self, piece_bytes: int) -> None:
        """Block until the next piece, of so many bytes, may be copied."""
        needed, started = self._pace.seconds(piece_bytes), time.perf_counter()
        while not (in_wait := self._in_wait(needed)) and self._beside_bytes <= 0 and not self._hurried.is_set():
            patience = self._began + self._pace.patience_seconds(self._postponed_bytes) - time.perf_counter()
            if patience <= 0.0:
                break
            timeout = min(patience, PATIENCE_SECONDS)
            until = time.perf_counter() + timeout
            if not self._pace.waits.wait(needed, timeout):
                # At the end of a life it returns at once with nothing: no busy loop.
                self._hurried.wait(max(until - time.perf_counter(), 0.0))
        self.blocked_seconds += time.perf_counter() - started
        if in_wait:
            self.bytes_in_waits += piece_bytes
            self._postponed_bytes -= piece_bytes
        elif self._beside_bytes > 0:
            self._beside_bytes -= piece_bytes
        else:
            self.late_bytes += piece_bytes
            self._postponed_bytes -= piece_bytes
        self.copied_bytes += piece_bytes
        self.largest_bytes = max(self.largest_bytes, piece_bytes)

    def hurry(self) -> None:
        """See `RunningCopy.hurry`."""
        self._hurried.set()

    def mark_needed(self) -> None:
        """See `RunningCopy.mark_needed`."""
        self._until_update = time.perf_counter() - self._began

    def _copy_seconds(self, deadline: Deadline | None) -> float:
        self._hurried.set()
        seconds = super()._copy_seconds(deadline)
        until_update, self._until_update = self._until_update, None
        if until_update is not None:
            self._pace.record(self, seconds, until_update)
        return seconds

    def _in_wait(self, needed_seconds: float) -> bool:
        """Whether the training thread waits for long enough, and a postponed piece is left."""
        return self._postponed_bytes > 0 and self._pace.waits.remaining_seconds() >= needed_seconds
