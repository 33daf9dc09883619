import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.calibration import (
    FEATURES,
    REACH_OF_HORIZON,
    REACH_OF_WINDOW,
    Context,
    Expected,
    Setting,
    Table,
    candidates,
    context_of,
    of_part,
    table,
    windows,
)
from cpsr.predictor.protocol import Forecast, HistoryEntry, Target

CONTEXT = Context(horizon_iterations=42, age_iterations=1500, interval_iterations=50, learning_rate_ratio=0.5)
SETTING = Setting(window_iterations=300, reach_iterations=120)


def small_table() -> Table:
    """Following the line is expected to save half of the reach."""
    mean = numpy.zeros(len(FEATURES))
    mean[FEATURES.index("horizon")] = 1.0
    mean[FEATURES.index("reach")] = -0.5
    return Table(mean, 0.01 * numpy.eye(len(FEATURES)), 5.0, {"recoveries": 3})


def test_a_part_of_the_state_costs_its_share() -> None:
    part = Expected(40.0, 12.0).of_part(0.25)
    assert (part.end_cost_iterations, part.deviation_iterations) == (10.0, 3.0)
    settings = {"expected_end_cost_iterations": 36.0, "expected_deviation_iterations": 12.0, "gain": 2.0}
    charged = of_part(Forecast("line", True, {}, 40.0, "", settings), 0.25)  # one operator's own series costs more
    assert (charged.expected_end_cost_iterations, charged.expected_deviation_iterations) == (10.0, 3.0)
    assert charged.settings == {
        "expected_end_cost_iterations": 9.0,
        "expected_deviation_iterations": 3.0,
        "gain": 2.0,
        "lost_share": 0.25,
    }
    unknown = of_part(Forecast("x", True, {}, 40.0, ""), 0.25)
    assert (unknown.expected_end_cost_iterations, unknown.settings) == (10.0, {"lost_share": 0.25})


def test_the_lowest_expectation_among_the_safe_settings_is_chosen() -> None:
    covariance = numpy.zeros((len(FEATURES), len(FEATURES)))
    covariance[FEATURES.index("(reach / age)**2 * 200"), FEATURES.index("(reach / age)**2 * 200")] = 1.0
    prior = Table(small_table().mean, covariance, 5.0, {})
    young = replace(CONTEXT, age_iterations=300)
    near, far, reckless = (replace(SETTING, reach_iterations=reach) for reach in (20.0, 60.0, 400.0))
    bounds = [prior.expected(young, setting).bound(1.0) for setting in (near, far, reckless)]
    assert max(bounds[:2]) < young.horizon_iterations < bounds[2]
    assert prior.best(young, [near, far, reckless], 1.0)[0] == far


def test_the_shipped_table_is_usable() -> None:
    shipped = table()
    assert shipped.mean.shape == (len(FEATURES),)
    assert numpy.linalg.eigvalsh(shipped.covariance).min() > 0.0
    assert shipped.noise_iterations > 0.0
    assert shipped.source["score"] == "end cost"
    expected = shipped.expected(CONTEXT, replace(SETTING, reach_iterations=0.0))
    assert 0.3 * 42 < expected.end_cost_iterations < 2.0 * 42  # the checkpoint as it is: about the horizon


PEAK = 1e-3
RUN = 3000


def cosine(iteration: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * iteration / RUN))


def series(newest: int, interval: int, count: int = 100) -> list[HistoryEntry]:
    iterations = range(max(newest - (count - 1) * interval, newest % interval), newest + 1, interval)
    return [HistoryEntry(iteration, float(iteration), cosine(iteration)) for iteration in iterations]


@pytest.mark.parametrize(
    ("newest", "interval", "count", "expected"),
    [
        (1500, 50, 100, [100, 150, 200, 300]),
        (1500, 50, 6, [100, 150, 200]),  # five intervals are there
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
    found = candidates(context, windows(entries))
    assert found
    for setting in found:
        furthest = max(REACH_OF_WINDOW[-1] * setting.window_iterations, horizon)
        assert REACH_OF_HORIZON[0] * horizon <= setting.reach_iterations <= furthest
        fits = [entry for entry in entries if entry.iteration >= entries[-1].iteration - setting.window_iterations]
        assert len(fits) >= 3
