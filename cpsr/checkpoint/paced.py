"""Copying a snapshot on the host in pieces: as much as fits into the training thread's waits, the rest beside its work.

Source: MoEtion, section 5.3, Algorithm 4: split into what is copied in the bubbles of a pipeline, and the rest.
"""

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy
import torch
from numpy.typing import NDArray

from cpsr.checkpoint.running_copy import Piece, RunningCopy
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline

__all__ = ["CopyPace", "PacedCopy", "Split", "Waits", "bytes_in_waits", "bytes_of"]

# How often to check whether the copy is needed now, while no wait comes: a caller that needs the copy thread waits
# at most this long.
PATIENCE_SECONDS = 0.02
# Where `wait` returns at once with nothing, as at the end of a life: no busy loop.
RETRY_SECONDS = 0.005
# After a copy that did not fit into the forecast waits, the next one tries the bytes that fitted, and then this
# factor more each time, while that fits.
GROWTH = 2.0
# The time until the update is the median over this many snapshots, so that one immediate save changes little.
RECENT_SNAPSHOTS = 8
# A snapshot that is needed within less than this share of that time (at the exit, or before the user changes the
# state) saw few waits, and does not measure what fits into them.
COMPLETE_SHARE = 0.5
# Share of that time: postponed pieces are copied beside the work this long before they would be late.
MARGIN = 0.1

When = Literal["in_waits", "beside", "late", "at_once"]


class Waits(Protocol):
    """Forecasts when and how long the training thread waits."""

    def remaining_seconds(self) -> float:
        """Forecast remaining seconds of the current wait; 0 while the training thread works."""

    def iteration_forecast_seconds(self) -> float:
        """Forecast of all waits of one iteration."""

    def wait(self, needed_seconds: float, timeout_seconds: float) -> bool:
        """Block until a wait with that much left; False after the timeout."""


@dataclass(frozen=True)
class Split:
    """When the bytes of a snapshot were copied.

    Attributes:
        in_waits: while the training thread waited.
        beside: while it worked, as planned.
        late: while it worked, because the expected waits had not come in time.
        at_once: while the update waited, because the expected waits had not come before it.
    """

    in_waits: int = 0
    beside: int = 0
    late: int = 0
    at_once: int = 0


def bytes_in_waits(total_bytes: int, copy_seconds: float, waits_seconds: float) -> int:
    """How much of a snapshot to copy while the training thread waits (MoEtion, Algorithm 4).

    All of it where that takes less time than the waits, else `floor(n * t_bubble / t_ss)`.

    Args:
        total_bytes: n, of the snapshot.
        copy_seconds: t_ss, for all of it.
        waits_seconds: t_bubble, of one iteration.
    """
    if copy_seconds < waits_seconds:
        return total_bytes
    return int(total_bytes * waits_seconds / copy_seconds) if waits_seconds > 0 else 0


class CopyPace:
    """Plans each snapshot's split from the copies before it.

    The first one measures the copy speed, and is copied beside the training's work.

    Args:
        waits: forecasts them.
    """

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self._bytes_per_second = 0.0
        self._limit_bytes: int | None = None  # set after forecasts were too long
        self._until_update: deque[float] = deque(maxlen=RECENT_SNAPSHOTS)

    def seconds(self, count_bytes: int) -> float:
        """Expected seconds to copy so many bytes; 0 while unknown."""
        return count_bytes / self._bytes_per_second if self._bytes_per_second else 0.0

    def plan(self, total_bytes: int) -> int:
        """How many bytes of a snapshot to copy in waits."""
        if not self._bytes_per_second:
            return 0
        planned = bytes_in_waits(total_bytes, self.seconds(total_bytes), self.waits.iteration_forecast_seconds())
        return planned if self._limit_bytes is None else min(planned, self._limit_bytes)

    def patience_seconds(self, left_bytes: int) -> float:
        """Seconds from the start of a snapshot for which so many bytes may be postponed."""
        return (1.0 - MARGIN) * self._usual_seconds() - self.seconds(left_bytes)

    def record(self, split: Split, copy_seconds: float, until_update_seconds: float, piece_bytes: int) -> None:
        """Record the copy of one snapshot.

        Args:
            split: when its bytes were copied.
            copy_seconds: for copying alone.
            until_update_seconds: from its beginning until it was needed.
            piece_bytes: of the largest piece.
        """
        total = split.in_waits + split.beside + split.late + split.at_once
        if total and copy_seconds > 0:
            self._bytes_per_second = total / copy_seconds
        was_complete = until_update_seconds >= COMPLETE_SHARE * self._usual_seconds()
        self._until_update.append(until_update_seconds)
        if not was_complete:
            return
        if split.late or split.at_once:
            self._limit_bytes = max(split.in_waits, piece_bytes)  # one piece, to see when there are waits again
        elif self._limit_bytes is not None:
            self._limit_bytes = int(GROWTH * self._limit_bytes)

    def _usual_seconds(self) -> float:
        """Seconds that a snapshot has until the update; 0 before the first one."""
        return statistics.median(self._until_update) if self._until_update else 0.0


