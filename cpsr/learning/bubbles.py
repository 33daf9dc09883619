"""When and for how long the training thread waits: other work in that time costs training nothing."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Bubbles"]

# The forecast of a place uses so many durations: enough to see what is usual, few enough to follow a change.
RECENT_DURATIONS = 16
# Quantile of the recent durations. A short forecast lets work end in time, and a single outlier does not decide.
FORECAST_QUANTILE = 0.1
# With fewer durations of a place nothing is forecast: the first include warm-ups.
MEASURED_DURATIONS = 4
# Most waits of one kind in an iteration: a loop that takes batches without a step would add places forever.
MAX_PLACES = 4096
# Recent bubbles that `beside` compares a slice with: a slice spans one or two.
REMEMBERED_BUBBLES = 32


class _Kind:
    """The waits of one kind, in their order in an iteration: the recent durations of each, and its forecast."""

    __slots__ = ("count", "durations", "forecasts")

    def __init__(self) -> None:
        self.durations: list[deque[float]] = []
        self.forecasts: list[float] = []
        self.count = 0  # of the iteration in progress

    def next_place(self) -> int:
        place = min(self.count, MAX_PLACES - 1)
        if place == len(self.durations):
            self.durations.append(deque(maxlen=RECENT_DURATIONS))
            self.forecasts.append(0.0)
        self.count += 1
        return place

    def add(self, place: int, seconds: float) -> None:
        recent = self.durations[place]
        recent.append(seconds)
        if len(recent) >= MEASURED_DURATIONS:
            self.forecasts[place] = sorted(recent)[int(FORECAST_QUANTILE * len(recent))]


class Bubbles:
    """Learns where the training thread waits in an iteration, and lets other threads work meanwhile.

    An iteration's waits come in the same order every time: a pipeline's receives, the batches of its micro-batches. So
    a wait is known by its kind and by its number in the iteration, its *place*. The forecast of a place is a low
    quantile of its recent durations, and no time before enough of them are known.

    The training thread is the one that calls `end_iteration`, and before the first call the one that creates this
    object. Waits of other threads (a user's own prefetching of batches) are ignored. No method waits for work that
    runs in a bubble.

    Attributes:
        iterations: that have ended.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._changed = threading.Condition(threading.Lock())  # guards all below; locked for microseconds only
        self._kinds: dict[str, _Kind] = {}
        self._open: tuple[_Kind, int] | None = None
        self._began = 0.0
        self._until = 0.0  # forecast end of the open wait
        self._closed = False
        self._iteration_forecast_seconds = 0.0
        self._past: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_BUBBLES)  # beginnings and ends
        self.iterations = 0

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
                kind = self._kinds[place] = _Kind()
            number = kind.next_place()
            self._open = kind, number
            self._began = perf_counter()
            self._until = self._began + kind.forecasts[number]
            self._changed.notify_all()

    def end(self) -> None:
        """The wait of the training thread ends; without an open wait nothing happens."""
        if threading.get_ident() != self._thread:
            return
        with self._changed:
            if self._open is None:
                return
            now = perf_counter()
            (kind, number), self._open = self._open, None
            self._past.append((self._began, now))
            kind.add(number, now - self._began)

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
        self._thread = threading.get_ident()
        if not self._kinds:  # no wait yet, and only this thread adds one
            self.iterations += 1
            return
        with self._changed:
            self.iterations += 1
            self._iteration_forecast_seconds = 0.0
            for kind in self._kinds.values():
                self._iteration_forecast_seconds += sum(kind.forecasts[: kind.count])
                kind.count = 0

    # On any thread

    def remaining_seconds(self) -> float:
        """Forecast rest of the open wait; 0 outside a wait, and in one that lasts longer than its forecast."""
        until = self._until
        return max(until - perf_counter(), 0.0) if self._open is not None else 0.0

    def iteration_forecast_seconds(self) -> float:
        """Forecast of all waits of an iteration like the last one; 0 before the first was complete."""
        return self._iteration_forecast_seconds

    def wait(self, needed_seconds: float, timeout_seconds: float, spared_share: float = 0.0) -> float | None:
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

    def beside(self, began: float, ended: float) -> float:
        """Seconds between two times of `time.perf_counter`, both past, in which training did not wait."""
        with self._changed:
            spans = [*self._past, (self._began, ended)] if self._open is not None else [*self._past]
        inside = sum(max(min(last, ended) - max(first, began), 0.0) for first, last in spans)
        return max(ended - began - inside, 0.0)

    def close(self) -> None:
        """End every `wait`, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
