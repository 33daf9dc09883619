"""Waits of the training thread: forecasts by a clock that is set, and the threads themselves by the real one."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.learning import bubbles as module
from cpsr.learning.bubbles import MEASURED_DURATIONS, Bubbles

PATIENCE_SECONDS = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    set_clock = Clock()
    monkeypatch.setattr(module, "perf_counter", set_clock)
    return set_clock


def wait(bubbles: Bubbles, clock: Clock, place: str, seconds: float) -> None:
    bubbles.begin(place)
    clock.now += seconds
    bubbles.end()


def iterate(bubbles: Bubbles, clock: Clock, *waits: tuple[str, float], busy_seconds: float = 1.0) -> None:
    for place, seconds in waits:
        wait(bubbles, clock, place, seconds)
    clock.now += busy_seconds
    bubbles.end_iteration()


def forecast(bubbles: Bubbles, place: str) -> float:
    bubbles.begin(place)
    seconds = bubbles.remaining_seconds()
    bubbles.end()
    return seconds


def test_each_wait_of_an_iteration_has_its_own_forecast(clock: Clock) -> None:
    bubbles = Bubbles()
    for _ in range(MEASURED_DURATIONS):
        iterate(bubbles, clock, ("grad", 0.25), ("data", 0.0625), ("grad", 0.5))
    assert bubbles.iteration_forecast_seconds() == 0.8125
    bubbles.begin("grad")
    assert bubbles.remaining_seconds() == 0.25
    clock.now += 0.125
    assert bubbles.remaining_seconds() == 0.125
    clock.now += 1.0  # longer than ever before: what is left is not known
    assert bubbles.remaining_seconds() == 0.0
    bubbles.end()
    assert bubbles.remaining_seconds() == 0.0
    assert forecast(bubbles, "data") == 0.0625
    assert forecast(bubbles, "grad") == 0.5


def test_waits_of_another_thread_are_ignored(clock: Clock) -> None:
    bubbles = Bubbles()
    other = threading.Thread(target=lambda: wait(bubbles, clock, "data", 1.0))
    other.start()
    other.join()
    assert bubbles.beside(100.0, 101.0) == 1.0
    bubbles.begin("data")
    other = threading.Thread(target=bubbles.end)
    other.start()
    other.join()
    clock.now += 1.0
    bubbles.end()
    assert bubbles.beside(100.0, 102.0) == 1.0


def test_work_beside_waits_is_known(clock: Clock) -> None:
    bubbles = Bubbles()
    wait(bubbles, clock, "grad", 2.0)  # 100 to 102
    clock.now = 103.0
    wait(bubbles, clock, "grad", 1.0)  # 103 to 104
    bubbles.end_iteration()
    assert bubbles.beside(100.5, 101.5) == 0.0
    assert bubbles.beside(101.5, 103.25) == 1.0  # across the computation between the two
    assert bubbles.beside(102.5, 102.75) == 0.25
    assert bubbles.beside(105.0, 106.0) == 1.0
    clock.now = 110.0
    bubbles.begin("grad")
    assert bubbles.beside(110.0, 111.0) == 0.0  # in the wait that is open


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), max_size=12))
def test_all_that_is_no_wait_is_beside(parts: list[tuple[float, float]]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", clock)
        bubbles = Bubbles()
        for waited, busy in parts:
            iterate(bubbles, clock, ("grad", waited), busy_seconds=busy)
    assert bubbles.beside(100.0, clock.now) == pytest.approx(sum(busy for _, busy in parts))
    assert bubbles.iterations == len(parts)


# Real threads


@pytest.fixture
def measured() -> Bubbles:
    """Waits of kind `long` are known to take 0.1 s, those of kind `short` no time."""
    bubbles = Bubbles()
    for _ in range(MEASURED_DURATIONS):
        for place, seconds in (("long", 0.1), ("short", 0.0)):
            with bubbles.waiting(place):
                time.sleep(seconds)
        bubbles.end_iteration()
    return bubbles


@pytest.fixture
def waiter(measured: Bubbles) -> Iterator[list[float | None]]:
    """What a thread found that needs 50 ms."""
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(measured.wait(0.05, PATIENCE_SECONDS)))
    thread.start()
    yield found
    measured.close()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def until(found: list[float | None]) -> float | None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not found and time.monotonic() < deadline:
        time.sleep(0.001)
    return found[0]


def test_a_thread_wakes_for_a_wait_that_is_long_enough(measured: Bubbles, waiter: list[float | None]) -> None:
    with measured.waiting("short"):
        time.sleep(0.02)  # a wait is open, but not for as long as is needed
    assert not waiter
    with measured.waiting("long"):
        assert until(waiter)
