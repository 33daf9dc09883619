"""When and for how long the training thread waits: other work in that time costs training nothing."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic, perf_counter
from typing import Any

from cpsr.checkpoint.paced import CopyAccount
from cpsr.journal import BubbleRow, RankJournal

__all__ = ["BubbleAccount", "BubbleLog", "Bubbles"]

# The forecast of a place uses so many durations: enough to see what is usual, few enough to follow a change.
RECENT_DURATIONS = 16
# Quantile of the recent durations. A short forecast lets work end in time, and a single outlier does not decide.
FORECAST_QUANTILE = 0.1
# With fewer durations of a place, its share of the schedule is used: the first durations include warm-ups.
MEASURED_DURATIONS = 4
# Most waits of one kind in an iteration: a loop that takes batches without a step would add places forever.
MAX_PLACES = 4096
# Recent bubbles that `worked` compares a slice with: a slice spans one or two.
REMEMBERED_BUBBLES = 32
# A row of the journal covers at least a minute, and a thousandth of the life so far. A life of a month then has 5000
# rows per rank, of some 100 bytes each, instead of one per checkpoint.
ROW_SECONDS_MIN = 60.0
ROW_LIFE_SHARE = 1e-3


@dataclass(frozen=True)
class BubbleAccount:
    """Totals of the bubbles of a life so far, and of the work inside and outside of them.

    Attributes:
        iterations: step boundaries seen.
        bubble_seconds: how long the training thread waited.
        used_seconds: work inside bubbles.
        late_seconds: from the end of a bubble to the end of work that began in it.
        outside_seconds: work that began outside.
        slices: pieces of work.
        late_slices: those that ran past the end of their bubble.
    """

    iterations: int = 0
    bubble_seconds: float = 0.0
    used_seconds: float = 0.0
    late_seconds: float = 0.0
    outside_seconds: float = 0.0
    slices: int = 0
    late_slices: int = 0

    def summary(self) -> str:
        """One sentence for people."""
        return (
            f"in {self.iterations} iterations training waited {self.bubble_seconds:.2f} s; the predictor worked "
            f"{self.used_seconds:.2f} s of that, {self.late_seconds:.3f} s past the end of a wait "
            f"({self.late_slices} of {self.slices} pieces of work) and {self.outside_seconds:.2f} s outside"
        )


class _Place:
    """The n-th wait of one kind in an iteration."""

    __slots__ = ("_durations", "measured_seconds", "share")

    def __init__(self, share: float) -> None:
        self._durations: deque[float] = deque(maxlen=RECENT_DURATIONS)
        self.share = share
        self.measured_seconds: float | None = None

    def add(self, seconds: float) -> None:
        self._durations.append(seconds)
        if len(self._durations) >= MEASURED_DURATIONS:
            ordered = sorted(self._durations)
            self.measured_seconds = ordered[int(FORECAST_QUANTILE * len(ordered))]

    def forecast_seconds(self, iteration_seconds: float) -> float:
        return self.share * iteration_seconds if self.measured_seconds is None else self.measured_seconds


class _Kind:
    """The waits of one kind, in their order in an iteration."""

    __slots__ = ("_shares", "count", "places")

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self.places: list[_Place] = []
        self.count = 0  # of the iteration in progress

    def next(self) -> _Place:
        number = min(self.count, MAX_PLACES - 1)
        if number == len(self.places):
            self.places.append(_Place(self._shares[number] if number < len(self._shares) else 0.0))
        self.count += 1
        return self.places[number]


class Bubbles:
    """Learns where the training thread waits in an iteration, and lets other threads work meanwhile.

    An iteration's waits come in the same order every time: a pipeline's receives, the batches of its micro-batches. So
    a wait is known by its kind and by its number in the iteration, its *place*. The forecast of a place is a low
    quantile of its recent durations. Before enough of them are known, it is the place's share of an iteration by the
    schedule, of the shortest iteration so far; a place that no schedule knows is then forecast to last for no time.

    The training thread is the one that calls `end_iteration`, and before the first call the one that creates this
    object. Waits of other threads (a user's own prefetching of batches) are ignored. No method waits for work that
    runs in a bubble.

    Args:
        shares: kind of wait -> the share of an iteration that each of its waits should take, in their order
            (`cpsr.learning.pipeline_schedule`).
    """

    def __init__(self, shares: Mapping[str, Sequence[float]] | None = None) -> None:
        self._shares = shares or {}
        self._thread = threading.get_ident()
        self._changed = threading.Condition(threading.Lock())  # guards all below; locked for microseconds only
        self._kinds: dict[str, _Kind] = {}
        self._open: _Place | None = None
        self._began = 0.0
        self._until = 0.0  # forecast end of the open wait
        self._closed = False
        self._iteration_began = perf_counter()
        self._shortest_iteration_seconds = 0.0
        self._iteration_forecast_seconds = 0.0
        self._past: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_BUBBLES)  # beginnings and ends
        self._iterations = self._slices = self._late_slices = 0
        self._bubble_seconds = self._used_seconds = self._late_seconds = self._outside_seconds = 0.0

    # On the training thread

    def begin(self, place: str) -> None:
        """The training thread begins to wait.

        Args:
            place: the kind of wait; its number in the iteration is counted here.
        """
        if threading.get_ident() != self._thread:
            return
        with self._changed:
            kind = self._kinds.get(place)
            if kind is None:
                kind = self._kinds[place] = _Kind(self._shares.get(place, ()))
            self._open = kind.next()
            self._began = perf_counter()
            self._until = self._began + self._open.forecast_seconds(self._shortest_iteration_seconds)
            self._changed.notify_all()

    def end(self) -> None:
        """The wait of the training thread ends; without an open wait nothing happens."""
        if threading.get_ident() != self._thread:
            return
        with self._changed:
            if self._open is None:
                return
            now = perf_counter()
            place, self._open = self._open, None
            self._past.append((self._began, now))
            self._bubble_seconds += now - self._began
            place.add(now - self._began)

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """The training thread waits inside the block; see `begin`."""
        self.begin(place)
        try:
            yield
        finally:
            self.end()

    def end_iteration(self) -> None:
        """A step is complete: places are counted from 0 again."""
        now = perf_counter()
        self._thread = threading.get_ident()
        with self._changed:
            seconds, self._iteration_began = now - self._iteration_began, now
            # Not the first, which began before training did.
            if self._iterations == 1 or (self._iterations > 1 and seconds < self._shortest_iteration_seconds):
                self._shortest_iteration_seconds = seconds
            self._iterations += 1
            forecast = 0.0
            for kind in self._kinds.values():
                for place in kind.places[: kind.count]:
                    forecast += place.forecast_seconds(self._shortest_iteration_seconds)
                kind.count = 0
            self._iteration_forecast_seconds = forecast

    # On any thread

    def remaining_seconds(self) -> float:
        """Forecast rest of the open wait; 0 outside a wait, and in one that lasts longer than its forecast."""
        until = self._until
        return max(until - perf_counter(), 0.0) if self._open is not None else 0.0

    def iteration_forecast_seconds(self) -> float:
        """Forecast of all waits of an iteration like the last one; 0 before the first was complete."""
        return self._iteration_forecast_seconds

    def wait(self, needed_seconds: float, timeout_seconds: float) -> bool:
        """As `entered`, but return whether training waits."""
        return self.entered(needed_seconds, timeout_seconds) is not None

    def entered(self, needed_seconds: float, timeout_seconds: float, spared_share: float = 0.0) -> float | None:
        """Block a worker thread until training waits, with at least that much time left by the forecast.

        Args:
            needed_seconds: that the work takes.
            timeout_seconds: how long to block at most.
            spared_share: share of each forecast, at its end, that is left unused.

        Returns:
            A time of `time.perf_counter` that lies within a wait of the training; the scheduler or the interpreter's
            lock may delay the work after it. None after the timeout, or once this object is closed.
        """

        def has_room() -> bool:
            if self._open is None:
                return False
            until = self._until - spared_share * (self._until - self._began)
            return until - perf_counter() >= needed_seconds

        with self._changed:
            self._changed.wait_for(lambda: self._closed or has_room(), timeout_seconds)
            return perf_counter() if not self._closed and has_room() else None

    def worked(self, began: float, ended: float) -> float:
        """Account for work that a worker thread did between these two times of `time.perf_counter`.

        Returns:
            Seconds of it outside of bubbles.
        """
        with self._changed:
            spans = [*self._past, (self._began, ended)] if self._open is not None else [*self._past]
            inside = sum(max(min(last, ended) - max(first, began), 0.0) for first, last in spans)
            began_inside = any(first <= began < last for first, last in spans)
            rest = max(ended - began - inside, 0.0)
            self._slices += 1
            self._used_seconds += inside
            if not began_inside:
                self._outside_seconds += rest
            elif not any(first <= began and ended <= last for first, last in spans):
                self._late_slices += 1
                self._late_seconds += rest
        return rest

    def account(self) -> BubbleAccount:
        """What happened since the start."""
        with self._changed:
            return BubbleAccount(
                self._iterations,
                self._bubble_seconds,
                self._used_seconds,
                self._late_seconds,
                self._outside_seconds,
                self._slices,
                self._late_slices,
            )

    def close(self) -> None:
        """End every `wait`, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BubbleLog:
    """Writes one rank's rows into the journal, on its training thread: a lock, a subtraction and an append each.

    The first checkpoint of a life brings a row, however early it comes.

    Args:
        bubbles: the waits of the rank.
        copied: returns the account of all snapshot copies so far; None where they wait for nothing.
        journal: of this rank.
    """

    def __init__(self, bubbles: Bubbles, copied: Callable[[], CopyAccount | None], journal: RankJournal) -> None:
        self._bubbles = bubbles
        self._copied = copied
        self._journal = journal
        self._recorded, self._recorded_copied = bubbles.account(), copied()
        self._began = self._recorded_at = monotonic()
        self._due_seconds = 0.0

    def at_checkpoint(self, iteration: int) -> None:
        """Record a row at a checkpoint, if the last one is long enough ago."""
        if monotonic() - self._recorded_at >= self._due_seconds:
            self.record(iteration)

    def record(self, iteration: int) -> None:
        """Record what happened since the last row; if nothing did, the next row covers this time too."""
        now, before = monotonic(), self._recorded
        account, copied = self._bubbles.account(), self._copied()
        if account.bubble_seconds == before.bubble_seconds and account.slices == before.slices:
            return
        since = {name: value - getattr(before, name) for name, value in asdict(account).items()}
        copies: dict[str, Any] = {}
        if copied is not None:
            earlier = self._recorded_copied or CopyAccount()
            copies = {
                "copied_seconds": copied.in_waits_seconds - earlier.in_waits_seconds,
                "copied_bytes": copied.in_waits_bytes - earlier.in_waits_bytes,
                "copied_beside_bytes": copied.other_bytes - earlier.other_bytes,
            }
        journal, seconds = self._journal, now - self._recorded_at
        row: dict[str, Any] = {
            "life": journal.life,
            "rank": journal.rank,
            "iteration": iteration,
            "seconds": seconds,
            **since,
        }
        journal.record(BubbleRow(**row, **copies))
        self._recorded, self._recorded_copied, self._recorded_at = account, copied, now
        self._due_seconds = max(ROW_SECONDS_MIN, ROW_LIFE_SHARE * (now - self._began))
