import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.prior import (
    REACH_OF_HORIZON,
    REACH_OF_WINDOW,
    WINDOWS_ITERATIONS,
    context_of,
    reaches,
    settings,
    windows,
)
from cpsr.predictor.protocol import HistoryEntry, Target

PEAK = 1e-3
RUN = 3000


def cosine(iteration: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * iteration / RUN))


def series(newest: int, interval: int, count: int = 100) -> list[HistoryEntry]:
    iterations = range(max(newest - (count - 1) * interval, newest % interval), newest + 1, interval)
    return [HistoryEntry(iteration, float(iteration), cosine(iteration)) for iteration in iterations]


def test_what_is_known_of_a_failure() -> None:
    context = context_of(Target(1542, 1.0, PEAK), series(1500, 50))
    assert (context.horizon_iterations, context.age_iterations, context.interval_iterations) == (42, 1500, 50)
    assert context.learning_rate_ratio == pytest.approx(0.5)


def test_a_learning_rate_of_zero_throughout_counts_as_not_decayed() -> None:
    entries = [HistoryEntry(iteration, 0.0, 0.0) for iteration in (10, 20, 30)]
    assert context_of(Target(35, 0.0, 0.0), entries).learning_rate_ratio == 1.0


@pytest.mark.parametrize(
    ("newest", "interval", "count", "expected"),
    [
        (1500, 50, 100, [100, 150, 200, 300]),
        (1500, 100, 100, [200, 300]),
        (1500, 50, 6, [100, 150, 200]),  # five intervals are there
        (500, 50, 100, [100, 150, 200]),  # half of its age
        (60, 20, 4, [40]),  # less than the smallest window, but three checkpoints
        (900, 300, 4, [600]),  # three checkpoints, further apart than the largest window
    ],
)
def test_windows_hold_three_checkpoints_and_no_more_than_there_is(
    newest: int, interval: int, count: int, expected: list[int]
) -> None:
    assert windows(series(newest, interval, count)) == expected


@given(st.integers(3, 40), st.integers(1, 400), st.integers(1, 300))
def test_there_is_always_a_setting(count: int, interval: int, horizon: int) -> None:
    entries = [HistoryEntry(place * interval, float(place), PEAK) for place in range(1, count + 1)]
    target = Target(entries[-1].iteration + horizon, float(count + 1), PEAK)
    context = context_of(target, entries)
    found = settings(context, windows(entries))
    assert found
    for setting in found:
        furthest = max(REACH_OF_WINDOW[-1] * setting.window_iterations, horizon)
        assert REACH_OF_HORIZON[0] * horizon <= setting.reach_iterations <= furthest
        fits = [entry for entry in entries if entry.iteration >= entries[-1].iteration - setting.window_iterations]
        assert len(fits) >= 3


def test_a_gain_fixes_how_far_the_line_is_followed() -> None:
    context = context_of(Target(1540, 1.0, PEAK), series(1500, 50))
    found = settings(context, [300], gain=2.0, directions=("line", "vitp"))
    assert {setting.reach_iterations for setting in found} == {80.0}
    assert {setting.direction for setting in found} == {"line", "vitp"}


def test_reaches_ascend_without_repeats() -> None:
    found = reaches(40.0, float(WINDOWS_ITERATIONS[-1]))
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (20.0, 150.0)