class PacedCopy(RunningCopy):
    """The copy of one snapshot. Its thread executes `run`; a caller that needs it complete calls `result`, and helps.

    `result` returns with everything copied, whether waits come or not. If no wait comes in time, postponed pieces are
    copied beside the work, so that the update seldom waits for them.

    Args:
        pace: plans the split, and learns from it.
        small, arrival: as of `RunningCopy`.
    """

    def __init__(self, pace: CopyPace, small: SmallState | None = None, arrival: Arrival | None = None) -> None:
        super().__init__(small, arrival)
        self._pace = pace
        self._began = time.perf_counter()
        self._for_waits: deque[Piece] = deque()
        self._for_work: deque[Piece] = deque()
        self._prepared = threading.Event()
        self._hurried = threading.Event()
        self._changed = threading.Condition(threading.Lock())  # guards all below
        self._in_flight = 0
        self._largest_bytes = self._put_off_bytes = 0
        self._copied: Counter[str] = Counter()  # bytes, by the names of `Split`
        self._seconds = 0.0
        self._error: Exception | None = None
        self._recorded = False

    @property
    def split(self) -> Split:
        """When the bytes copied so far were copied."""
        return Split(**self._copied)

    def run(self, prepare: Callable[[], Sequence[Piece]]) -> None:
        """Copy until all is done; returns soon after another thread has copied the rest.

        Args:
            prepare: returns the pieces; `result` raises its exceptions.
        """
        try:
            self._divide(prepare())
        except Exception as error:  # noqa: BLE001 - raised again by `result()`
            self._error = error
        finally:
            self._prepared.set()
        needed = self._pace.seconds(self._largest_bytes)
        while self._for_waits or self._for_work:
            when = self._when(needed)
            if when is not None and self._copy_next(self._for_waits, when):
                continue
            if not self._copy_next(self._for_work, "beside"):
                self._wait(needed)

    def hurry(self) -> None:
        """See `RunningCopy.hurry`."""
        self._hurried.set()

    def _copy_seconds(self, deadline: Deadline | None) -> float:
        """Copy the rest, and wait for other threads' pieces; returns the seconds that copying took, over all threads.

        Raises:
            Exception: what `prepare` or a copy raised.
        """
        until_update = time.perf_counter() - self._began
        self._hurried.set()
        self._prepared.wait()
        while self._copy_next(self._for_waits, "at_once") or self._copy_next(self._for_work, "beside"):
            pass
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0)
            if self._error is not None:
                raise self._error
            if not self._recorded:
                self._recorded = True
                self._pace.record(self.split, self._seconds, until_update, self._largest_bytes)
            return self._seconds

    def _divide(self, pieces: Sequence[Piece]) -> None:
        sizes = [source.nbytes for _, source in pieces]
        left = self._pace.plan(sum(sizes))
        self._largest_bytes = max(sizes, default=0)
        for piece, size in zip(pieces, sizes, strict=True):
            left -= size
            if left >= 0:
                self._for_waits.append(piece)
                self._put_off_bytes += size
            else:
                self._for_work.append(piece)

    def _when(self, needed_seconds: float) -> When | None:
        """The category of `Split` for a postponed piece now; None: it stays postponed."""
        if self._hurried.is_set():
            return "at_once"
        if self._pace.waits.remaining_seconds() >= needed_seconds:
            return "in_waits"
        return "late" if self._patience_seconds() <= 0.0 else None

    def _patience_seconds(self) -> float:
        return self._began + self._pace.patience_seconds(self._put_off_bytes) - time.perf_counter()

    def _wait(self, needed_seconds: float) -> None:
        """Block until the next wait of the training thread, while there is time."""
        patience = min(self._patience_seconds(), PATIENCE_SECONDS)
        if patience > 0 and not self._hurried.is_set() and not self._pace.waits.wait(needed_seconds, patience):
            self._hurried.wait(min(patience, RETRY_SECONDS))

    def _copy_next(self, pieces: deque[Piece], when: When) -> bool:
        """Copy one piece; False where there is none."""
        with self._changed:
            if not pieces:
                return False
            piece = pieces.popleft()
            self._in_flight += 1
        error, started = None, time.perf_counter()
        try:
            _copy(*piece)
        except Exception as raised:  # noqa: BLE001 - raised again by `result()`
            error = raised
        seconds = time.perf_counter() - started
        with self._changed:
            self._in_flight -= 1
            self._seconds += seconds
            self._error = self._error or error
            self._copied[when] += piece[1].nbytes
            self._put_off_bytes -= piece[1].nbytes if pieces is self._for_waits else 0
            self._changed.notify_all()
        return True


@torch.no_grad()
def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy with this thread alone: torch's own copy would start a second team of threads.

    The training thread would then wait at barriers for its displaced threads.
    """
    if source.is_contiguous() and source.dtype == target.dtype:
        numpy.copyto(bytes_of(target), bytes_of(source))
    else:
        target.copy_(source)


def bytes_of(tensor: torch.Tensor) -> NDArray[numpy.uint8]:
    """The memory of a contiguous tensor of the host."""
    array: NDArray[numpy.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
